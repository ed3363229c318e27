"""Whether anybody loses by speculating where there is nothing to gain.

    python -m benchmarks.adaptive.never_slower [--quick]

Two ways to gain nothing: a hostile drafter, whose drafts are always wrong and claim to be certain; and answers of
random tokens, of which the drafter knows nothing. Adaptive over off, in pairs of runs that take turns in one process,
on the bundled model (whose steps are so short that every microsecond shows) and on a random Llama of about 90M
parameters. "off again": without drafts a second time in the same turns, which shows what any figure is where nothing
differs. Also the share of draft rows behind the first steps, and the slowest request.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from batchserve.bench.replay import ReplayRecord
from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree
from benchmarks.adaptive.driver import Contender, Run, control, fixed, interleave, summary
from benchmarks.adaptive.workloads import Lab, Options, Workload, lab, new_drafter, read_options, say, write

SIZES = (1, 4, 16)
MODELS = ("bundled", "90m")
PAIRS = {"bundled": 60, "90m": 20}  # the first one's runs are shorter, so noise counts for more in each
PROMPT_TOKENS, ANSWER_TOKENS, NUM_RECORDS = 64, 256, 64
TOKENS_EACH = {"bundled": 64, "90m": 48}
MIN_TOKEN = 3
LEARNED_STEPS = 32  # of an engine that has met neither the drafter nor the text; behind them, drafts should be few


class HostileDrafter(Drafter):
    """Chains of the length asked for, whose first token does not follow; each node is claimed to be certain."""

    name = "hostile"

    def __init__(self, forced: Mapping[str, Sequence[int]]) -> None:
        self._forced = forced
        self._lengths: dict[str, int] = {}

    def start(self, request: DraftRequest) -> None:
        self._lengths[request.request_id] = len(request.prompt_token_ids)

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        return [self._wrong(query) for query in queries]

    def _wrong(self, query: DraftQuery) -> DraftTree:
        truth = self._forced[query.request_id][self._lengths[query.request_id]]
        size = min(query.max_tokens, query.max_depth)
        wrong = truth - 1 if truth > 0 else 1
        return DraftTree([wrong] * size, list(range(-1, size - 1)), [1.0] * size)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._lengths[request_id] += len(token_ids)

    def end(self, request_id: str) -> None:
        del self._lengths[request_id]


def random_records(vocab_size: int, seed: int = 0) -> list[ReplayRecord]:
    rng = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(MIN_TOKEN, vocab_size) for _ in range(number)]

    return [ReplayRecord(tokens(PROMPT_TOKENS), tokens(ANSWER_TOKENS), []) for _ in range(NUM_RECORDS)]


def measure(bench: Lab, model: str, options: Options) -> dict[str, Any]:
    records = random_records(bench.engine.info.vocab_size)
    drafters: dict[str, Drafter] = {
        "hostile drafter": HostileDrafter(bench.engine.core.executor.forced),
        "random text": new_drafter(options.drafter),
    }
    found: dict[str, Any] = {}
    for name, drafter in drafters.items():
        workload = Workload(name, records[: NUM_RECORDS // 2], records[NUM_RECORDS // 2 :])
        bench.use(drafter, workload.warm if name == "random text" else ())
        found[name] = {}
        for size in options.sizes(*SIZES):
            load = [(size, size * (8 if options.is_quick else TOKENS_EACH[model]))]
            pairs = 2 if options.is_quick else PAIRS[model]
            adaptive = bench.adaptive()
            first = bench.driver.run(workload.records, [(size, size * 2 * LEARNED_STEPS)], adaptive)

            def run(contender: Contender, number: int, load: Any = load, records: Any = workload.records) -> Run:
                return bench.driver.run(records, load, contender, seed=number)

            runs = interleave((fixed(0), adaptive, control()), pairs, run)
            found[name][str(size)] = {
                "tokens_of_a_run": load[0][1],
                "draft_row_share_once_learned": round(
                    sum(first.step_draft_rows[LEARNED_STEPS:]) / sum(first.step_rows[LEARNED_STEPS:]), 5
                ),
                "contenders": {each: summary(of, runs["off"]) for each, of in runs.items()},
            }
            say(f"{model}, {name} x {size}: {found[name][str(size)]['contenders']['adaptive']}")
    return found


def main() -> None:
    started_s = time.perf_counter()
    options = read_options(__doc__)
    results = {}
    for model in MODELS:
        with lab(model) as bench:
            results[model] = {**bench.about(), "cells": measure(bench, model, options)}
        write(options, "never_slower", {"models": results}, started_s)


if __name__ == "__main__":
    main()
