"""A made-up machine for AdaptiveDrafting: every step takes what a table says, every text is known to its end."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from batchserve.decoding_length.acceptance import Given
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.plain_steps import PlainSteps
from batchserve.decoding_length.policy import Drafted, StepOutcome
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from batchserve.draft.base import DraftTree
from batchserve.draft.forest import DraftForest

STEP_S, ROW_S = 0.010, 0.001
DEAR = StepTimeTable((1, 1024), (STEP_S, STEP_S + 1023 * ROW_S))  # at one request a row has to bring a tenth of a token
CHEAP = StepTimeTable((1, 1024), (STEP_S, STEP_S + 1e-6))
CHEAP_PROMPTS = StepTimeTable((1, 24, 1024), (STEP_S, STEP_S + 1e-6, 3 * STEP_S))
RICH = 1e9
MAX_ROWS = 1024
UNSEEN = 1 << 20  # tokens from here on are in no text


@dataclass
class Text:
    """One request: what is still to come of it, and what its drafter says of that.

    hit: how many of its tokens the drafter knows, which claims to know that share; depth: of its proposals, 0 for a
    request that is not drafted; window: so many rows to each proposal that are not verified; repeats_from: the place in
    the answer from which it says the same eight tokens again and again, which the drafter then knows; has_found:
    whether it knows what it knows from its window alone.
    """

    name: str
    hit: float = 0.7
    depth: int = 16
    claim: float | None = None
    window: int = 0
    context: int = 50
    tpot_target_s: float | None = None
    repeats_from: int = 1 << 30
    seed: int = 0
    is_bushy: bool = False
    has_found: bool = True
    tokens: list[int] = field(default_factory=list)  # given so far

    def token(self, place: int) -> int:
        return place if place < self.repeats_from else self.repeats_from + place % 8

    def is_known(self, place: int) -> bool:
        return place >= self.repeats_from or random.Random(f"{self.seed} {place}").random() < self.hit

    def propose(self, most: int) -> DraftTree:
        rng = random.Random(f"tree {self.seed} {len(self.tokens)}")
        tree, parent, claim = DraftTree(), -1, self.hit if self.claim is None else self.claim
        above = 1.0
        for place in range(len(self.tokens), len(self.tokens) + self.depth):
            edge = rng.uniform(0.3, 0.9) if self.is_bushy else claim
            if self.is_bushy and rng.random() < 0.5:
                tree.add(UNSEEN + place, parent, above * (1.0 - edge))
            above *= edge
            parent = tree.add(self.token(place) if self.is_known(place) else UNSEEN, parent, above)
        tree = tree.take(list(range(min(most, len(tree)))))
        for row in range(self.window):
            tree.token_ids.append(UNSEEN + row)
            tree.parents.append(-1)
            tree.probs.append(0.0)
            tree.is_verified.append(False)
        return tree

    def accepted(self, tree: DraftTree, chosen: Sequence[int]) -> list[int]:
        """The tokens of a step in which these nodes were run: the accepted ones and one behind them."""
        node, place = -1, len(self.tokens)
        for i in chosen:
            if tree.is_verified[i] and tree.parents[i] == node and tree.token_ids[i] == self.token(place):
                node, place = i, place + 1
        return [self.token(each) for each in range(len(self.tokens), place + 1)]


class Bidder(NamedTuple):
    slot: int
    token_ids: list[int]


class Step(NamedTuple):
    """By name: who was asked, the draft rows of each request, those of its window, and the tokens that it was given."""

    asked: set[str]
    rows: dict[str, int]
    window_rows: dict[str, int]
    given: dict[str, list[int]]
    seconds: float


class _NeverDue(PlainSteps):
    def is_due(self, num_requests: int, factor: float) -> bool:
        return False


class Machine:
    """An engine without a model. Its time is that of the table (or `truth`, which it does not know), times a slowness.

    has_plain_steps: whether now and then nobody is asked, to see what a step takes; other tests count their steps.
    """

    def __init__(
        self,
        texts: Sequence[Text],
        table: StepTimeTable,
        *,
        inflation: float = RICH,
        max_step_s: float = math.inf,
        truth: StepTimeTable | None = None,
        has_plain_steps: bool = False,
    ) -> None:
        self.adaptive = AdaptiveDrafting(StepTimeModel(table), inflation, max_step_s)
        if not has_plain_steps:
            self.adaptive._plain_steps = _NeverDue()
        self.texts = list(texts)
        self._truth = StepTimeModel(truth or table)
        self._num_accepted: dict[str, int] = {}  # in the last step
        self._slots: dict[str, int] = {}
        for text in texts:
            if text.depth or text.window:
                self.start(text)

    def slot(self, name: str) -> int:
        free = (slot for slot in range(len(self._slots) + 1) if slot not in self._slots.values())
        return self._slots[name] if name in self._slots else self._slots.setdefault(name, next(free))

    def slots(self, names: Iterable[str]) -> np.ndarray:
        return np.array([self.slot(name) for name in names], np.int64)

    def start(self, text: Text) -> None:
        self.adaptive.start(self.slot(text.name), "drafter", text.tpot_target_s)

    def end(self, name: str) -> None:
        self.adaptive.end(self.slot(name))
        del self._slots[name]

    def is_asked(self, name: str) -> bool:
        return bool(self.adaptive.are_asked(self.slots([name]))[0])

    def step(
        self,
        *,
        chunk: int = 0,
        max_rows: int = MAX_ROWS,
        slowness: float = 1.0,
        proposal_s: float = 0.0,
        asking_s: float = 0.0,
    ) -> Step:
        """One step of all texts, beside `chunk` rows of a prompt; asking takes asking_s, and proposal_s a proposal."""
        adaptive, texts = self.adaptive, self.texts
        count, context = len(texts), sum(text.context for text in texts)
        alone = StepLoad(count, count, count, context, context)
        without = alone._replace(num_rows=count + chunk, num_requests=count + bool(chunk))
        drafted = [text for text in texts if text.depth or text.window]
        asked = [text for text in drafted if self.is_asked(text.name)]
        asked = asked if asked and adaptive.begin_step(without, alone, len(asked)) else []
        trees: dict[str, DraftTree] = {}
        chosen: dict[str, list[int]] = {}
        earned = {text.name: self._num_accepted.get(text.name, 0) * text.has_found for text in asked}
        for place in adaptive.windows_run(self.slots(earned)):
            adaptive.window_earned(self.slot(asked[place].name), earned[asked[place].name])
        if asked:
            bounds = np.full((len(asked), 3), 1 << 40)
            adaptive.bound(self.slots(text.name for text in asked), bounds, max_rows)
            trees = {text.name: text.propose(most) for text, most in zip(asked, bounds[:, 0].tolist(), strict=True)}
            bidders = [Bidder(self.slot(text.name), text.tokens) for text in asked]
            forest = DraftForest.of(list(trees.values()))
            places = np.array([texts.index(text) for text in asked])
            contexts = np.array([text.context for text in texts])
            all_slots = self.slots(text.name for text in texts)
            drafted_now = Drafted(cast("Any", bidders), all_slots[places], places, all_slots, contexts)
            keep = adaptive.choose(forest, drafted_now, max_rows)
            forest.take(keep)  # refuses a node without its parent
            parts = zip(trees, np.split(keep, forest.starts[1:-1]), strict=True)
            chosen = {name: np.flatnonzero(part).tolist() for name, part in parts if part.any()}
        given = {text.name: [text.token(len(text.tokens))] for text in texts}
        given |= {text.name: text.accepted(trees[text.name], chosen.get(text.name, [])) for text in asked}
        rows = {name: len(nodes) for name, nodes in chosen.items()}
        more = sum(rows.values())
        attended = sum(rows.get(text.name, 0) * text.context for text in texts)
        load = without._replace(
            num_rows=without.num_rows + more,
            num_logit_rows=without.num_logit_rows + more,
            attended_tokens=context + attended,
        )
        seconds = slowness * self._truth.predict(load)
        draft_s = asking_s * bool(asked) + proposal_s * len(asked)
        outcome = StepOutcome(without, alone, load, seconds + draft_s, seconds, draft_s, len(asked))
        adaptive.step_done(outcome, Given.of({self.slot(name): tokens for name, tokens in given.items()}))
        for text in texts:
            text.tokens += given[text.name]
        self._num_accepted = {name: len(tokens) - 1 for name, tokens in given.items()}
        window = {n: sum(not trees[n].is_verified[node] for node in nodes) for n, nodes in chosen.items()}
        return Step({text.name for text in asked}, rows, window, given, seconds)

    def steps(self, count: int, **each: float) -> list[Step]:
        return [self.step(**each) for _ in range(count)]  # type: ignore[arg-type]
