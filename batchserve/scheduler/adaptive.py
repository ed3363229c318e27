"""The adaptive decoding length: what each request drafts in each step, from measured times and scored drafts.

Torch-free and clock-free: it is told what a step cost. K of a request is a pure function of smoothed estimates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from batchserve.scheduler.acceptance import AcceptanceModel, RequestOdds, VerifiedPart
from batchserve.scheduler.draft_budget import Bidders, DraftOffer, Market, choose_drafts
from batchserve.scheduler.price import MOST_SURPRISE, SpeedUp
from batchserve.scheduler.probing import Probe

if TYPE_CHECKING:
    from batchserve.scheduler.step_time import StepLoad, StepTimeModel

FEW_NODES, GROWTH, MOST_NODES = 8, 3.0, 1 << 20  # asked for: some, and a multiple of what is bought lately
CHOSEN_RATE = 0.2
LEAST_GAIN = 0.1  # expected tokens
MARGIN = 0.5  # nodes this much less likely than what is worth a row are still proposed: odds are learned from them
# What a request may lose to the drafts of others: so much of its steps, and so many steps. Less than the second costs
# everybody a good part of what drafts gain, as every request is new once (docs/adaptive.md).
MAX_LOSS, GRACE_STEPS = 0.03, 16.0
MOST_URGENCY, URGENCY_UP, URGENCY_DOWN = 16.0, 1.05, 0.98
WINDOW_PRIOR, WINDOW_MEMORY = 2.0, 64.0  # windows that are believed to earn a token each; that are remembered
TPOT_RATE = 0.1
UNDRAFTED = "none"
LONGEST_WINDOW_WAIT = 4096  # a window earns nothing unless its rows are computed: looking at it costs them


class Tree(Protocol):
    """What is read of a proposed draft tree (draft/base.py: DraftTree)."""

    token_ids: list[int]
    parents: list[int]
    probs: list[float]
    is_verified: list[bool]


@dataclass(slots=True)
class _Window:
    """What a Jacobi window has earned: tokens that were accepted from its n-grams, over the windows that were run."""

    tokens: float = WINDOW_PRIOR
    windows: float = WINDOW_PRIOR
    is_run: bool = False  # in the step under way
    probe: Probe = field(default_factory=Probe)

    @property
    def value(self) -> float:
        """In tokens; what has waited to be tried again is believed to be worth what a new one is."""
        known = self.tokens / self.windows
        return max(known, 1.0) if self.probe.is_trying_again else known

    def missed(self) -> None:
        """It was offered, and nobody wanted it: so it is not offered in every step for nothing, nor never again."""
        self.probe.note(False, (), LONGEST_WINDOW_WAIT)

    def note(self, num_accepted: int) -> None:
        self.tokens += num_accepted
        if self.is_run:
            self.windows += 1.0
            self.probe.note(num_accepted > 0, (), LONGEST_WINDOW_WAIT)
            self.is_run = False
        if self.windows > WINDOW_MEMORY:
            self.tokens, self.windows = self.tokens / 2, self.windows / 2


@dataclass(slots=True)
class _State:
    odds: RequestOdds
    tpot_target_s: float | None = None
    probe: Probe = field(default_factory=Probe)
    urgency: float = 1.0
    tpot_s: float = 0.0
    num_steps: int = 0
    num_chosen: float = 0.0  # nodes, smoothed
    ahead: float = 0.0  # steps without drafts that it is ahead of decoding without any
    window: _Window | None = None  # of a drafter that has one

    def arrived(self, token_ids: Sequence[int], step_s: float, stretch: float) -> None:
        """A step that was `stretch` times as long as it had been without drafts gave the request these tokens."""
        self.probe.arrive(token_ids)
        if self.window is not None and token_ids:
            self.window.note(len(token_ids) - 1)
        self.num_steps += 1
        self.ahead += len(token_ids) - stretch
        tpot_s = step_s / max(1, len(token_ids))
        self.tpot_s += (1.0 if self.num_steps == 1 else TPOT_RATE) * (tpot_s - self.tpot_s)
        if self.tpot_target_s is not None:
            change = URGENCY_UP if self.tpot_s > self.tpot_target_s else URGENCY_DOWN
            self.urgency = max(1.0, min(MOST_URGENCY, self.urgency * change))


class DraftPart(NamedTuple):
    """A VerifiedPart of a tree that has other nodes, too."""

    token_ids: list[int]
    parents: list[int]
    probs: list[float]


@dataclass(frozen=True, slots=True)
class _Offer:
    """The items of one step, and where they come from: by place of the request, its first item and, if its tree has
    rows that are not verified, its verified nodes; by item, a window and its rows.
    """

    items: DraftOffer
    starts: dict[int, int]
    splits: dict[int, list[int]]
    windows: dict[int, tuple[_Window, list[int]]]


@dataclass(frozen=True, slots=True)
class Decoding:
    """One decoding request of a step: the K/V entries that its rows see, and its text."""

    request_id: str
    context_len: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step was and took: its load without drafts, that of its decoding rows alone, and what was run.

    step_s: from its beginning to its commit; draft_s: the part of it in which num_asked requests were drafted.
    """

    without: StepLoad
    decoding: StepLoad
    load: StepLoad
    step_s: float
    draft_s: float
    num_asked: int


