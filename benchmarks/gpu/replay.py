"""(d) Recorded answers forced through the engine: tokens/s and acceptance, adaptive against fixed against off.

The decode phase: prompts count as computed. Requests join when others leave, so that the batch stays as it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from batchserve.bench.records import split_warm
from batchserve.config import EngineConfig
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.step_time import StepTimeModel
from batchserve.engine.engine_core import EngineCore
from benchmarks.adaptive.driver import (
    BRANCH_LENGTH,
    MAX_DRAFT_TOKENS,
    Contender,
    Driver,
    Run,
    fixed,
    interleave,
    summary,
)
from benchmarks.adaptive.warm_drafter import WarmDrafter
from benchmarks.adaptive.workloads import WARM_SHARE, new_drafter
from benchmarks.gpu import answers
from benchmarks.gpu.kit import Kit, Report
from benchmarks.gpu.models import build_for, engine_on, num_graphs, random_llama, shape_names
from benchmarks.gpu.step_bench import fill_caches

SIZES = (1, 2, 4, 32, 16, 8)  # the most telling first
FIXED = (8, 32)
TOKENS_EACH, LEAST_TOKENS = 48, 384  # of a run: few requests are given more of their answers, as they differ a lot
ROUNDS = 3
LONGEST = 4096


class PagedDriver(Driver):
    """A driver over paged K/V, whose contents are numbers from the start.

    forward_s: seconds from launch to the end of the wait, by id of the run. on_run is called behind each run.
    """

    def __init__(self, core: EngineCore, clock: Callable[[], float], on_run: Callable[[], None]) -> None:
        super().__init__(core, clock)
        self.on_run = on_run
        self.forward_s: dict[int, float] = {}

    def run(self, *arguments: Any, **options: Any) -> Run:
        before = self.core.metrics.snapshot()["forward_seconds_total"]
        run = super().run(*arguments, **options)
        self.forward_s[id(run)] = self.core.metrics.snapshot()["forward_seconds_total"] - before
        self.on_run()
        return run

    def _fill(self, name: str, num_tokens: int) -> None:
        allocator = self.core.executor.allocator
        if not allocator.reserve(name, num_tokens + 1):
            raise RuntimeError(f"no K/V memory for a context of {num_tokens} tokens")
        allocator.commit(name, range(num_tokens))


class ReplayBench:
    """One engine of a shape, driven through recorded answers."""

    def __init__(self, kit: Kit, shape: str, **options: Any) -> None:
        self._kit = kit
        sizes = {"max_num_seqs": max(SIZES), "max_model_len": LONGEST}
        sizes["max_num_batched_tokens"] = kit.pick(2560, 80)  # every request's most drafts in one step
        sizes["max_graph_rows"] = kit.pick(1088, 80)  # those of the longest fixed length, too
        model = random_llama(kit, shape)
        self.engine = engine_on(kit, model, shape, **{**sizes, **options}, clock=time.perf_counter)
        self.core = self.engine.core
        self._table = self.core.drafts.policy.step_time.table
        self.driver = PagedDriver(self.core, time.perf_counter, kit.beat)
        fill_caches(self.core.executor)
        self.core.executor.bind_thread()

    def adaptive(self) -> Contender:
        """One that knows nothing but the measured step times."""
        drafting = AdaptiveDrafting(StepTimeModel(self._table), EngineConfig().draft_inflation)
        return Contender("adaptive", MAX_DRAFT_TOKENS, drafting)

    def measure(
        self, name: str, size: int, keep: Callable[[dict[str, Any]], None], *, with_fixed: bool
    ) -> dict[str, Any]:
        """Every contender's figures; those of the rounds until now are kept behind each."""
        warm, records = split_warm(answers.load(self._kit.replay, name), WARM_SHARE)
        room = LONGEST - MAX_DRAFT_TOKENS - BRANCH_LENGTH
        records = [r for r in records if len(r.prompt_token_ids) + len(r.response_token_ids) < room]
        self.core.drafts.drafter = WarmDrafter(new_drafter("mixture"), warm)
        contenders = [fixed(0), self.adaptive(), *(fixed(length) for length in FIXED if with_fixed)]
        load = [(size, self._kit.pick(max(LEAST_TOKENS, size * TOKENS_EACH), size * 4))]
        facts = {"tokens_of_a_run": load[0][1], "mean_context": _mean_context(records)}
        done: dict[str, list[Run]] = {each.name: [] for each in contenders}

        def figures(runs: dict[str, list[Run]]) -> dict[str, Any]:
            found = {each: self._figures(of, runs["off"]) for each, of in runs.items()}
            rounds = len(runs["off"])
            return {"attention": self.engine.info.attention_backend, **facts, "rounds": rounds, "contenders": found}

        def run(contender: Contender, number: int) -> Run:
            run = self.driver.run(records, load, contender, seed=number)
            if number:  # interleave's first round warms up
                done[contender.name].append(run)
                if {len(each) for each in done.values()} == {number}:
                    keep(figures(done))
            return run

        return figures(interleave(contenders, self._kit.pick(ROUNDS, 1), run))

    def _figures(self, runs: list[Run], off: list[Run]) -> dict[str, Any]:
        """Besides the driver's own: K, and what a forward with drafts costs over one without.

        Acceptance over this cost is what there was to be had; drafting and the rest of the step take their part of it.
        """
        found = dict(summary(runs, off))
        forward_s, plain_s = (
            sum(self.driver.forward_s[id(each)] for each in group) / sum(len(each.step_s) for each in group)
            for group in (runs, off)
        )
        steps = sum(each.requests_steps for each in runs)
        found["draft_rows_per_step"] = round(sum(each.draft_rows for each in runs) / steps, 3)
        found["forward_ms"] = round(forward_s * 1e3, 3)
        found["cost_ratio"] = round(forward_s / plain_s, 4)
        found["acceptance_over_cost"] = round(sum(each.tokens for each in runs) / steps / (forward_s / plain_s), 4)
        return found


def run(kit: Kit, report: Report) -> None:
    shape = shape_names(kit)[0]
    sets = answers.set_names(kit.replay)
    plan = [(name, size) for name in sets for size in kit.pick(SIZES, (1, 2))]
    cells = {f"{shape}/{name}/b{size}": (name, size) for name, size in plan}
    report.about(compiles=[shape])
    bench = build_for(kit, report, shape, cells, lambda kit: ReplayBench(kit, shape))
    if bench is None:
        return
    report.about(graphs=num_graphs(bench.engine), drafter="mixture", warm_share=WARM_SHARE, excerpts=kit.replay is None)
    for cell, (name, size) in cells.items():
        report.cell(cell, partial(bench.measure, name, size, partial(report.keep, cell), with_fixed=name == sets[0]))


def _mean_context(records: list[Any]) -> float:
    return round(statistics.mean(len(r.prompt_token_ids) + len(r.response_token_ids) / 2 for r in records), 1)
