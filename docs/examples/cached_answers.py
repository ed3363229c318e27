"""Cached answers to similar queries (LLMA, section 2.3): what was answered before is a draft of what is asked again.

    python docs/examples/cached_answers.py

When a request has ended, its answer is kept under its draft scope. Later requests of the same scope whose prompts
overlap copy from it; requests of another scope never do.
"""

from __future__ import annotations

from batchserve import LLM, RequestOutput, SamplingParams, SpeculationParams

PROMPT = """<|user|>Convert this record to JSON.
name: {name}
city: handler-417
status: closed
owner: thread manager
version: {version}
path: default buffer<|assistant|>"""


def tokens_per_step(output: RequestOutput) -> float:
    """Each step gives the drafts that were accepted and one token more, which an answer's last step may lack."""
    tokens, accepted = output.usage.completion_tokens, output.usage.accepted_draft_tokens
    return tokens / max(1, tokens - accepted)


def main() -> None:
    llm = LLM("bundled", dtype="float32", drafter="reference")
    greedy = SamplingParams(temperature=0.0, max_tokens=120)
    for name, version, scope in (
        ("socket reader", 3108, "team-a"),
        ("stream writer", 52, "team-a"),
        ("parse option", 417, "team-a"),
        ("parse option", 417, "team-b"),
    ):
        prompt = PROMPT.format(name=name, version=version)
        speculation = SpeculationParams(draft_scope=scope)
        (output,) = llm.generate(prompt, greedy, speculation=speculation, show_progress=False)
        print(f"{scope}, {name}: {tokens_per_step(output):.2f} tokens a step\n{output.text}\n")


if __name__ == "__main__":
    main()