@dataclass(slots=True)
class Introspection:
    """The last step's figures, for metrics."""

    price: float = 0.0
    predicted_s: float = 0.0
    step_s: float = 0.0


class AdaptiveDrafting:
    """Decides for one engine. Keyed by request id; not thread-safe.

    A step calls `asks` for each decoding request; if any is to be asked, `begin_step`, their `bounds` and `choose`; and
    `step_done` when it is over. max_inflation: how far drafts may stretch a step that somebody gains nothing from;
    max_step_s: how long they may make it at all.
    """

    def __init__(self, step_time: StepTimeModel, max_inflation: float, max_step_s: float = math.inf) -> None:
        self.step_time = step_time
        self.acceptance = AcceptanceModel()
        self.last = Introspection()
        self._max_inflation = max_inflation
        self._max_step_s = max_step_s
        self._speed_up = SpeedUp()
        self._states: dict[str, _State] = {}
        self._market: Market
        self._num_steps = 0
        self._draft_s = 0.0  # what a proposal for one request takes, smoothed

    def start(self, request_id: str, drafter: str, tpot_target_s: float | None = None) -> None:
        state = self._state(request_id)
        self.acceptance.end(state.odds)
        state.odds, state.tpot_target_s = self.acceptance.start(drafter), tpot_target_s

    def _state(self, request_id: str) -> _State:
        """Requests that are not drafted have one, too: they must not pay for those that are."""
        state = self._states.get(request_id)
        if state is None:
            state = self._states[request_id] = _State(self.acceptance.start(UNDRAFTED))
        return state

    def end(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            self.acceptance.end(state.odds)

    def asks(self, request_id: str) -> bool:
        """Whether the request's drafter is to be called in this step; once a step and request."""
        return self._states[request_id].probe.is_due()

    def begin_step(self, load: StepLoad, alone: StepLoad) -> None:
        """A step is to be drafted that is `load` without any drafts; `alone` are its decoding rows only."""
        alone_s = self.step_time.predict(alone)
        # A prompt in the same step does not make time cheap: what counts is what decoding brings.
        price = self._speed_up.price(alone.num_requests, alone_s)
        longest_s = self._max_inflation * alone_s
        self._market = Market.open(self.step_time, load, alone, price, longest_s, self._max_step_s)
        self.last = Introspection(price)

    def bounds(self, request_ids: Sequence[str]) -> list[tuple[int, float]]:
        """What to ask of each drafter: the most nodes, and the path probability, as it claims it, of the least likely.

        Neither bound limits what is worth its row; both leave some room for odds to be learned.
        """
        states = [self._states[request_id] for request_id in request_ids]
        least = MARGIN * self._market.price * self._market.row_s
        return [
            (
                MOST_NODES if state.window is not None else int(FEW_NODES + GROWTH * state.num_chosen),
                min(0.5, least / state.urgency * math.exp(-max(0.0, shift))),
            )
            for state, shift in zip(states, self.acceptance.shifts([state.odds for state in states]), strict=True)
        ]

    def choose(self, trees: Mapping[str, Tree], decoding: Sequence[Decoding], max_rows: int) -> dict[str, list[int]]:
        """The nodes of each tree that are worth their rows, ascending; requests that get none are left out.

        `trees` are those of all that were asked, `decoding` are all the requests that decode in the step, and max_rows
        the most drafts that the step can take.
        """
        market = self._market
        drafted = [(place, each) for place, each in enumerate(decoding) if each.request_id in trees]
        if not drafted:
            return {}
        states = [self._state(each.request_id) for each in decoding]
        offer = self._offer(trees, drafted, states)
        bidders = Bidders(
            np.array([float(each.context_len) for each in decoding]),
            np.array([state.urgency for state in states]),
            np.array([state.ahead for state in states]) * market.alone_s,
            np.array([GRACE_STEPS + MAX_LOSS * state.num_steps for state in states]) * market.alone_s,
        )
        bought = choose_drafts(offer.items, bidders, self.step_time, market, max_rows)
        owners, gains = offer.items.owners, offer.items.gains
        expected = np.bincount(owners[bought], weights=gains[bought], minlength=len(decoding))
        # So little is not worth asking for, let alone its rows.
        is_paying = expected > max(LEAST_GAIN, market.price * self._draft_s)
        items = np.flatnonzero(bought & is_paying[owners])
        chosen: dict[str, list[int]] = {}
        for item, place in zip(items.tolist(), owners[items].tolist(), strict=True):
            nodes = chosen.setdefault(decoding[place].request_id, [])
            if item in offer.windows:
                window, rows = offer.windows[item]
                nodes += rows
                window.is_run = True
            elif place in offer.splits:
                nodes.append(offer.splits[place][item - offer.starts[place]])
            else:
                nodes.append(item - offer.starts[place])
        for window, _ in offer.windows.values():
            if not window.is_run:
                window.missed()
        for place, each in drafted:
            state = states[place]
            state.probe.note(bool(is_paying[place]), each.token_ids, step=self._num_steps)
            state.num_chosen += CHOSEN_RATE * (len(chosen.get(each.request_id, ())) - state.num_chosen)
        return {request_id: sorted(kept) for request_id, kept in chosen.items()}

    def _offer(
        self, trees: Mapping[str, Tree], drafted: Sequence[tuple[int, Decoding]], states: Sequence[_State]
    ) -> _Offer:
        """What the trees offer: their verified nodes one by one, then windows; remembers the trees, to be scored."""
        parts: list[VerifiedPart] = []
        splits: dict[int, list[int]] = {}
        bundles: list[tuple[int, _Window, list[int]]] = []
        for place, each in drafted:
            tree = trees[each.request_id]
            if all(tree.is_verified):
                parts.append(tree)
                continue
            splits[place], part, rows = _split(tree)
            parts.append(part)
            window = states[place].window = states[place].window or _Window()
            if window.probe.is_due():
                bundles.append((place, window, rows))
        places = np.array([place for place, _ in drafted])
        offered = self.acceptance.calibrate(parts, [states[place].odds for place, _ in drafted])
        self.acceptance.remember(offered)
        owners, gains = np.repeat(places, np.diff(offered.starts)), offered.paths
        sizes, num_nodes = np.ones(len(gains), np.int64), len(gains)
        if bundles:
            owners = np.concatenate((owners, [place for place, _, _ in bundles]))
            gains = np.concatenate((gains, [window.value for _, window, _ in bundles]))
            sizes = np.concatenate((sizes, [len(rows) for _, _, rows in bundles]))
        return _Offer(
            DraftOffer(owners, gains, sizes),
            dict(zip(places.tolist(), offered.starts.tolist(), strict=False)),
            splits,
            {num_nodes + i: (window, rows) for i, (_, window, rows) in enumerate(bundles)},
        )

    def step_done(self, outcome: StepOutcome, token_ids: Mapping[str, Sequence[int]]) -> None:
        """Learn from a step that gave each decoding request these tokens."""
        self._num_steps += 1
        loads = (outcome.load, outcome.without, outcome.decoding)
        predicted_s, without_s, decoding_s = map(self.step_time.predict, loads)
        # What the drafter takes is no part of the forward's time: the table knows nothing of it.
        forward_s = outcome.step_s - outcome.draft_s
        self.step_time.observe(outcome.load, forward_s)
        if outcome.num_asked:
            self._draft_s += 0.1 * (outcome.draft_s / outcome.num_asked - self._draft_s)
        num_tokens = sum(map(len, token_ids.values()))
        if num_tokens:
            surprise = min(MOST_SURPRISE, max(1.0 / MOST_SURPRISE, forward_s / predicted_s))
            decode_s = max(decoding_s, predicted_s - (without_s - decoding_s)) * surprise + outcome.draft_s
            self._speed_up.observe(outcome.decoding.num_requests, num_tokens, decode_s, decoding_s)
        self.last.step_s, self.last.predicted_s = outcome.step_s, predicted_s
        arrived = [(self._states[each], tokens) for each, tokens in token_ids.items() if each in self._states]
        self.acceptance.arrive([state.odds for state, _ in arrived], [tokens for _, tokens in arrived])
        for state, tokens in arrived:
            state.arrived(tokens, outcome.step_s, 1.0 + (predicted_s - without_s) / decoding_s)


def _split(tree: Tree) -> tuple[list[int], DraftPart, list[int]]:
    """A tree's verified nodes, the tree that they are among themselves, and its nodes that are not verified."""
    nodes = [node for node, is_verified in enumerate(tree.is_verified) if is_verified]
    places = {node: place for place, node in enumerate(nodes)}
    part = DraftPart(
        [tree.token_ids[node] for node in nodes],
        [places.get(tree.parents[node], -1) for node in nodes],
        [tree.probs[node] for node in nodes],
    )
    return nodes, part, [node for node, is_verified in enumerate(tree.is_verified) if not is_verified]
