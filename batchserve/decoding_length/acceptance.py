"""How likely a draft node is to be accepted: the drafter's own estimate, held against what came true.

Every proposed tree is scored against the tokens that later arrive, whether its rows were verified or not, so that a
budget which cuts a draft does not blind the estimate that it cuts by.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from batchserve.decoding_length.budget_kernels import CLOSED, score_trees, weigh_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.draft.forest import DraftForest

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]

PROB_BINS = np.array([0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.985])
DEPTH_OF_BIN = (1, 2, 3, 4, 6, 8)  # a bin's greatest depth; the last bin has all that is deeper
NUM_DEPTHS, NUM_PROBS = len(DEPTH_OF_BIN) + 1, len(PROB_BINS) + 1
_BINS = np.array([int(np.searchsorted(DEPTH_OF_BIN, depth)) for depth in range(DEPTH_OF_BIN[-1] + 2)]), PROB_BINS


class Offered(NamedTuple):
    """All trees of one step, node behind node, and how far the truth has followed each; see budget_kernels.py."""

    trees: IntArray  # [2, num_trees]: the slots of their requests, and what is reached of them
    starts: IntArray  # [num_trees + 1]
    token_ids: IntArray
    parents: IntArray
    links: IntArray  # [3, num_nodes]: columns of the books, owners, ones
    results: FloatArray  # [3, num_nodes]: claims, edges, paths

    @property
    def owners(self) -> IntArray:
        """The place of each node's request among those of the step [num_nodes]."""
        owners: IntArray = self.links[1]
        return owners

    @property
    def ones(self) -> IntArray:
        """Of each node its rows [num_nodes]."""
        ones: IntArray = self.links[2]
        return ones

    @property
    def paths(self) -> FloatArray:
        """Calibrated path probabilities [num_nodes]."""
        paths: FloatArray = self.results[2]
        return paths


class Given(NamedTuple):
    """The tokens that one step gave: the request in slots[i] was given those from starts[i] to starts[i + 1]."""

    slots: IntArray
    starts: IntArray
    token_ids: IntArray

    @classmethod
    def of(cls, token_ids: Mapping[int, Sequence[int]]) -> Given:
        """From each slot's tokens."""
        starts, tokens = [0, *accumulate(map(len, token_ids.values()))], [*chain.from_iterable(token_ids.values())]
        return cls(*(np.array(each, np.int64) for each in ([*token_ids], starts, tokens)))

    @classmethod
    def joined(cls, steps: Sequence[Given]) -> Given:
        """The tokens of several steps. A slot comes once for each step that gave it tokens."""
        if len(steps) == 1:
            return steps[0]
        ends = np.cumsum([0, *(len(each.token_ids) for each in steps)])
        starts = [each.starts[:-1] + end for each, end in zip(steps, ends.tolist(), strict=False)]
        slots, tokens = (np.concatenate([each[field] for each in steps]) for field in (0, 2))
        return cls(slots, np.concatenate((*starts, ends[-1:])), tokens)

    def by_slot(self) -> dict[int, list[int]]:
        """The tokens of each slot, of all steps."""
        found: dict[int, list[int]] = {}
        starts, tokens = self.starts.tolist(), self.token_ids.tolist()
        for slot, (start, end) in zip(self.slots.tolist(), pairwise(starts), strict=True):
            found.setdefault(slot, []).extend(tokens[start:end])
        return found


class _Books:
    """Edges counted, by drafter; [num_drafters, ...]. What is old counts less in sums, which odds are made from."""

    def __init__(self, num_drafters: int) -> None:
        self.sums = np.zeros((num_drafters, 3, NUM_DEPTHS * NUM_PROBS))  # edges, their claims, hits
        self.tallies = np.zeros((num_drafters, 3, 10))  # the same by tenths of calibrated probability, of late
        self.tested = np.zeros((num_drafters, 2, NUM_DEPTHS), np.int64)  # edges and hits by depth
        self.shifts = np.zeros((num_drafters, NUM_DEPTHS, NUM_PROBS))
        self.is_stale = np.zeros((num_drafters, NUM_PROBS), np.bool_)  # shifts of which something was counted since

    def grown(self) -> _Books:
        books, number = _Books(len(self.sums) + 1), len(self.sums)
        for name in ("sums", "tallies", "tested", "shifts", "is_stale"):
            getattr(books, name)[:number] = getattr(self, name)
        return books


