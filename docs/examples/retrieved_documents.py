"""Retrieved documents (LLMA, section 2.3): the answer quotes a document, so it is copied from there and verified.

    python docs/examples/retrieved_documents.py

Documents in the prompt are found without doing anything. Texts that the model does not read can be sent along as
references: here an earlier record, written in the form that is asked for.
"""

from __future__ import annotations

from batchserve import LLM, RequestOutput, SamplingParams, SpeculationParams

MANUAL = """\
open_cache: Open the cache file and return its entries as a dictionary.
flush_queue: Write every pending message of the queue to the given stream.
split_header: Split a header line into its name and a list of parameters.
close_session: Close the session and release the connection that it holds."""
QUESTION = f"<|user|>Answer from the documents.\n{MANUAL}\nWhat does flush_queue do?<|assistant|>"
RECORD = "<|user|>Convert this record to JSON.\nname: socket reader\ncity: handler-417\nversion: 3108<|assistant|>"
EARLIER = '{\n  "name": "queue writer",\n  "city": "worker-22",\n  "version": 11\n}'


def tokens_per_step(output: RequestOutput) -> float:
    """Each step gives the drafts that were accepted and one token more, which an answer's last step may lack."""
    tokens, accepted = output.usage.completion_tokens, output.usage.accepted_draft_tokens
    return tokens / max(1, tokens - accepted)


def main() -> None:
    llm = LLM("bundled", dtype="float32", drafter="reference")
    greedy = SamplingParams(temperature=0.0, max_tokens=120)
    for title, prompt, references in (
        ("documents in the prompt", QUESTION, ()),
        ("nothing to quote from", RECORD, ()),
        ("the same with a reference", RECORD, (EARLIER,)),
    ):
        speculation = SpeculationParams(references=references, draft_scope="request")
        (output,) = llm.generate(prompt, greedy, speculation=speculation, show_progress=False)
        print(f"{title}: {tokens_per_step(output):.2f} tokens a step\n{output.text}\n")


if __name__ == "__main__":
    main()
