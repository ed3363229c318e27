"""Tokens per step of Lookahead Decoding against the rows it takes: its paper's figure 4 and table 3, on our model.

    python -m benchmarks.jacobi [--prompts 24] [--max-tokens 128]

The bundled model answers held-out prompts of its own tasks, greedy, eight at a time, through the engine. S is what a
step emits after the first token, which comes from the prompt's forward; (W + G)(N - 1) is the most rows a step takes.
No times: rows are what a larger model on an accelerator would have to spare.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.common import chat_prompts, write_results

from batchserve.config import EngineConfig  # isort: skip
from batchserve.draft.base import Drafter, NullDrafter
from batchserve.draft.jacobi import JacobiDrafter
from batchserve.engine.engine_core import Event
from batchserve.errors import BatchserveError
from batchserve.startup.build import BuiltEngine, build_engine
from batchserve.types import FinishReason, SamplingParams, SpeculationParams

WINDOWS = (5, 10, 15, 20, 30)
NGRAMS = (3, 4, 5, 6, 7)
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """N = 0 is plain decoding. The paper calls n-grams of the prompt "prompt as reference"."""

    window: int = 0
    ngram: int = 0
    guesses: int = 0
    prompt_ngrams: bool = False

    @property
    def rows(self) -> int:
        return (self.window + self.guesses) * max(0, self.ngram - 1)

    def drafter(self) -> Drafter:
        if self.ngram == 0:
            return NullDrafter()
        return JacobiDrafter(self.window, self.ngram, self.guesses, prompt_ngrams=self.prompt_ngrams)


def figure_4() -> Iterator[Setting]:
    """G = W, n-grams of the window only."""
    for ngram in NGRAMS:
        for window in WINDOWS:
            yield Setting(window, ngram, window)


# After table 3: no drafts; the prompt's n-grams with next to no window; the same window without them; one candidate a
# step; both halves in balance, without and with the prompt.
TABLE_3 = (
    Setting(),
    Setting(1, 10, 3, prompt_ngrams=True),
    Setting(1, 5, 10, prompt_ngrams=True),
    Setting(1, 5, 30, prompt_ngrams=True),
    Setting(1, 5, 30),
    Setting(30, 5, 1),
    Setting(15, 5, 15),
    Setting(15, 5, 15, prompt_ngrams=True),
    Setting(30, 5, 30),
    Setting(30, 5, 30, prompt_ngrams=True),
)


def run(engine: BuiltEngine, setting: Setting, prompts: list[str], max_tokens: int) -> tuple[dict[str, Any], list[Any]]:
    """One row of the results, and the answers."""
    core = engine.core
    core.drafts.drafter = setting.drafter()
    answers: dict[str, list[int]] = {}
    steps = tokens = rows = 0

    def collect(events: list[Event]) -> None:
        nonlocal steps, tokens
        for request, event in events:
            if isinstance(event, BatchserveError):
                raise event
            is_first = request.request_id not in answers
            answers.setdefault(request.request_id, []).extend(event.token_ids)
            has_eos = event.finish_reason is FinishReason.STOP
            steps += not is_first
            tokens += len(event.token_ids) + has_eos - is_first

    launch = core.executor.launch

    def counting(batch: Any) -> Any:
        nonlocal rows
        rows += sum(part.num_draft_tokens for part in batch.requests)
        return launch(batch)

    core.emit = collect
    core.executor.launch = counting  # type: ignore[method-assign]
    try:
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            speculation = SpeculationParams(max_draft_tokens=setting.rows)
            core.add(engine.processor.make_request(str(i), engine.processor.tokenize(prompt), params, speculation, 0.0))
        while core.has_work:
            core.step()
    finally:
        core.executor.launch = launch  # type: ignore[method-assign]
    row = {
        "window": setting.window,
        "ngram": setting.ngram,
        "guesses": setting.guesses,
        "prompt_ngrams": setting.prompt_ngrams,
        "most_rows": setting.rows,
        "mean_rows": round(rows / steps, 1),
        "tokens_per_step": round(tokens / steps, 3),
        "steps": steps,
        "tokens": tokens,
    }
    return row, [answers[str(i)] for i in range(len(prompts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    prompts = chat_prompts(args.prompts, seed=7)
    most_rows = max(setting.rows for setting in (*figure_4(), *TABLE_3))
    config = EngineConfig(
        model="bundled",
        dtype="float32",
        drafter="jacobi",
        decoding_length=most_rows,
        branch_length=16,
        max_num_seqs=AT_ONCE,
        max_num_batched_tokens=AT_ONCE * (most_rows + 1) + 512,
        num_threads=1,
    )
    engine = build_engine(config, drafter=NullDrafter())
    results: dict[str, list[dict[str, Any]]] = {"table_3": [], "figure_4": []}
    plain: list[Any] = []
    for name, settings in (("table_3", TABLE_3), ("figure_4", figure_4())):
        for setting in settings:
            row, answers = run(engine, setting, prompts, args.max_tokens)
            plain = plain or answers
            # In fp32 only a near-tie could make a difference.
            row["different_answers"] = sum(a != b for a, b in zip(answers, plain, strict=True))
            results[name].append(row)
            print(name, row, flush=True)
    write_results("jacobi", {"prompts": args.prompts, "max_tokens": args.max_tokens, "dtype": "float32", **results})


if __name__ == "__main__":
    main()
