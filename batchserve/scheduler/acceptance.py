"""How likely a draft node is to be accepted: the drafter's own estimate, held against what came true.

Every proposed tree is scored against the tokens that later arrive, whether its rows were verified or not, so that a
budget which cuts a draft does not blind the estimate that it cuts by.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from batchserve.scheduler.budget_kernels import LEAST_PROB, MOST_PROB, correct, weigh_nodes

FloatArray = np.ndarray[Any, np.dtype[np.float64]]

PROB_BINS = np.array([0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.985])
DEPTH_OF_BIN = (1, 2, 3, 4, 6, 8)  # a bin's greatest depth; the last bin has all that is deeper
NUM_DEPTHS, NUM_PROBS = len(DEPTH_OF_BIN) + 1, len(PROB_BINS) + 1
PRIOR, REQUEST_PRIOR = 2.0, 8.0  # edges
MEMORY, REQUEST_MEMORY = 1000.0, 64.0
_DEPTH_BIN = np.array([int(np.searchsorted(DEPTH_OF_BIN, depth)) for depth in range(DEPTH_OF_BIN[-1] + 2)])


class Part(NamedTuple):
    """The verified nodes of one tree: where they stand in it, and what they are; parents among themselves."""

    nodes: list[int]
    parents: list[int]
    probs: list[float]
    token_ids: list[int]


class _Odds:
    """What one drafter claimed and what came true, by depth and claim: [NUM_DEPTHS, NUM_PROBS]; the old counts less."""

    def __init__(self) -> None:
        # Plain lists, flat: they are counted into one by one.
        self._count, self._claimed, self._hits = ([0.0] * (NUM_DEPTHS * NUM_PROBS) for _ in range(3))
        self._shifts = np.zeros((NUM_DEPTHS, NUM_PROBS))
        self._is_stale = False

    def learn(self, place: int, claimed: float, is_hit: bool) -> None:
        """`place` is depth bin * NUM_PROBS + probability bin."""
        self._count[place] += 1.0
        self._claimed[place] += claimed
        self._hits[place] += is_hit
        if self._count[place] > MEMORY:
            for sums in (self._count, self._claimed, self._hits):
                sums[place] *= 0.5
        self._is_stale = True

    @property
    def shifts(self) -> FloatArray:
        """By how much the truth's log odds differ from the claims', [NUM_DEPTHS, NUM_PROBS].

        In log odds, because a factor that doubles small probabilities would make certainties of large ones. What is
        believed of a depth before it is known is what the depth above it has shown: a chain whose first token is always
        wrong never lets its second be tried.
        """
        if self._is_stale:
            sums = np.array((self._count, self._claimed, self._hits)).reshape(3, NUM_DEPTHS, NUM_PROBS)
            correct(sums, PRIOR, self._shifts)
            self._is_stale = False
        return self._shifts


@dataclass(frozen=True, slots=True)
class Offered:
    """What all trees of one step claimed: one entry a node, as plain lists; parents are places in the node's tree."""

    token_ids: list[int]
    parents: list[int]
    claims: list[float]
    places: list[int]  # depth bin * NUM_PROBS + probability bin
    expected: list[float]  # calibrated


@dataclass(slots=True)
class _Proposal:
    """A tree that is still being held against what arrives, and the node that the truth has reached (-1: its root)."""

    offered: Offered
    start: int
    stop: int
    node: int = -1


@dataclass(slots=True)
class RequestOdds:
    """One request's own record on top of its drafter's: some texts are harder than others."""

    drafter: str
    count: float = 0.0
    expected: float = 0.0
    hits: float = 0.0
    open: list[_Proposal] = field(default_factory=list)

    def learn(self, expected: float, is_hit: bool) -> None:
        self.count += 1.0
        self.expected += expected
        self.hits += is_hit
        if self.count > REQUEST_MEMORY:
            self.count, self.expected, self.hits = self.count / 2, self.expected / 2, self.hits / 2

    @property
    def shift(self) -> float:
        """By how much its truth's log odds differ from what was expected of it."""
        if self.count == 0.0:
            return 0.0
        mean = min(MOST_PROB, max(LEAST_PROB, self.expected / self.count))
        truth = (self.hits + REQUEST_PRIOR * mean) / (self.count + REQUEST_PRIOR)
        return math.log(truth / (1.0 - truth)) - math.log(mean / (1.0 - mean))


