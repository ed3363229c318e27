"""What choosing drafts could bring at best: with the outcome known, and with its odds known."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.policy import StepOutcome
from batchserve.decoding_length.step_time import StepTimeModel, StepTimeTable
from batchserve.decoding_length.time_kernels import seconds_at
from batchserve.draft.base import DraftTree
from benchmarks.adaptive.driver import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from batchserve.decoding_length.acceptance import FloatArray, Given, IntArray
    from batchserve.decoding_length.draft_budget import Market
    from batchserve.decoding_length.policy import BoolArray, Drafted
    from batchserve.draft.forest import DraftForest
    from batchserve.request import Request

Bundle = tuple[float, list[int]]  # tokens, and the nodes that are run for them


class AsksAll(AdaptiveDrafting):
    """Every drafter, in every step, for all that it has."""

    def are_asked(self, slots: IntArray) -> BoolArray:
        return np.ones(len(slots), np.bool_)

    def bound(self, slots: IntArray, bounds: IntArray, max_rows: int) -> FloatArray:
        np.minimum(bounds[:, 0], MAX_DRAFT_TOKENS, out=bounds[:, 0])
        return np.zeros(len(slots))


class Oracle(AsksAll):
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

    def start(self, slot: int, drafter: str, tpot_target_s: float | None = None) -> None:
        """Nothing to learn."""

    def end(self, slot: int) -> None:
        """Nothing to forget."""

    def choose(self, forest: DraftForest, drafted: Drafted, max_rows: int) -> BoolArray:
        offers = []
        for each, tree in zip(drafted.requests, forest.trees(), strict=True):
            if tree:
                path = accepted_path(tree, self._forced[each.request_id], len(each.token_ids))
                bundles = in_order(tree, path) if self._is_paying_for_misses else [(1, [node]) for node in path]
                offers.append((each, bundles))
        chosen = buy(self.step_time, self._market, self._price, offers, max_rows)
        keep = np.zeros(len(forest.token_ids), np.bool_)
        for each, start in zip(drafted.requests, forest.starts.tolist(), strict=False):
            keep[[start + node for node in chosen.get(each.request_id, ())]] = True
        return keep

    def step_done(self, outcome: StepOutcome, given: Given) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class Tally:
    """Tokens and seconds of steps on drawn outcomes."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class KnownOdds(AsksAll):
    """Chooses as ever; in each step an outcome is drawn from its calibrated probabilities, once, for two others.

    Both choose a decoding length for each request, of the same trees, for the batch's speed alone. `hindsight` knows
    the outcome, `foresight` knows the odds that it was drawn from. prices: tokens a second, of each. beside_s: seconds
    that a step of so many requests takes on top of its forward.
    """

    def __init__(
        self, table: StepTimeTable, max_inflation: float, prices: tuple[float, float], beside_s: float
    ) -> None:
        super().__init__(StepTimeModel(table), max_inflation)
        self.foresight, self.hindsight = Tally(), Tally()
        self._truth = StepTimeModel(table)
        self._prices = prices
        self._beside_s = beside_s
        self._rng = random.Random(0)

    def choose(self, forest: DraftForest, drafted: Drafted, max_rows: int) -> BoolArray:
        keep = super().choose(forest, drafted, max_rows)
        calibrated = self.acceptance.calibrate(forest, drafted.slots, np.arange(len(drafted.slots)))
        drawn: list[tuple[Request, list[int]]] = []
        likely: list[tuple[Request, list[Bundle]]] = []
        known: list[tuple[Request, list[Bundle]]] = []
        for each, tree, start in zip(drafted.requests, forest.trees(), forest.starts.tolist(), strict=False):
            nodes = slice(start, start + len(tree))
            path = draw(tree, calibrated.results[1][nodes], self._rng)
            drawn.append((each, path))
            known.append((each, in_order(tree, path)))
            odds = calibrated.paths[nodes].tolist()
            # Stable: a child, never more likely than what it hangs from, stays behind it.
            likely.append((each, [(odds[i], [i]) for i in sorted(range(len(odds)), key=lambda i: -odds[i])]))
        for tally, price, offers in zip((self.foresight, self.hindsight), self._prices, (likely, known), strict=True):
            chosen = buy(self._truth, self._market, price, offers, max_rows)
            self._count(tally, chosen, drawn, len(drafted.all_slots))
        return keep

    def _count(
        self,
        tally: Tally,
        chosen: Mapping[str, Sequence[int]],
        drawn: Iterable[tuple[Request, list[int]]],
        num_requests: int,
    ) -> None:
        tokens, rows, attended = num_requests, 0, 0
        for each, path in drawn:
            nodes = chosen.get(each.request_id, ())
            # A path's nodes are run from its root on, or not at all.
            tokens += len(set(path).intersection(nodes))
            rows += len(nodes)
            attended += len(nodes) * each.num_computed_tokens
        tally.tokens += tokens
        load = tuple(self._market.load)
        tally.seconds += seconds_at(self._truth.arrays, load, float(rows), float(attended)) + self._beside_s


def buy(
    step_time: StepTimeModel,
    market: Market,
    price: float,
    offers: Iterable[tuple[Request, Sequence[Bundle]]],
    max_rows: int,
) -> dict[str, list[int]]:
    """The nodes to run, by request, of the most tokens less price x time."""
    load = market.load
    bundles = [(tokens / len(nodes), each, tokens, nodes) for each, some in offers for tokens, nodes in some]
    # Within a request they already fall; the sort is stable, so none comes before the one that it hangs from.
    bundles.sort(key=lambda bundle: -bundle[0])
    rows = np.cumsum([len(nodes) for *_, nodes in bundles])
    bundles = bundles[: int(np.searchsorted(rows, max_rows, side="right"))]
    if not bundles:
        return {}
    rows = rows[: len(bundles)].astype(np.float64)
    tokens = np.cumsum([tokens for _, _, tokens, _ in bundles])
    attended = np.cumsum([float(len(nodes) * each.num_computed_tokens) for _, each, _, nodes in bundles])
    table, alone = step_time.arrays, tuple(load)
    seconds = np.array([seconds_at(table, alone, r, a) for r, a in zip(rows, attended, strict=True)])
    seconds -= step_time.predict(load)
    worth = tokens - price * seconds
    best = int(np.argmax(worth))
    chosen: dict[str, list[int]] = {}
    if worth[best] > 0.0:
        for _, each, _, nodes in bundles[: best + 1]:
            chosen.setdefault(each.request_id, []).extend(nodes)
    return chosen


def in_order(tree: DraftTree, path: Sequence[int]) -> list[Bundle]:
    """The path's nodes, each with those before it in the drafter's order, at no better a ratio than the one before."""
    order = sorted(range(len(tree.probs)), key=lambda node: -tree.probs[node])
    bundles: list[Bundle] = []
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


def draw(tree: DraftTree, edges: Sequence[float], rng: random.Random) -> list[int]:
    """A path through the tree; edges: the probability of each node behind its parent.

    FusedLinears exclude each other: where their edges sum to more than one, they share it.
    """
    path: list[int] = []
    node = -1
    while True:
        children = [i for i in range(node + 1, len(tree.parents)) if tree.parents[i] == node]
        weights = [float(edges[i]) for i in children]
        dice = rng.random() * max(1.0, sum(weights))
        for child, weight in zip(children, weights, strict=True):
            dice -= weight
            if dice < 0.0:
                node = child
                path.append(child)
                break
        else:
            return path
