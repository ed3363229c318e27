"""The adaptive decoding length: what each request drafts in each step, from measured times and scored drafts.

Torch-free and clock-free: it is told what a step cost. K of a request is a pure function of smoothed estimates.
"""

from __future__ import annotations

import math
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from batchserve.decoding_length.acceptance import AcceptanceModel, Given
from batchserve.decoding_length.draft_budget import DraftOffer, Market
from batchserve.decoding_length.draft_time import DraftTime
from batchserve.decoding_length.jacobi_window import JacobiWindow
from batchserve.decoding_length.plain_steps import PlainSteps
from batchserve.decoding_length.policy import DraftPolicy, step_time_gauges
from batchserve.decoding_length.price import MOST_SURPRISE, SpeedUp
from batchserve.decoding_length.probing import LONG_WAIT, PATIENCE, WATCHED, Probe
from batchserve.decoding_length.standing import STANDING, UNKNOWN, bound_queries, choose_drafts, grown, note_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.decoding_length.acceptance import FloatArray, IntArray
    from batchserve.decoding_length.policy import BoolArray, StepOutcome
    from batchserve.decoding_length.step_time import StepLoad, StepTimeModel
    from batchserve.draft.forest import DraftForest
    from batchserve.request import Request

MARGIN = 0.8  # nodes this much less likely than what is worth a row are still proposed: odds are learned from them
UNDRAFTED = "none"
NOBODY = np.zeros(0, np.int64)
MOST_HEARD = 8  # steps without drafts
HOPELESS = 8  # steps in which requests gave up on a drafter since it last paid: from then on new ones wait at once


class _Offer(NamedTuple):
    """The items of one step: `nodes` of the forest (None: all) one by one, then windows, each with its nodes."""

    items: DraftOffer
    num_nodes: int
    nodes: IntArray | None
    windows: list[tuple[JacobiWindow, IntArray]]


_Heard = tuple["StepOutcome", "Mapping[str, Sequence[int]]"]  # a step, and what it gave to whom


class Introspection(NamedTuple):
    """Figures of the last step that was learned from, for metrics."""

    price: float
    predicted_s: float
    step_s: float