@dataclass(frozen=True, slots=True)
class Reliability:
    """How well calibrated edges came true of late: counts, sums of probability and hits by tenths of probability; and
    all edges scored and those that came true, by depth bin.
    """

    count: list[float]
    expected: list[float]
    hits: list[float]
    num_scored: list[int]
    num_accepted: list[int]

    def error(self) -> float:
        """The expected calibration error: the mean distance of probability and frequency, weighed by count."""
        total = sum(self.count)
        return sum(abs(e - h) for e, h in zip(self.expected, self.hits, strict=True)) / total if total else 0.0


class AcceptanceModel:
    """Calibrates path probabilities, per drafter, depth, claim and request, and learns from what arrives."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # of drafters
        self._books = _Books(0)
        self._drafter_of, self.records = np.zeros(0, np.int64), np.zeros((0, 3))  # by slot; see own_shift
        self._open: list[Offered] = []

    def start(self, slot: int, drafter: str) -> None:
        """Begin a request's own record, on top of its drafter's: some texts are harder than others."""
        if drafter not in self._numbers:
            self._numbers[drafter] = len(self._numbers)
            self._books = self._books.grown()
        if slot >= len(self.records):
            more = slot + 16
            self._drafter_of = np.pad(self._drafter_of, (0, more))
            self.records = np.pad(self.records, ((0, more), (0, 0)))
        self._drafter_of[slot], self.records[slot] = self._numbers[drafter], 0.0

    def close(self, slot: int) -> None:
        """What was offered to this request and has not arrived never will."""
        for offered in self._open:
            slots, reached = offered.trees
            reached[slots == slot] = CLOSED

    def calibrate(self, trees: DraftForest, slots: IntArray, places: IntArray) -> Offered:
        """Calibrate trees. `slots` are those of all requests of a step; tree i belongs to the one at slots[places[i]].

        Of all nodes it is supposed that they may be accepted; their probs are path probabilities.
        Raises ValueError if a parent does not come before its node.
        """
        starts, parents = trees.starts, trees.parents
        links, results = np.empty((3, len(parents)), np.int64), np.empty((3, len(parents)))
        of_trees = np.empty((2, len(places)), np.int64)
        books, who = self._books, (slots, places, self._drafter_of, self.records)
        counts = (books.sums, books.shifts, books.is_stale)
        wrong = weigh_nodes(starts, parents, trees.probs, _BINS, counts, who, links, results, of_trees)
        if wrong >= 0:
            raise ValueError(f"draft node {wrong}: its parent does not come before it")
        return Offered(of_trees, starts, trees.token_ids, parents, links, results)

    def remember(self, offered: Offered) -> None:
        """Hold these trees against what arrives, until it is known how much of them was right."""
        self._open.append(offered)

    @property
    def is_any_open(self) -> bool:
        return bool(self._open)

    @property
    def num_open(self) -> int:
        """Trees that are still held against what arrives."""
        return sum(int((offered.trees[1] != CLOSED).sum()) for offered in self._open)

    def arrive(self, given: Given) -> None:
        """Score what was proposed to these requests against the next tokens of each."""
        if not self._open or not len(given.slots):
            return
        books = (self._books.sums, self._books.tallies, self._books.tested, self._books.is_stale)
        arrived = (*given, self._drafter_of, self.records, books)
        self._open = [each for each in self._open if score_trees(*each, *arrived)]

    @property
    def reliability(self) -> dict[str, Reliability]:
        """What came true of edges, by drafter."""
        books = self._books
        numbers = self._numbers.copy()  # in one piece: another thread may be looking
        return {
            name: Reliability(*books.tallies[number].tolist(), *books.tested[number].tolist())
            for name, number in numbers.items()
            if number < len(books.tallies)
        }