class Reliability:
    """How well calibrated edges came true: counts, sums of probability and hits by tenths of probability, and the edges
    scored and those that came true by depth bin.
    """

    def __init__(self) -> None:
        self.count, self.expected, self.hits = ([0.0] * 10 for _ in range(3))
        self.num_scored, self.num_accepted = [0] * NUM_DEPTHS, [0] * NUM_DEPTHS

    def add(self, depth_bin: int, expected: float, is_hit: bool) -> None:
        tenth = min(9, int(expected * 10))
        self.count[tenth] += 1
        self.expected[tenth] += expected
        self.hits[tenth] += is_hit
        self.num_scored[depth_bin] += 1
        self.num_accepted[depth_bin] += is_hit

    def error(self) -> float:
        """The expected calibration error: the mean distance of probability and frequency, weighed by count."""
        total = sum(self.count)
        return sum(abs(e - h) for e, h in zip(self.expected, self.hits, strict=True)) / total if total else 0.0


class AcceptanceModel:
    """Calibrates path probabilities, per drafter, depth, claim and request, and learns from what arrives."""

    def __init__(self) -> None:
        self._odds: dict[str, _Odds] = {}
        self.reliability: dict[str, Reliability] = {}

    def start(self, drafter: str) -> RequestOdds:
        if drafter not in self._odds:
            self._odds[drafter] = _Odds()
            self.reliability[drafter] = Reliability()
        return RequestOdds(drafter)

    def calibrate(self, trees: Sequence[Part], requests: Sequence[RequestOdds]) -> tuple[FloatArray, Offered]:
        """Calibrated path probabilities [num_nodes], and what is to be remembered; tree i is request i's."""
        sizes = [len(tree.parents) for tree in trees]
        starts = np.array([0, *itertools.accumulate(sizes)])
        parents = np.array([parent for tree in trees for parent in tree.parents], np.int64)
        probs = np.array([prob for tree in trees for prob in tree.probs], np.float64)
        drafters = list({request.drafter: None for request in requests})
        shifts = np.array([self._odds[name].shifts for name in drafters])
        which = np.array([drafters.index(request.drafter) for request in requests])
        own = np.array([request.shift for request in requests])
        places, (claims, edges, paths) = np.empty(len(parents), np.int64), np.empty((3, len(parents)))
        wrong = weigh_nodes(
            starts, parents, probs, _DEPTH_BIN, PROB_BINS, shifts, which, own, places, claims, edges, paths
        )
        if wrong >= 0:
            raise ValueError(f"draft node {wrong}: its parent does not come before it")
        token_ids = [token_id for tree in trees for token_id in tree.token_ids]
        return paths, Offered(token_ids, parents.tolist(), claims.tolist(), places.tolist(), edges.tolist())

    def propose(self, request: RequestOdds, offered: Offered, start: int, stop: int) -> None:
        """Remember a tree, the nodes from start to stop, until it is known how much of it was right."""
        if stop > start:
            request.open.append(_Proposal(offered, start, stop))

    def arrive(self, request: RequestOdds, token_ids: Sequence[int]) -> None:
        """Score what was proposed to a request against its next tokens."""
        if request.open:
            odds, reliability = self._odds[request.drafter], self.reliability[request.drafter]
            request.open = [each for each in request.open if _score(request, each, token_ids, odds, reliability)]


def _score(
    request: RequestOdds, proposal: _Proposal, token_ids: Sequence[int], odds: _Odds, reliability: Reliability
) -> bool:
    """Walk on; whether there is more to come."""
    offered, start, stop = proposal.offered, proposal.start, proposal.stop
    for token_id in token_ids:
        reached, above = -1, proposal.node
        for node in range(start + above + 1, stop):
            if offered.parents[node] != above:
                continue
            is_hit = offered.token_ids[node] == token_id
            place, expected = offered.places[node], offered.expected[node]
            odds.learn(place, offered.claims[node], is_hit)
            request.learn(expected, is_hit)
            reliability.add(place // NUM_PROBS, expected, is_hit)
            if is_hit:
                reached = node - start
        if reached < 0 or reached not in offered.parents[start + reached + 1 : stop]:
            return False
        proposal.node = reached
    return True