class AdaptiveDrafting(DraftPolicy):
    """Buys the rows that are worth their time.

    max_inflation: how far drafts may stretch a step that somebody gains nothing from; max_step_s: how long they may
    make it at all.
    """

    def __init__(self, step_time: StepTimeModel, max_inflation: float, max_step_s: float = math.inf) -> None:
        self.step_time = step_time
        self.acceptance = AcceptanceModel()
        self.last: Introspection | None = None
        self._max_inflation = max_inflation
        self._max_step_s = max_step_s
        self._speed_up = SpeedUp()
        self._slots: dict[str, int] = {}  # by request id; of `acceptance`, and of the next
        self._found: tuple[list[str], IntArray] = [], NOBODY  # asked for last: most steps are of the same
        self._standing = np.zeros(0, STANDING)
        self._drafters: dict[str, str] = {}  # by request id
        self._probes: dict[str, Probe] = {}  # of requests whose drafter has failed them lately
        self._given_up: dict[str, int] = {}  # by drafter: steps in which requests gave up on it, since it last paid
        self._windows: dict[str, JacobiWindow] = {}  # of requests whose drafter has one
        self._market: Market
        self._last_price = 0.0  # of the last step that was to be drafted
        self._num_steps = 0
        self._draft_time = DraftTime()
        self._plain_steps = PlainSteps()
        self._heard: list[_Heard] = []  # steps that are not learned from yet

    def start(self, request_id: str, drafter: str, tpot_target_s: float | None = None) -> None:
        before = self._slots.get(request_id)
        slot = self._new_slot(request_id, drafter)
        if before is not None:
            self._standing[slot] = self._standing[before]
            self.acceptance.end(before)
        if tpot_target_s is not None:
            self._standing["tpot_target_s"][slot] = tpot_target_s
        self._drafters[request_id] = drafter
        # Where nobody has gained for a while a new request has to show at once that it is another matter.
        if given_up := self._given_up.get(drafter, 0):
            late = Probe(PATIENCE + WATCHED + 1, wait=(1 - self._num_steps) % LONG_WAIT)  # beside those who waited long
            self._probes[request_id] = late if given_up >= HOPELESS else Probe(min(PATIENCE, given_up))

    def _new_slot(self, request_id: str, drafter: str) -> int:
        slot = self._slots[request_id] = self.acceptance.start(drafter)
        self._found = [], NOBODY
        self._standing = grown(self._standing, slot + 1) if slot >= len(self._standing) else self._standing
        self._standing[slot] = UNKNOWN
        return slot

    def _slots_of(self, request_ids: Sequence[str]) -> IntArray:
        """Requests that are not drafted have one, too: they must not pay for those that are."""
        names, slots = list(request_ids), self._slots
        if names != self._found[0]:
            found = [slots[each] if each in slots else self._new_slot(each, UNDRAFTED) for each in names]
            self._found = names, np.array(found, np.int64)
        return self._found[1]

    def end(self, request_id: str) -> None:
        self._learn()  # while the name is this one's
        slot = self._slots.get(request_id)
        if slot is not None:
            self._found = [], NOBODY
            del self._slots[request_id]
            self.acceptance.end(slot)
            self._drafters.pop(request_id, None)
            self._probes.pop(request_id, None)
            self._windows.pop(request_id, None)

    def refused(self, request_id: str) -> None:
        window = self._windows.get(request_id)
        if window is not None:
            window.is_run = False

    def skip(self, request_id: str) -> None:
        slot = self._slots.get(request_id)
        if slot is not None:
            self.acceptance.close(slot)

    def are_asked(self, request_ids: Sequence[str]) -> list[bool]:
        probes = self._probes
        return [each not in probes or probes[each].is_due() for each in request_ids]

    def windows_run(self, request_ids: Sequence[str]) -> list[str]:
        """Whose Jacobi window was run since it was last said what it had earned."""
        windows = self._windows
        return [each for each in request_ids if each in windows and windows[each].is_run] if windows else []

    def window_earned(self, request_id: str, num_tokens: int) -> None:
        self._windows[request_id].note(num_tokens)

    def begin_step(self, load: StepLoad, alone: StepLoad, num_asked: int) -> bool:
        """Somebody is asked where there is room for a row, or it is time to see how long drafting takes by now; and
        where it is not time to see how long a step takes without drafts.
        """
        self._learn()
        gain = self._speed_up.ratio(alone.num_requests)
        room_s = self._max_step_s - self._draft_time.predict(num_asked)
        self._market = market = Market.open(self.step_time, load, alone, gain, self._max_inflation, room_s)
        self._last_price = market.price
        if load == alone and self._plain_steps.is_due(alone.num_requests, self.step_time.factor):
            return False
        least_s = market.without_s + market.row_s
        return least_s <= self._max_step_s and self._draft_time.is_tried(num_asked, is_too_long=room_s < least_s)

    def bound(self, request_ids: Sequence[str], bounds: IntArray, max_rows: int) -> FloatArray:
        """Neither bound limits what is worth its row; both leave some room for odds to be learned."""
        least = np.empty(len(request_ids))
        worth_a_row = MARGIN * self._market.price * self._market.row_s
        slots = self._slots_of(request_ids)
        worth = worth_a_row, float(max_rows)
        bound_queries(self._standing, self.acceptance.records, slots, worth, bounds, least)
        return least

    def choose(
        self, forest: DraftForest, request_ids: Sequence[str], decoding: Sequence[Request], max_rows: int
    ) -> BoolArray:
        """Which nodes are worth their rows."""
        names, market = [each.request_id for each in decoding], self._market
        slots, of_trees, drafted = self._slots_of(names), np.arange(len(names)), decoding
        if names != request_ids:
            place_of = {name: place for place, name in enumerate(names)}
            of_trees = np.array([place_of[request_id] for request_id in request_ids], np.int64)
            drafted = [decoding[place] for place in of_trees.tolist()]
        offer = self._offer(forest, request_ids, of_trees, slots)
        contexts = np.array([each.num_computed_tokens for each in decoding], np.int64)
        chosen, is_paying = np.zeros(len(offer.items.owners), np.bool_), np.zeros(len(names), np.bool_)
        draft_s = self._draft_time.predict(len(request_ids))
        prices = tuple(market.load), market.terms(max_rows), (market.alone_s, draft_s)
        who, what = (self._standing, slots, of_trees, contexts), tuple(offer.items)
        choose_drafts(*who, what, self.step_time.arrays, prices, chosen, is_paying)
        self._note(drafted, is_paying[of_trees].tolist())
        return chosen if offer.nodes is None else self._unbundled(offer, offer.nodes, chosen)

    def _unbundled(self, offer: _Offer, nodes: IntArray, chosen: BoolArray) -> BoolArray:
        """The chosen items, node by node."""
        keep = np.zeros(offer.num_nodes, np.bool_)
        keep[nodes[chosen[: len(nodes)]]] = True
        for (window, rows), is_run in zip(offer.windows, chosen[len(nodes) :].tolist(), strict=True):
            keep[rows] = window.is_run = is_run
            if not is_run:
                window.missed()
        return keep

    def _note(self, drafted: Sequence[Request], pays: Sequence[bool]) -> None:
        """For whom his drafter paid, and who was asked for nothing: then his text is looked at."""
        given_up = set()
        for each in compress(drafted, map(not_, pays)):
            probe = self._probes.get(each.request_id)
            if probe is None:
                probe = self._probes[each.request_id] = Probe()
            probe.note(False, each.token_ids, step=self._num_steps)
            if probe.num_failures == PATIENCE + 1:
                given_up.add(self._drafters[each.request_id])
        for drafter in given_up:
            self._given_up[drafter] = self._given_up.get(drafter, 0) + 1
        if self._probes or self._given_up:
            for each in compress(drafted, pays):
                self._probes.pop(each.request_id, None)
                self._given_up.pop(self._drafters[each.request_id], None)

    def _offer(self, forest: DraftForest, request_ids: Sequence[str], places: IntArray, slots: IntArray) -> _Offer:
        """What the trees offer; remembers them, to be scored."""
        nodes, verified, bundles = None, forest.verified(), []
        if verified is not forest:
            bundles, nodes = self._windows_of(forest, request_ids, places), np.flatnonzero(forest.is_verified)
        offered = self.acceptance.calibrate(verified, slots, places)
        self.acceptance.remember(offered)
        owners, gains, sizes = offered.owners, offered.paths, offered.ones
        if bundles:
            owners = np.concatenate((owners, [place for place, _, _ in bundles]))
            gains = np.concatenate((gains, [window.value for _, window, _ in bundles]))
            sizes = np.concatenate((sizes, [len(rows) for _, _, rows in bundles]))
        windows = [(window, rows) for _, window, rows in bundles]
        return _Offer(DraftOffer(owners, gains, sizes), len(forest.token_ids), nodes, windows)

    def _windows_of(
        self, forest: DraftForest, request_ids: Sequence[str], places: IntArray
    ) -> list[tuple[int, JacobiWindow, IntArray]]:
        """The windows that are worth a look: the place of the request that each is of, and its nodes."""
        found = []
        for tree, (request_id, place) in enumerate(zip(request_ids, places.tolist(), strict=True)):
            start, end = forest.starts[tree : tree + 2]
            rows = start + np.flatnonzero(~forest.is_verified[start:end])
            if not len(rows):
                continue
            window = self._windows.setdefault(request_id, JacobiWindow())
            self._standing["has_window"][self._slots[request_id]] = 1
            if window.probe.is_due():
                found.append((place, window, rows))
        return found

    def step_done(self, outcome: StepOutcome, token_ids: Mapping[str, Sequence[int]]) -> None:
        """What nobody drafted in is learned from a little later, several steps at once: each by itself would find the
        caches as a forward leaves them.
        """
        self._num_steps += 1
        has_prompt = outcome.without != outcome.decoding
        if has_prompt:
            self._learn()  # of those before, which are of another kind
        self._heard.append((outcome, token_ids))
        if outcome.num_asked or has_prompt or self.acceptance.is_any_open or len(self._heard) == MOST_HEARD:
            self._learn()

    def gauges(self) -> dict[str, float]:
        last = self.last
        if last is None:
            return {}
        prices = {"price_tokens_per_second": last.price}
        return prices | step_time_gauges(self.step_time, last.predicted_s, last.step_s)

    def _learn(self) -> None:
        if not self._heard:
            return
        heard, self._heard = self._heard, []
        middle = 0
        if len(heard) > 1:  # without drafts: the machine's pace is learned from the median one
            middle = sorted(range(len(heard)), key=lambda place: heard[place][0].step_s)[(len(heard) - 1) // 2]
        stretch = self._learn_times(*heard[middle], num_steps=len(heard))
        token_ids, num_steps = _together(heard)
        given = Given.of(self._slots, token_ids, num_steps)
        if len(given.slots):  # until then it may not be compiled: nobody waits for that
            # Of several steps none has drafts or prompts, and the stretch is that of all.
            step_s = sum(outcome.step_s for outcome, _ in heard) / len(heard)
            note_steps(self._standing, given.slots, given.num_steps, given.starts, step_s, stretch)
        self.acceptance.arrive(given)
        for request_id, probe in self._probes.items():
            if probe.is_watching:
                probe.arrive(token_ids.get(request_id, ()))

    def _learn_times(self, outcome: StepOutcome, token_ids: Mapping[str, Sequence[int]], num_steps: int) -> float:
        """How many times as long the step was as without drafts; there were num_steps like it.

        Drafting is in it as long as it usually takes: nobody's account is charged for a pause.
        """
        times, is_apart = (outcome.forward_s, outcome.host_s), self._is_apart(outcome)
        predicted_s, without_s, decoding_s = self.step_time.observe(
            outcome.load,
            *times,
            num_steps=num_steps,
            without=outcome.without,
            decoding=outcome.decoding,
            is_apart=is_apart,
        )
        draft_s = usual_s = 0.0
        if outcome.num_asked:
            # A pause of the machine says nothing of the drafter, and while nobody pays hardly anybody is asked.
            draft_s = self._draft_time.observe(outcome.num_asked, outcome.draft_s, decoding_s)
            usual_s = self._draft_time.predict(outcome.num_asked)
        num_tokens = sum(map(len, token_ids.values()))
        if num_tokens:
            surprise = min(MOST_SURPRISE, max(1.0 / MOST_SURPRISE, sum(times) / predicted_s))
            decode_s = max(decoding_s, predicted_s - (without_s - decoding_s)) * surprise + draft_s
            for _ in range(num_steps):
                self._speed_up.observe(outcome.decoding.num_requests, num_tokens, decode_s, decoding_s)
        self.last = Introspection(self._last_price, predicted_s + usual_s, outcome.step_s)
        return 1.0 + (predicted_s - without_s + usual_s) / decoding_s

    def _is_apart(self, outcome: StepOutcome) -> bool:
        """Whether it is the first without drafts and prompts behind many with drafts."""
        is_drafted = outcome.load != outcome.without
        if not is_drafted and outcome.without != outcome.decoding:
            return False
        return self._plain_steps.note(outcome.decoding.num_requests, self.step_time.factor, is_drafted=is_drafted)


def _together(heard: Sequence[_Heard]) -> tuple[Mapping[str, Sequence[int]], Mapping[str, int] | None]:
    """Each request's tokens, and in how many of the steps they came: None where there is but one."""
    if len(heard) == 1:
        return heard[0][1], None
    tokens: dict[str, list[int]] = {}
    num_steps: dict[str, int] = {}
    for _, given in heard:
        for request_id, token_ids in given.items():
            if request_id in tokens:
                tokens[request_id] += token_ids
                num_steps[request_id] += 1
            else:
                tokens[request_id], num_steps[request_id] = [*token_ids], 1
    return tokens, num_steps
