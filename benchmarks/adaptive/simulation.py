"""The same engine core without a model: a step takes what the measured table says, on a clock of its own.

Scheduler, draft stage, adaptive decoding length and drafter are the real ones; only forward and time are made up. So
every contender meets the same machine to the microsecond, and a ceiling can be computed. A Jacobi window costs its
rows and gains nothing: what fills it is a model's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchserve.attention.base import LayerShape
from batchserve.attention.cpu import CpuBackend
from batchserve.bench.replay import ReplayRecord
from batchserve.config import EngineConfig
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.policy import FixedDrafting
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from batchserve.draft.base import Drafter
from batchserve.draft.forest import DraftForest
from batchserve.engine.drafting import DraftStage
from batchserve.engine.engine_core import EngineCore
from batchserve.errors import ConfigError
from batchserve.kv.slab import SlabAllocator
from batchserve.metrics import EngineMetrics
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.ragged_batch import RaggedBatch, RequestRows
from batchserve.sampling.verify import StepTokens, VerifiedTokens, walk_tree
from batchserve.scheduler.plan import SchedulerOutput
from batchserve.scheduler.scheduler import Scheduler
from benchmarks.adaptive.driver import MAX_DRAFT_TOKENS, Contender, Driver, Run, fixed
from benchmarks.adaptive.oracle import KnownOdds, Oracle
from benchmarks.adaptive.warm_drafter import WarmDrafter
from benchmarks.adaptive.workloads import Options, new_drafter, recorded_sets, say, write
from benchmarks.common import RESULTS

# What the host takes of a step of the 90M model, choosing in what drafts take, at 16 requests, in an hour between the
# best and the worst in which benchmarks.adaptive.overhead was run: 0.55 ms without drafts, 1.22 with any. How that
# divides into what one request takes and all do is not measured. A test holds both against its results.
HOST_S = 0.55e-3
DRAFT_S, DRAFT_EACH_S = 0.40e-3, 17e-6  # of any drafts, and of each request's
MAX_REQUESTS = 32
CEILING_ROUNDS = 2


def draft_s(num_requests: int) -> float:
    return DRAFT_S + num_requests * DRAFT_EACH_S


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass(frozen=True, slots=True)
class _Handle:
    runner: SimulatedRunner
    batch: RaggedBatch

    is_running = False
    is_trial = False

    def wait(self) -> StepTokens:
        self.runner.clock.advance(self.runner.truth.predict(load_of(self.batch)))
        return StepTokens.of([_walk(rows, self.runner.forced[rows.request_id]) for rows in self.batch.requests])


def _walk(rows: RequestRows, recorded: Sequence[int]) -> VerifiedTokens:
    first = rows.context_len + rows.num_pending
    tree = rows.token_ids, rows.parents, rows.root
    return walk_tree(*tree, lambda row, depth: recorded[first + depth], rows.is_verified)


def load_of(batch: RaggedBatch) -> StepLoad:
    spans = [(rows.context_len, len(rows.token_ids)) for rows in batch.requests]
    return StepLoad(
        batch.num_rows,
        len(batch.logit_rows),
        len(spans),
        sum(context for context, _ in spans),
        sum(context * rows for context, rows in spans),
    )


class SimulatedRunner(ModelRunner):
    """Answers are the forced ones; steps last as long as `table` says."""

    def __init__(self, backend: CpuBackend, table: StepTimeTable, clock: Clock) -> None:
        self.backend = backend
        self.forced: dict[str, Sequence[int]] = {}
        self.truth = StepTimeModel(table)
        self.clock = clock

    def launch(self, batch: RaggedBatch) -> _Handle:  # type: ignore[override]
        return _Handle(self, batch)


class SimulatedCore(EngineCore):
    """A step takes HOST_S beside its forward and its drafts."""

    def _build(self, plan: SchedulerOutput, drafts: DraftForest) -> RaggedBatch:
        assert isinstance(self.executor, SimulatedRunner)
        self.executor.clock.advance(HOST_S)
        return super()._build(plan, drafts)


@dataclass(frozen=True, slots=True)
class Simulation:
    """One table, one drafter that has seen the warm records, and the records that are measured."""

    table: StepTimeTable
    drafter: Drafter
    warm: Sequence[ReplayRecord]
    records: Sequence[ReplayRecord]

    def driver(self) -> Driver:
        clock = Clock()
        config = EngineConfig(max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=4096)
        longest = max(len(r.prompt_token_ids) + len(r.response_token_ids) for r in self.records) + MAX_DRAFT_TOKENS
        allocator = SlabAllocator([LayerShape(1, 1, 1)], "float32", MAX_REQUESTS * (longest + 128))
        runner = SimulatedRunner(CpuBackend(allocator, 1, has_kernel=False), self.table, clock)
        scheduler = Scheduler(config, allocator, longest)
        drafter = WarmDrafter(self.drafter, self.warm, lambda number: clock.advance(draft_s(number)))
        drafts = DraftStage(drafter, FixedDrafting(), allocator, clock)
        return Driver(SimulatedCore(scheduler, drafts, runner, None, EngineMetrics(), clock), clock)

    def adaptive(self) -> Contender:
        inflation = EngineConfig().draft_inflation
        return Contender("adaptive", MAX_DRAFT_TOKENS, AdaptiveDrafting(StepTimeModel(self.table), inflation))

    def ceiling(self, driver: Driver, load: Sequence[tuple[int, int]], *, is_paying_for_misses: bool) -> Run:
        """The best run of an Oracle; its price of time is the rate that it reached in the round before."""
        best = driver.run(self.records, load, fixed(0))
        for _ in range(CEILING_ROUNDS):
            oracle = Oracle(self.table, driver.core.executor.forced, best.tokens_per_s, is_paying_for_misses)
            run = driver.run(self.records, load, Contender("oracle", MAX_DRAFT_TOKENS, oracle))
            best = max(best, run, key=lambda run: run.tokens_per_s)
        return best

    def known_odds(self, driver: Driver, load: Sequence[tuple[int, int]]) -> KnownOdds:
        """Knowing the odds against knowing the outcome, where drafts come true as often as adaptive believes."""
        size, price = load[0][0], driver.run(self.records, load, fixed(0)).tokens_per_s
        prices = price, price
        for _ in range(CEILING_ROUNDS + 1):
            beside_s = HOST_S + draft_s(size)
            odds = KnownOdds(self.table, EngineConfig().draft_inflation, prices, beside_s)
            driver.run(self.records, load, Contender("known odds", MAX_DRAFT_TOKENS, odds))
            prices = odds.foresight.rate, odds.hindsight.rate
        return odds


def on_times_of_gain(
    options: Options, name: str, measure: Callable[[Simulation, int, Options], dict[str, Any]], sizes: Sequence[int]
) -> None:
    """Measure the asked sets at each number of requests, on the step times that benchmarks.adaptive.gain measured, and
    write what is found. Raises ConfigError where it has not.
    """
    started_s, workloads, gain = time.perf_counter(), recorded_sets(options), RESULTS / options.out / "gain.json"
    if not gain.exists():
        raise ConfigError(f"{gain}: is not there; benchmarks.adaptive.gain, run with the same options, writes it")
    measured = json.loads(gain.read_text())
    results: dict[str, Any] = {shape: {"workloads": {}} for shape in measured["models"]}
    for shape, found in measured["models"].items():
        columns = {key: tuple(of) if isinstance(of, list) else of for key, of in found["table"].items()}
        for workload in workloads:
            say(f"{shape}, {workload.name}")
            what = new_drafter(options.drafter), workload.warm, workload.records
            simulation = Simulation(StepTimeTable(**columns), *what)
            cells = {str(size): measure(simulation, size, options) for size in options.sizes(*sizes)}
            results[shape]["workloads"][workload.name] = cells
    write(options, name, {"step_times_of": measured["environment"], "models": results}, started_s)
