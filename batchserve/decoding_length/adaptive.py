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
from batchserve.decoding_length.accounts import ACCOUNT, NEW_ACCOUNT, bound_queries, choose_drafts, grown, note_steps
from batchserve.decoding_length.draft_budget import DraftOffer, Market
from batchserve.decoding_length.draft_time import DraftTime
from batchserve.decoding_length.jacobi_window import JacobiWindow
from batchserve.decoding_length.plain_steps import PlainSteps
from batchserve.decoding_length.policy import DraftPolicy, step_time_gauges
from batchserve.decoding_length.price import MAX_SURPRISE, SpeedUp
from batchserve.decoding_length.probing import LONG_WAIT, PATIENCE, WATCHED, Probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.decoding_length.acceptance import FloatArray, IntArray
    from batchserve.decoding_length.policy import BoolArray, Drafted, StepOutcome
    from batchserve.decoding_length.step_time import StepLoad, StepTimeModel
    from batchserve.draft.forest import DraftForest
    from batchserve.request import Request

MARGIN = 0.8  # nodes this much less likely than what is worth a row are still proposed: odds are learned from them
UNDRAFTED = "none"
MAX_UNLEARNED = 8  # steps without drafts
HOPELESS = 8  # steps in which requests gave up on a drafter since it last paid: from then on new ones wait at once


class _Offer(NamedTuple):
    """The items of one step: `nodes` of the forest (None: all) one by one, then windows, each with its nodes."""

    items: DraftOffer
    num_nodes: int
    nodes: IntArray | None
    windows: list[tuple[JacobiWindow, IntArray]]


class Introspection(NamedTuple):
    """Figures of the last step that was learned from, for metrics."""

    price: float
    predicted_s: float
    step_s: float


