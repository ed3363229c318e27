"""The same engine core without a model: a step takes what the measured table says, on a clock of its own.

Scheduler, draft stage, adaptive decoding length and drafter are the real ones; only forward and time are made up. So
every contender meets the same machine to the microsecond, and a ceiling can be computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchserve.attention.base import LayerShape
from batchserve.attention.cpu import CpuBackend
from batchserve.attention.slab import SlabAllocator
from batchserve.bench.replay import ReplayRecord
from batchserve.config import EngineConfig
from batchserve.draft.base import Drafter, DraftTree
from batchserve.draft.forest import DraftForest
from batchserve.engine.drafting import DraftStage
from batchserve.engine.engine_core import EngineCore
from batchserve.metrics import EngineMetrics
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.ragged_batch import RaggedBatch, RequestRows
from batchserve.sampling.verify import VerifiedTokens, walk_tree
from batchserve.scheduler.adaptive import AdaptiveDrafting, Decoding, Forest, StepOutcome
from batchserve.scheduler.budget_kernels import seconds_at
from batchserve.scheduler.scheduler import Scheduler
from batchserve.scheduler.step_time import StepLoad, StepTimeModel, StepTimeTable
from benchmarks.adaptive.driver import MOST_DRAFT_TOKENS, Contender, Driver, Run, WarmDrafter, fixed

if TYPE_CHECKING:
    from batchserve.scheduler.acceptance import FloatArray, IntArray
    from batchserve.scheduler.adaptive import BoolArray

HOST_S = 0.3e-3  # of a step outside of the forward (benchmarks.adaptive.overhead measures it)
DRAFT_S = 40e-6  # of drafting for one request
MOST_REQUESTS = 32
CEILING_ROUNDS = 2


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

    def wait(self) -> list[VerifiedTokens | None]:
        self.runner.clock.advance(self.runner.truth.predict(load_of(self.batch)) + HOST_S)
        return [_walk(rows, self.runner.forced[rows.request_id]) for rows in self.batch.requests]


def _walk(rows: RequestRows, recorded: Sequence[int]) -> VerifiedTokens:
    first = rows.context_len + rows.num_pending
    return walk_tree(rows.token_ids, rows.parents, rows.root, lambda row, depth: recorded[first + depth])


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


@dataclass(frozen=True, slots=True)
class Simulation:
    """One table, one drafter that has seen the warm records, and the records that are measured."""

    table: StepTimeTable
    drafter: Drafter
    warm: Sequence[ReplayRecord]
    records: Sequence[ReplayRecord]

    def driver(self) -> Driver:
        clock = Clock()
        config = EngineConfig(max_num_seqs=MOST_REQUESTS, max_num_batched_tokens=4096)
        longest = max(len(r.prompt_token_ids) + len(r.response_token_ids) for r in self.records) + MOST_DRAFT_TOKENS
        allocator = SlabAllocator([LayerShape(1, 1, 1)], torch.float32, MOST_REQUESTS * (longest + 128))
        runner = SimulatedRunner(CpuBackend(allocator, 1, has_kernel=False), self.table, clock)
        scheduler = Scheduler(config, allocator, longest)
        drafts = DraftStage(
            WarmDrafter(self.drafter, self.warm, lambda number: clock.advance(DRAFT_S * number)), None, allocator, clock
        )
        return Driver(EngineCore(scheduler, drafts, runner, None, EngineMetrics(), clock), clock)

    def adaptive(self) -> Contender:
        inflation = EngineConfig().max_itl_inflation
        return Contender("adaptive", MOST_DRAFT_TOKENS, AdaptiveDrafting(StepTimeModel(self.table), inflation))

    def ceiling(self, driver: Driver, load: Sequence[tuple[int, int]], *, is_paying_for_misses: bool) -> Run:
        """The best run of an Oracle; its price of time is the rate that it reached in the round before."""
        best = driver.run(self.records, load, fixed(0))
        for _ in range(CEILING_ROUNDS):
            oracle = Oracle(self.table, driver.core.runner.forced, best.tokens_per_s, is_paying_for_misses)
            run = driver.run(self.records, load, Contender("oracle", MOST_DRAFT_TOKENS, oracle))
            best = max(best, run, key=lambda run: run.tokens_per_s)
        return best


class Oracle(AdaptiveDrafting):
    """Knows which proposed nodes will be accepted, and buys of them what is worth its rows.

    Its aim is only the batch's speed: no request's share, no bound on a step's stretch. is_paying_for_misses: nodes
    come in the drafter's order, so that those which are not accepted are bought with the ones behind them; then it is
    the best decoding length in hindsight, of each request in each step. Otherwise only accepted nodes take rows.
    """

    def __init__(
        self, table: StepTimeTable, forced: Mapping[str, Sequence[int]], price: float, is_paying_for_misses: bool
    ) -> None:
        super().__init__(StepTimeModel(table), float("inf"))
        self._forced = forced
        self._price = price
        self._is_paying_for_misses = is_paying_for_misses

    def start(self, request_id: str, drafter: str, tpot_target_s: float | None = None) -> None:
        """Nothing to learn."""

    def end(self, request_id: str) -> None:
        """Nothing to forget."""

    def asks(self, request_id: str) -> bool:
        return True

    def bounds(self, request_ids: Sequence[str]) -> tuple[IntArray, FloatArray]:
        return np.full(len(request_ids), MOST_DRAFT_TOKENS), np.zeros(len(request_ids))

    def choose(
        self, forest: Forest, request_ids: Sequence[str], decoding: Sequence[Decoding], max_rows: int
    ) -> BoolArray:
        assert isinstance(forest, DraftForest)
        chosen = self._buy(dict(zip(request_ids, forest.trees(), strict=True)), decoding, max_rows)
        keep = np.zeros(len(forest.token_ids), np.bool_)
        for request_id, start in zip(request_ids, forest.starts.tolist(), strict=False):
            keep[[start + node for node in chosen.get(request_id, ())]] = True
        return keep

    def _buy(self, trees: Mapping[str, DraftTree], decoding: Sequence[Decoding], max_rows: int) -> dict[str, list[int]]:
        load = self._market.load
        bundles = [
            (tokens / len(nodes), each, tokens, nodes)
            for each in decoding
            if each.request_id in trees
            for tokens, nodes in self._bundles(trees[each.request_id], each)
        ]
        # Within a request they already fall; the sort is stable, so none comes before the one that it hangs from.
        bundles.sort(key=lambda bundle: -bundle[0])
        rows = np.cumsum([len(nodes) for *_, nodes in bundles])
        bundles = bundles[: int(np.searchsorted(rows, max_rows, side="right"))]
        if not bundles:
            return {}
        rows = rows[: len(bundles)].astype(np.float64)
        tokens = np.cumsum([tokens for _, _, tokens, _ in bundles])
        attended = np.cumsum([float(len(nodes) * each.num_computed_tokens) for _, each, _, nodes in bundles])
        table, alone = self.step_time.arrays(), load.floats()
        seconds = np.array([seconds_at(table, alone, r, a) for r, a in zip(rows, attended, strict=True)])
        seconds -= self.step_time.predict(load)
        worth = tokens - self._price * seconds
        best = int(np.argmax(worth))
        chosen: dict[str, list[int]] = {}
        if worth[best] > 0.0:
            for _, each, _, nodes in bundles[: best + 1]:
                chosen.setdefault(each.request_id, []).extend(nodes)
        return chosen

    def _bundles(self, tree: DraftTree, each: Decoding) -> list[tuple[int, list[int]]]:
        """(tokens, nodes) to be bought one behind the other, each at no better a ratio than the one before."""
        path = accepted_path(tree, self._forced[each.request_id], len(each.token_ids))
        if not self._is_paying_for_misses:
            return [(1, [node]) for node in path]
        order = sorted(range(len(tree.probs)), key=lambda node: -tree.probs[node])
        bundles: list[tuple[int, list[int]]] = []
        start = 0
        for node in path:
            end = order.index(node) + 1
            tokens, nodes = 1, order[start:end]
            start = end
            # What comes next but is the better bargain is only to be had together with what is before it.
            while bundles and bundles[-1][0] * len(nodes) <= tokens * len(bundles[-1][1]):
                more, before = bundles.pop()
                tokens, nodes = tokens + more, before + nodes
            bundles.append((tokens, nodes))
        return bundles

    def step_done(self, outcome: StepOutcome, token_ids: Mapping[str, Sequence[int]]) -> None:
        """Nothing to learn."""


def accepted_path(tree: DraftTree, recorded: Sequence[int], start: int) -> list[int]:
    """The nodes of the tree that recorded[start:] goes through."""
    path: list[int] = []
    node = -1
    for i, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        place = start + len(path)
        if parent == node and place < len(recorded) and token_id == recorded[place]:
            node = i
            path.append(i)
    return path
