"""Earlier turns (LLMA, section 2.3): a revised answer repeats most of the one before, which the prompt holds.

    python docs/examples/earlier_turns.py

Nothing has to be sent along: a conversation's earlier turns are part of its prompt, and the prompt is copied from.
"""

from __future__ import annotations

from batchserve import LLM, RequestOutput, SamplingParams, SpeculationParams

CODE = """\
def add_value(self, key, value):
    if key in self.values:
        raise KeyError(key)
    self.values[key] = value
    self.order.append(key)
    return value"""
TURNS = (
    f'Add the docstring "Store a value under its key" to this code.\n{CODE}',
    "Delete the line `self.order.append(key)` from this code.\n{answer}",
)


def tokens_per_step(output: RequestOutput) -> float:
    """Each step gives the drafts that were accepted and one token more, which an answer's last step may lack."""
    tokens, accepted = output.usage.completion_tokens, output.usage.accepted_draft_tokens
    return tokens / max(1, tokens - accepted)


def main() -> None:
    llm = LLM("bundled", dtype="float32", drafter="reference")
    greedy = SamplingParams(temperature=0.0, max_tokens=160)
    answer = ""
    for number, turn in enumerate(TURNS, 1):
        prompt = f"<|user|>{turn.format(answer=answer)}<|assistant|>"
        speculation = SpeculationParams(draft_scope="request")
        (output,) = llm.generate(prompt, greedy, speculation=speculation, show_progress=False)
        answer = output.text
        print(f"turn {number}: {tokens_per_step(output):.2f} tokens a step\n{answer}\n")


if __name__ == "__main__":
    main()