class AdaptiveDrafting(DraftPolicy):
    """Runs the draft rows that are worth their time.

    max_inflation: how far drafts may stretch a step that some request gains nothing from. max_step_s: how long drafts
    may make a step at all.
    """

    def __init__(self, step_time: StepTimeModel, max_inflation: float, max_step_s: float = math.inf) -> None:
        self.step_time = step_time
        self.acceptance = AcceptanceModel()
        self.last: Introspection | None = None
        self._max_inflation = max_inflation
        self._max_step_s = max_step_s
        self._speed_up = SpeedUp()
        self._accounts = np.zeros(0, ACCOUNT)  # by slot, like the next two
        self._is_known = np.zeros(0, np.bool_)
        self._drafters: dict[int, str] = {}
        self._probes: dict[int, Probe] = {}  # of requests whose drafter has failed them lately
        self._windows: dict[int, JacobiWindow] = {}  # of requests whose drafter has one
        self._given_up: dict[str, int] = {}  # by drafter: steps in which requests gave up on it, since it last paid
        self._market: Market
        self._last_price = 0.0  # of the last step that was to be drafted
        self._num_steps = 0
        self._draft_time = DraftTime()
        self._plain_steps = PlainSteps()
        self._unlearned: list[tuple[StepOutcome, Given]] = []  # steps, and the tokens that they gave

    def start(self, slot: int, drafter: str, tpot_target_s: float | None = None) -> None:
        self._meet(np.array([slot]), drafter)
        self.acceptance.close(slot)  # it may have been known as one without drafts
        self.acceptance.start(slot, drafter)
        if tpot_target_s is not None:
            self._accounts["tpot_target_s"][slot] = tpot_target_s
        self._drafters[slot] = drafter
        # While drafts have not paid for anyone lately, a new request has to show at once that it is different.
        if given_up := self._given_up.get(drafter, 0):
            late = Probe(PATIENCE + WATCHED + 1, wait=(1 - self._num_steps) % LONG_WAIT)  # in step with the other waits
            self._probes[slot] = late if given_up >= HOPELESS else Probe(min(PATIENCE, given_up))

    def _meet(self, slots: IntArray, drafter: str = UNDRAFTED) -> None:
        """Begin a row for each request that has none. Those without drafts need one: they must not pay for others."""
        if len(slots) and slots.max() >= len(self._is_known):
            more = int(slots.max()) + 16
            self._is_known = np.pad(self._is_known, (0, more))
            self._accounts = grown(self._accounts, len(self._is_known))
        if not self._is_known[slots].all():
            for slot in slots[~self._is_known[slots]].tolist():
                self._is_known[slot], self._accounts[slot] = True, NEW_ACCOUNT
                self.acceptance.start(slot, drafter)

    def end(self, slot: int) -> None:
        self._learn()  # while the slot is this request's
        self.acceptance.close(slot)
        if slot < len(self._is_known):
            self._is_known[slot] = False
        self._drafters.pop(slot, None)
        self._probes.pop(slot, None)
        self._windows.pop(slot, None)

    def refused(self, slot: int) -> None:
        window = self._windows.get(slot)
        if window is not None:
            window.is_run = False

    def skip(self, slot: int) -> None:
        self.acceptance.close(slot)

    def are_asked(self, slots: IntArray) -> BoolArray:
        probes = self._probes
        if not probes:
            return np.ones(len(slots), np.bool_)
        return np.array([each not in probes or probes[each].is_due() for each in slots.tolist()], np.bool_)

    def windows_run(self, slots: IntArray) -> list[int]:
        """The places of requests whose Jacobi window was run since `window_earned` was last called for it."""
        windows = self._windows
        return [place for place, slot in enumerate(slots.tolist()) if slot in windows and windows[slot].is_run]

    def window_earned(self, slot: int, num_tokens: int) -> None:
        self._windows[slot].note(num_tokens)

    def begin_step(self, load: StepLoad, alone: StepLoad, num_asked: int) -> bool:
        """False if there is no room for a row, unless it is time to measure drafting again; and if it is time to
        measure a step without drafts.
        """
        self._learn()
        gain = self._speed_up.ratio(alone.num_requests)
        room_s = self._max_step_s - self._draft_time.predict(num_asked)
        self._market = market = Market.open(self.step_time, load, alone, gain, self._max_inflation, room_s)
        self._last_price = market.price
        if load == alone and self._plain_steps.is_due(alone.num_requests, self.step_time.factor):
            return False
        min_s = market.without_s + market.row_s
        return min_s <= self._max_step_s and self._draft_time.is_tried(num_asked, is_too_long=room_s < min_s)

    def bound(self, slots: IntArray, bounds: IntArray, max_rows: int) -> FloatArray:
        """Neither bound limits what is worth its row; both leave some room for odds to be learned."""
        least = np.empty(len(slots))
        worth_a_row = MARGIN * self._market.price * self._market.row_s
        worth = worth_a_row, float(max_rows)
        bound_queries(self._accounts, self.acceptance.records, slots, worth, bounds, least)
        return least

    def choose(self, forest: DraftForest, drafted: Drafted, max_rows: int) -> BoolArray:
        """Returns the nodes that are worth their rows."""
        self._meet(drafted.all_slots)
        market, places = self._market, drafted.places
        offer = self._offer(forest, drafted)
        chosen, is_paying = np.zeros(len(offer.items.owners), np.bool_), np.zeros(len(drafted.all_slots), np.bool_)
        draft_s = self._draft_time.predict(len(places))
        prices = tuple(market.load), market.terms(max_rows), (market.alone_s, draft_s)
        who = self._accounts, drafted.all_slots, places, drafted.contexts
        choose_drafts(*who, tuple(offer.items), self.step_time.arrays, prices, chosen, is_paying)
        self._note(drafted.requests, is_paying[places].tolist())
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
        """Note for which requests their drafter paid. The text of a request that waits long is watched."""
        if not (self._probes or self._given_up or False in pays):
            return
        given_up = set()
        for request in compress(drafted, map(not_, pays)):
            probe = self._probes.setdefault(request.slot, Probe())
            probe.note(False, request.token_ids, step=self._num_steps)
            if probe.num_failures == PATIENCE + 1:
                given_up.add(self._drafters[request.slot])
        for drafter in given_up:
            self._given_up[drafter] = self._given_up.get(drafter, 0) + 1
        for request in compress(drafted, pays):
            self._probes.pop(request.slot, None)
            self._given_up.pop(self._drafters[request.slot], None)

    def _offer(self, forest: DraftForest, drafted: Drafted) -> _Offer:
        """Returns the items that the trees offer, and keeps the trees to be scored."""
        nodes, verified, bundles = None, forest.verified(), []
        if verified is not forest:
            bundles, nodes = self._windows_of(forest, drafted), np.flatnonzero(forest.is_verified)
        offered = self.acceptance.calibrate(verified, drafted.all_slots, drafted.places)
        self.acceptance.remember(offered)
        owners, gains, sizes = offered.owners, offered.paths, offered.ones
        if bundles:
            owners = np.concatenate((owners, [place for place, _, _ in bundles]))
            gains = np.concatenate((gains, [window.value for _, window, _ in bundles]))
            sizes = np.concatenate((sizes, [len(rows) for _, _, rows in bundles]))
        windows = [(window, rows) for _, window, rows in bundles]
        return _Offer(DraftOffer(owners, gains, sizes), len(forest.token_ids), nodes, windows)

    def _windows_of(self, forest: DraftForest, drafted: Drafted) -> list[tuple[int, JacobiWindow, IntArray]]:
        """The windows that are worth a look: the place of each one's request, and its nodes."""
        found = []
        for tree, (slot, place) in enumerate(zip(drafted.slots.tolist(), drafted.places.tolist(), strict=True)):
            start, end = forest.starts[tree : tree + 2]
            rows = start + np.flatnonzero(~forest.is_verified[start:end])
            if not len(rows):
                continue
            window = self._windows.setdefault(slot, JacobiWindow())
            self._accounts["has_window"][slot] = 1
            if window.probe.is_due():
                found.append((place, window, rows))
        return found

    def step_done(self, outcome: StepOutcome, given: Given) -> None:
        """Steps without drafts are learned from a little later, several at once: each by itself would find the caches
        as a forward leaves them.
        """
        self._num_steps += 1
        has_prompt = outcome.without != outcome.decoding
        if has_prompt:
            self._learn()  # from those before, which are of another kind
        self._unlearned.append((outcome, given))
        if outcome.num_asked or has_prompt or self.acceptance.is_any_open or len(self._unlearned) == MAX_UNLEARNED:
            self._learn()

    def gauges(self) -> dict[str, float]:
        last = self.last
        if last is None:
            return {}
        prices = {"price_tokens_per_second": last.price}
        return prices | step_time_gauges(self.step_time, last.predicted_s, last.step_s)

    def _learn(self) -> None:
        if not self._unlearned:
            return
        steps, self._unlearned = self._unlearned, []
        middle = 0
        if len(steps) > 1:  # without drafts: the machine's pace is learned from the median one
            middle = sorted(range(len(steps)), key=lambda place: steps[place][0].step_s)[(len(steps) - 1) // 2]
        given = Given.joined([given for _, given in steps])
        stretch = self._learn_times(steps[middle][0], len(steps[middle][1].token_ids), len(steps))
        if self._drafters:  # before the first the kernel may not be compiled, and nobody waits for that
            self._meet(given.slots)
            # If there are several steps, none has drafts or prompts, and the stretch is that of all.
            step_s = sum(outcome.step_s for outcome, _ in steps) / len(steps)
            note_steps(self._accounts, given.slots, given.starts, step_s, stretch)
        for _, each in steps:
            self.acceptance.arrive(each)
        if any(probe.is_watching for probe in self._probes.values()):
            tokens = given.by_slot()
            for slot, probe in self._probes.items():
                probe.arrive(tokens.get(slot, ()))

    def _learn_times(self, outcome: StepOutcome, num_tokens: int, num_steps: int) -> float:
        """How many times as long the step was as without drafts; there were num_steps like it.

        Drafting is in it as long as it usually takes: nobody's account is charged for a pause.
        """
        is_apart = self._is_apart(outcome)
        times = (math.nan, math.nan) if outcome.is_trial else (outcome.forward_s, outcome.host_s)  # nothing is learned
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
        if num_tokens and not outcome.is_trial:
            surprise = min(MAX_SURPRISE, max(1.0 / MAX_SURPRISE, sum(times) / predicted_s))
            decode_s = max(decoding_s, predicted_s - (without_s - decoding_s)) * surprise + draft_s
            for _ in range(num_steps):
                self._speed_up.observe(outcome.decoding.num_requests, num_tokens, decode_s, decoding_s)
        self.last = Introspection(self._last_price, predicted_s + usual_s, outcome.step_s)
        # Forced tokens are as sure to come as those of a prompt, and no more unfair: a later step is spared their rows.
        forced_s = outcome.num_forced * self._market.row_s if outcome.num_forced else 0.0
        return max(1.0, 1.0 + (predicted_s - without_s - forced_s + usual_s) / decoding_s)

    def _is_apart(self, outcome: StepOutcome) -> bool:
        """True for the first step without drafts and prompts after many with drafts."""
        is_drafted = outcome.load != outcome.without
        if not is_drafted and outcome.without != outcome.decoding:
            return False
        return self._plain_steps.note(outcome.decoding.num_requests, self.step_time.factor, is_drafted=is_drafted)
