"""How likely a draft node is to be accepted: the drafter's own estimate, held against what came true.

Every proposed tree is scored against the tokens that later arrive, whether its rows were verified or not, so that a
budget which cuts a draft does not blind the estimate that it cuts by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]

PROB_BINS = np.array([0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96])
DEPTH_OF_BIN = (1, 2, 3, 4, 6, 8)  # a bin's greatest depth; the last bin has all that is deeper
NUM_DEPTHS, NUM_PROBS = len(DEPTH_OF_BIN) + 1, len(PROB_BINS) + 1
PRIOR = 1.5  # expected acceptances that a claim is believed for before anything is known of it
REQUEST_PRIOR = 1.5
MEMORY, REQUEST_MEMORY = 400.0, 16.0  # expected acceptances after which the old count half
MOST_PROB = 0.995  # nothing is certain
_DEPTH_BIN = np.array([int(np.searchsorted(DEPTH_OF_BIN, depth)) for depth in range(DEPTH_OF_BIN[-1] + 2)])


@dataclass(frozen=True, slots=True)
class Candidates:
    """The draft nodes of one step, of all requests behind each other: what may be bought, and at what odds.

    All arrays [num_nodes]; parents are indices into the same arrays, -1 for a request's last token; owners are places
    of requests; probs are path probabilities, edges those given that the parent is accepted.
    """

    owners: IntArray
    parents: IntArray
    depths: IntArray
    edges: FloatArray
    probs: FloatArray


def lay_out(parents: Sequence[Sequence[int]], probs: Sequence[Sequence[float]]) -> Candidates:
    """Flatten trees; parents[i] and probs[i] are those of tree i, parents before children."""
    sizes = [len(each) for each in parents]
    starts = np.cumsum([0, *sizes])[:-1]
    owners = np.repeat(np.arange(len(sizes)), sizes)
    local = np.array([parent for each in parents for parent in each], np.int64)
    flat = np.where(local < 0, -1, local + np.repeat(starts, sizes))
    paths = np.array([prob for each in probs for prob in each], np.float64)
    above = np.where(flat < 0, 1.0, paths[flat]) if len(flat) else paths
    edges = np.clip(paths / np.maximum(above, 1e-12), 0.0, 1.0)
    return Candidates(owners, flat, _depths(flat), edges, paths)


def _depths(parents: IntArray) -> IntArray:
    depths, at = np.ones(len(parents), np.int64), parents
    while (inside := at >= 0).any():
        depths += inside
        at = np.where(inside, parents[at], -1)
    return depths


def path_products(parents: IntArray, edges: FloatArray) -> FloatArray:
    """The product of `edges` from the root to each node, in as many rounds as twice the deepest node has bits."""
    products, at = edges.copy(), parents
    while (inside := at >= 0).any():
        products = np.where(inside, products * products[at], products)
        at = np.where(inside, at[at], -1)
    return products


@dataclass(slots=True)
class _Odds:
    """What one drafter claimed and what came true, by depth and claimed probability: [NUM_DEPTHS, NUM_PROBS]."""

    claimed: FloatArray = field(default_factory=lambda: np.zeros((NUM_DEPTHS, NUM_PROBS)))
    hits: FloatArray = field(default_factory=lambda: np.zeros((NUM_DEPTHS, NUM_PROBS)))
    ratio: FloatArray = field(default_factory=lambda: np.ones((NUM_DEPTHS, NUM_PROBS)))

    def learn(self, depth_bin: int, prob_bin: int, claimed: float, is_hit: bool) -> None:
        place = depth_bin, prob_bin
        self.claimed[place] += claimed
        self.hits[place] += is_hit
        if self.claimed[place] > MEMORY:
            self.claimed[place] *= 0.5
            self.hits[place] *= 0.5
        self.ratio[place] = (self.hits[place] + PRIOR) / (self.claimed[place] + PRIOR)


@dataclass(slots=True)
class _Proposal:
    """A tree that is still being held against what arrives: its nodes, and the one that the truth has reached."""

    token_ids: Sequence[int]
    parents: Sequence[int]  # inside the tree
    claims: list[float]
    bins: list[int]  # depth bin * NUM_PROBS + probability bin
    expected: list[float]  # calibrated
    node: int = -1


@dataclass(slots=True)
class RequestOdds:
    """One request's own record on top of its drafter's: some texts are harder than others."""

    drafter: str
    expected: float = 0.0
    hits: float = 0.0
    open: list[_Proposal] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return (self.hits + REQUEST_PRIOR) / (self.expected + REQUEST_PRIOR)


@dataclass(slots=True)
class Reliability:
    """How well calibrated edges came true, by tenths of probability: counts, sums of probability, hits; all [10]."""

    count: FloatArray = field(default_factory=lambda: np.zeros(10))
    expected: FloatArray = field(default_factory=lambda: np.zeros(10))
    hits: FloatArray = field(default_factory=lambda: np.zeros(10))

    def add(self, expected: float, is_hit: bool) -> None:
        tenth = min(9, int(expected * 10))
        self.count[tenth] += 1
        self.expected[tenth] += expected
        self.hits[tenth] += is_hit

    def error(self) -> float:
        """The expected calibration error: the mean distance of probability and frequency, weighed by count."""
        total = float(self.count.sum())
        return float(np.abs(self.expected - self.hits).sum()) / total if total else 0.0


class AcceptanceModel:
    """Calibrates path probabilities, per drafter, depth, claim and request, and learns from what arrives."""

    def __init__(self) -> None:
        self._odds: dict[str, _Odds] = {}
        self.reliability: dict[str, Reliability] = {}
        self.tested: dict[str, FloatArray] = {}  # by drafter: [2, NUM_DEPTHS], edges scored and edges that came true

    def start(self, drafter: str) -> RequestOdds:
        if drafter not in self._odds:
            self._odds[drafter] = _Odds()
            self.reliability[drafter] = Reliability()
            self.tested[drafter] = np.zeros((2, NUM_DEPTHS))
        return RequestOdds(drafter)

    def calibrate(self, candidates: Candidates, requests: Sequence[RequestOdds]) -> tuple[FloatArray, FloatArray]:
        """Calibrated path and edge probabilities [num_nodes]; requests[i] owns the nodes of owner i."""
        depth_bins = _DEPTH_BIN[np.minimum(candidates.depths, len(_DEPTH_BIN) - 1)]
        prob_bins = np.searchsorted(PROB_BINS, candidates.edges)
        drafters = sorted({request.drafter for request in requests})
        ratios = np.stack([self._odds[name].ratio for name in drafters])
        which = np.array([drafters.index(request.drafter) for request in requests])
        own = np.array([request.ratio for request in requests])
        scale = ratios[which[candidates.owners], depth_bins, prob_bins] * own[candidates.owners]
        edges = np.minimum(candidates.edges * scale, MOST_PROB)
        return path_products(candidates.parents, edges), edges

    def propose(
        self, request: RequestOdds, token_ids: Sequence[int], nodes: slice, all_nodes: Candidates, edges: FloatArray
    ) -> None:
        """Remember a proposed tree until it is known how much of it was right; `nodes` are its candidates."""
        if not token_ids:
            return
        claims = all_nodes.edges[nodes]
        depth_bins = _DEPTH_BIN[np.minimum(all_nodes.depths[nodes], len(_DEPTH_BIN) - 1)]
        bins = depth_bins * NUM_PROBS + np.searchsorted(PROB_BINS, claims)
        parents = np.maximum(all_nodes.parents[nodes] - nodes.start, -1)
        request.open.append(
            _Proposal(token_ids, parents.tolist(), claims.tolist(), bins.tolist(), edges[nodes].tolist())
        )

    def arrive(self, request: RequestOdds, token_ids: Sequence[int]) -> None:
        """Score what was proposed to a request against its next tokens."""
        still_open = []
        for proposal in request.open:
            if self._score(request, proposal, token_ids):
                still_open.append(proposal)
        request.open = still_open

    def _score(self, request: RequestOdds, proposal: _Proposal, token_ids: Sequence[int]) -> bool:
        """Walk on; whether there is more to come."""
        odds, reliability = self._odds[request.drafter], self.reliability[request.drafter]
        tested = self.tested[request.drafter]
        parents = proposal.parents
        for token_id in token_ids:
            reached, above = -1, proposal.node
            for node in range(above + 1, len(parents)):
                if parents[node] != above:
                    continue
                is_hit = proposal.token_ids[node] == token_id
                depth_bin, prob_bin = divmod(proposal.bins[node], NUM_PROBS)
                odds.learn(depth_bin, prob_bin, proposal.claims[node], is_hit)
                expected = proposal.expected[node]
                request.expected += expected
                request.hits += is_hit
                reliability.add(expected, is_hit)
                tested[0, depth_bin] += 1
                tested[1, depth_bin] += is_hit
                if is_hit:
                    reached = node
            if request.expected > REQUEST_MEMORY:
                request.expected *= 0.5
                request.hits *= 0.5
            if reached < 0 or reached not in parents:
                return False
            proposal.node = reached
        return True
