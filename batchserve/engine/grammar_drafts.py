"""Grammars as drafters, beside the one of each request: they prune its drafts, and add the tokens that they force."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from batchserve.draft.forest import FORCED, DraftForest

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.draft.forest import DraftQueries
    from batchserve.grammar.state import GrammarState
    from batchserve.request import Request
    from batchserve.scheduler.plan import BoolArray, IntArray


class GrammarDrafts:
    """The grammars of the requests in flight."""

    def __init__(self) -> None:
        self._states: dict[int, GrammarState] = {}  # by slot
        self._unasked: set[int] = set()  # slots with forced tokens whose drafters are not asked in this step

    def add(self, request: Request) -> None:
        if request.adjustments is not None and request.adjustments.grammar is not None:
            self._states[request.slot] = request.adjustments.grammar

    def end(self, slot: int) -> None:
        self._states.pop(slot, None)

    def __bool__(self) -> bool:
        return bool(self._states)

    def add_forced(self, slots: IntArray, is_asked: BoolArray) -> BoolArray:
        """Returns which requests are drafted in this step: those that the policy asks, and those with forced tokens."""
        self._unasked.clear()
        for place, slot in enumerate(slots.tolist()):
            state = None if is_asked[place] else self._states.get(slot)
            if state is not None and state.forced:
                self._unasked.add(slot)
                is_asked[place] = True
        return is_asked

    def are_drafters_asked(self, slots: IntArray) -> BoolArray:
        """Returns which of the drafted requests have their drafter asked."""
        return np.array([slot not in self._unasked for slot in slots.tolist()], np.bool_)

    def propose(
        self,
        propose_all: Callable[[DraftQueries], DraftForest],
        queries: DraftQueries,
        slots: IntArray,
        bounds: IntArray,
    ) -> DraftForest:
        """Returns the trees of the requests at `slots`.

        propose_all: the drafters'. bounds: of each tree the most nodes, and the deepest that is verified.
        """
        places = np.flatnonzero(self.are_drafters_asked(slots))
        if len(places) == len(slots):
            forest = propose_all(queries)
        elif len(places):
            forest = propose_all(queries.at(places.tolist())).spread(places, len(slots))
        else:
            forest = DraftForest.empty(len(slots))
        trees = forest.trees()
        for place, slot in enumerate(slots.tolist()):
            if slot in self._states:
                most, deepest = bounds[place, :2].tolist()
                trees[place] = self._states[slot].constrain(trees[place], most, deepest)
        return DraftForest.of(trees)


def num_forced(forest: DraftForest) -> int:
    return int(np.count_nonzero(forest.probs == FORCED))
