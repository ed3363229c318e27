from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.decoding_length.budget_kernels import EVEN_STEPS, MIN_ROW_COST, buy
from batchserve.decoding_length.draft_budget import DraftOffer, Market
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from tests.factories import examples

RISING = StepTimeModel(StepTimeTable((4, 8, 16, 32), (0.010, 0.012, 0.020, 0.040)))
RICH = 1e9


class Bidders(NamedTuple):
    contexts: np.ndarray
    bids: np.ndarray


def offer(*trees: list[float], rows: list[int] | None = None) -> DraftOffer:
    owners = np.array([i for i, tree in enumerate(trees) for _ in tree], np.int64)
    gains = np.array([prob for tree in trees for prob in tree])
    return DraftOffer(owners, gains, np.array(rows or [1] * len(gains), np.int64))


def bidders(count: int, *, ahead_s: float = 0.0, grace_s: float = RICH) -> Bidders:
    bids = np.repeat([[1.0], [ahead_s], [grace_s]], count, axis=1)
    return Bidders(np.zeros(count, np.int64), bids)


def bought(what: DraftOffer, who: Bidders, model: StepTimeModel, market: Market, max_rows: int) -> np.ndarray:
    chosen = np.zeros(len(what.owners), np.bool_)
    buy(tuple(what), tuple(who), model.arrays, tuple(market.load), market.terms(max_rows), chosen)
    return chosen


def choose(
    what: DraftOffer,
    who: Bidders,
    price: float,
    *,
    max_rows: int = 64,
    inflation: float = RICH,
    model: StepTimeModel = RISING,
) -> list[int]:
    count = len(who.contexts)
    load = StepLoad(count, count, count)
    speed_up = price * model.predict(load) / count
    market = Market.open(model, load, load, speed_up, inflation)
    return np.flatnonzero(bought(what, who, model, market, max_rows)).tolist()


def test_without_a_price_everything_is_worth_its_rows_and_at_a_high_price_nothing_is() -> None:
    what = offer([0.9, 0.5, 0.1], [0.3])
    assert choose(what, bidders(2), 0.0) == [0, 1, 2, 3]
    assert choose(what, bidders(2), 1e9) == []


def test_rows_go_to_the_likeliest_nodes_of_all_requests() -> None:
    assert choose(offer([0.9, 0.8, 0.7], [0.3, 0.2]), bidders(2), 0.0, max_rows=3) == [0, 1, 2]


def test_a_price_draws_the_line_at_what_a_row_costs() -> None:
    # Behind 8 rows a row takes 1 ms: at 500 tokens a second it has to bring half a token.
    assert choose(offer([0.9, 0.6, 0.4], *[[]] * 7), bidders(8), 500.0) == [0, 1]


def test_urgent_requests_come_first() -> None:
    who = bidders(2)
    who.bids[0] = 1.0, 4.0
    assert choose(offer([0.5], [0.3]), who, 0.0, max_rows=1) == [1]


def test_a_long_context_makes_rows_dear() -> None:
    model = StepTimeModel(StepTimeTable((4, 32), (0.010, 0.020), per_attended_token=1e-6))
    who = bidders(2)
    who.contexts[:] = 10, 4000
    assert choose(offer([0.4], [0.5]), who, 0.0, max_rows=1, model=model) == [0]


def test_a_step_is_stretched_no_further_unless_everybody_gains_or_is_even() -> None:
    what = offer([0.9] * 12, [0.01])
    behind_s = -EVEN_STEPS * RISING.predict(StepLoad(2, 2, 2))
    assert len(choose(what, bidders(2, ahead_s=behind_s), 0.0, inflation=1.25)) <= 8  # 0.0125 s at 8.5 rows
    assert len(choose(what, bidders(2), 0.0, inflation=1.25)) == 13
    both = offer([0.9] * 6, [0.9] * 6)
    assert len(choose(both, bidders(2), 0.0, inflation=1.25)) == 12
    # Whoever is ahead anyway has gained more than this step can cost.
    assert len(choose(what, bidders(2, ahead_s=1.0), 0.0, inflation=1.25)) == 13
    market = Market.open(RISING, StepLoad(2, 2, 2), StepLoad(2, 2, 2), 0.0, 1.25, 0.015)
    bounded = bought(both, bidders(2), RISING, market, 64)
    assert 0 < bounded.sum() <= 10


def test_nobody_is_made_to_lose_more_than_his_grace() -> None:
    what = offer([0.99] * 8, [])
    assert len(choose(what, bidders(2), 0.0)) == 8
    chosen = choose(what, bidders(2, grace_s=0.001), 0.0)
    assert 0 < len(chosen) <= 4  # 0.5 ms a row
    assert choose(what, bidders(2, ahead_s=-1.0, grace_s=0.5), 0.0) == []
    assert len(choose(what, bidders(2, ahead_s=-1.0, grace_s=1.5), 0.0)) == 8


def test_who_is_behind_is_not_held_to_what_his_own_drafts_may_bring() -> None:
    what = offer([0.99] * 8, [0.99] * 8)
    assert len(choose(what, bidders(2, grace_s=0.0), 0.0)) > 8, "even: the gains that are expected count"
    behind = bidders(2, ahead_s=-1.0, grace_s=1.0 + 0.0021)
    assert len(choose(what, behind, 0.0)) == 6, "0.5 ms a row, the first two of them free"


def test_a_bundle_is_bought_whole_or_not_at_all() -> None:
    what = offer([0.9, 2.0], rows=[1, 10])
    assert choose(what, bidders(1), 0.0) == [0, 1]
    assert choose(what, bidders(1), 0.0, max_rows=10) == [0]


def test_a_bundle_that_is_too_large_keeps_nobody_behind_it_out() -> None:
    what = offer([30.0, 0.9, 0.5], [], rows=[10, 1, 1])
    assert choose(what, bidders(2), 0.0) == [0, 1, 2]
    assert choose(what, bidders(2), 0.0, max_rows=5) == [1, 2], "too many rows"
    assert choose(what, bidders(2, grace_s=0.0011), 0.0) == [1, 2], "too much for the other one; 0.5 ms a row"
    market = Market.open(RISING, StepLoad(2, 2, 2), StepLoad(2, 2, 2), 0.0, RICH, 0.0121)
    chosen = bought(what, bidders(2), RISING, market, 64)
    assert np.flatnonzero(chosen).tolist() == [1, 2], "too long a step"


def test_bundles_that_are_only_fair_together_are_bought_together() -> None:
    what = offer([2.0], [2.0], rows=[10, 10])
    behind_s = -(EVEN_STEPS + 1) * RISING.predict(StepLoad(2, 2, 2))
    assert choose(what, bidders(2, ahead_s=behind_s), 0.0, inflation=1.25) == [0, 1]
    assert choose(offer([2.0], [], rows=[10]), bidders(2, ahead_s=behind_s), 0.0, inflation=1.25) == []


@examples(150)
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.lists(st.floats(0.02, 0.95), max_size=3)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(2, 6), st.floats(0.0, 3.0)), max_size=2),
    st.floats(0.0, 4000.0),
)
def test_at_constant_costs_it_buys_what_brute_force_finds_best(
    trees: list[tuple[int, list[float]]], bundles: list[tuple[int, float]], price: float
) -> None:
    """Whatever a row's context costs, and with bundles: of all sets, as no node hangs from another."""
    model = StepTimeModel(StepTimeTable((1, 1000), (0.010, 0.210), per_attended_token=1e-7))
    what = offer(*(probs for _, probs in trees), [gain for _, gain in bundles])
    what.rows[len(what.rows) - len(bundles) :] = [rows for rows, _ in bundles]
    what.owners[what.owners == len(trees)] = 0
    who = bidders(len(trees))
    who.contexts[:] = [context for context, _ in trees]
    costs = what.rows * (0.2 / 999 + 1e-7 * who.contexts[what.owners])

    def worth(items: tuple[int, ...]) -> float:
        return float((what.gains[list(items)] - price * costs[list(items)]).sum())

    items = range(len(what.gains))
    best = max(worth(some) for n in range(len(items) + 1) for some in itertools.combinations(items, n))
    assert worth(tuple(choose(what, who, price, model=model))) == pytest.approx(best, abs=1e-9)


def test_a_flat_table_still_has_a_row_cost() -> None:
    flat = StepTimeModel(StepTimeTable((4, 64), (0.01, 0.01)))
    price = 1.0 / 0.01
    assert choose(offer([2 * MIN_ROW_COST, MIN_ROW_COST / 2]), bidders(1), price, model=flat) == [0]


def test_nothing_offered_nothing_bought() -> None:
    assert choose(offer([]), bidders(1), 1.0) == []
    assert choose(offer([0.9]), bidders(1), 0.0, max_rows=0) == []


@st.composite
def _markets(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]], float, StepTimeModel]:
    """Random trees of a few requests: path probabilities that fall from parent to child."""
    probs: list[list[float]] = []
    parents: list[list[int]] = []
    for _ in range(draw(st.integers(1, 3))):
        tree: list[float] = []
        above: list[int] = []
        for i in range(draw(st.integers(0, 3))):
            parent = draw(st.integers(-1, i - 1))
            tree.append((tree[parent] if parent >= 0 else 1.0) * draw(st.floats(0.05, 0.95)))
            above.append(parent)
        probs.append(tree)
        parents.append(above)
    steps = draw(st.lists(st.floats(0.0001, 0.004), min_size=3, max_size=3))
    seconds = np.cumsum([0.01, *steps])
    # Falling slopes would make a larger purchase pay where no smaller one does: still a prefix of the order.
    model = StepTimeModel(StepTimeTable((1, 4, 8, 16), tuple(seconds.tolist())))
    return probs, parents, draw(st.floats(0.0, 600.0)), model


@examples(150)
@given(_markets(), st.integers(0, 8), st.data())
def test_it_buys_what_brute_force_finds_best(
    market: tuple[list[list[float]], list[list[int]], float, StepTimeModel], max_rows: int, data: st.DataObject
) -> None:
    """Of all sets of nodes that have their parents in them, with room for so many, and whosever tokens count more."""
    probs, parents, price, model = market
    count, who = len(probs), bidders(len(probs))
    who.bids[0] = data.draw(st.lists(st.floats(0.25, 4.0), min_size=count, max_size=count))
    load = StepLoad(count, count, count)
    what = offer(*probs)
    starts = np.cumsum([0, *map(len, probs)])
    flat = [-1 if p < 0 else int(starts[i]) + p for i, tree in enumerate(parents) for p in tree]
    without_s = model.predict(load)

    def worth(nodes: tuple[int, ...]) -> float:
        seconds = model.predict(StepLoad(count + len(nodes), count + len(nodes), count))
        seconds = max(seconds, without_s * (1 + MIN_ROW_COST * len(nodes)))
        gains = what.gains[list(nodes)] * who.bids[0][what.owners[list(nodes)]]
        return float(gains.sum()) - price * (seconds - without_s)

    most = min(max_rows, len(flat))
    sets = itertools.chain.from_iterable(itertools.combinations(range(len(flat)), n) for n in range(most + 1))
    closed = [nodes for nodes in sets if all(flat[node] < 0 or flat[node] in nodes for node in nodes)]
    best = max(map(worth, closed))
    chosen = tuple(choose(what, who, price, max_rows=max_rows, model=model))
    assert chosen in closed
    assert worth(chosen) == pytest.approx(best, abs=1e-9)


class _Bounded(NamedTuple):
    """A step of a few requests with contexts, accounts and every bound, on a bent table."""

    what: DraftOffer
    who: Bidders
    model: StepTimeModel
    market: Market
    max_rows: int

    @classmethod
    def of(cls, rng: random.Random) -> _Bounded:
        count = rng.randint(1, 4)
        trees = [
            sorted((rng.uniform(0.05, 0.95) for _ in range(rng.randint(0, 4))), reverse=True) for _ in range(count)
        ]
        seconds = np.cumsum([0.01, *(rng.uniform(0.0001, 0.004) for _ in range(3))])
        attended_s = rng.choice([0.0, 1e-6])
        model = StepTimeModel(StepTimeTable((1, 4, 8, 16), tuple(seconds.tolist()), per_attended_token=attended_s))
        who = bidders(count)
        who.contexts[:] = [rng.randint(0, 3000) for _ in range(count)]
        load = StepLoad(count, count, count, int(who.contexts.sum()), int(who.contexts.sum()))
        alone_s = model.predict(load)
        who.bids[0] = [rng.choice([1.0, 2.0]) for _ in range(count)]
        who.bids[1] = [rng.uniform(-8.0, 8.0) * alone_s for _ in range(count)]
        who.bids[2] = 8.0 * alone_s
        longest, never_longer_s = rng.choice([1.1, 1.25, 1.5]), rng.choice([1.2, 1.5, 10.0]) * alone_s
        market = Market.open(model, load, load, rng.uniform(0.0, 3.0), longest, never_longer_s)
        return cls(offer(*trees), who, model, market, rng.randint(1, 8))

    def worth(self, nodes: list[int]) -> float | None:
        """What the nodes bring beyond their time; None where a bound forbids them."""
        owners, (load, alone_s) = self.what.owners[nodes], (self.market.load, self.market.alone_s)
        more, attended = len(nodes), int(self.who.contexts[owners].sum())
        step = StepLoad(load[0] + more, load[1] + more, load[2], load[3], load[4] + attended)
        step_s = max(self.model.predict(step), alone_s + more * self.market.min_row_s)
        urgency, ahead_s, grace_s = self.who.bids
        tokens = 1.0 + np.bincount(owners, self.what.gains[nodes], len(urgency))
        gained_s = tokens * alone_s - step_s
        is_good_for_all = np.all(np.maximum(gained_s, ahead_s + gained_s + EVEN_STEPS * alone_s) >= 0.0)
        sure_s = np.where(ahead_s >= 0.0, ahead_s + gained_s, ahead_s + alone_s - step_s)
        is_allowed = len(nodes) <= self.max_rows and step_s <= self.market.never_longer_s
        is_allowed &= bool(np.all(sure_s + grace_s >= 0.0)) and (step_s <= self.market.longest_s or is_good_for_all)
        value = float((self.what.gains[nodes] * urgency[owners]).sum())
        return value - self.market.price * (step_s - alone_s) if is_allowed else None


@examples(150)
@given(st.randoms(use_true_random=False))
def test_of_all_prefixes_of_its_order_it_buys_the_best_that_every_bound_allows(rng: random.Random) -> None:
    """Which is not always the best set: what a row takes of a bent table depends on those before it."""
    case = _Bounded.of(rng)
    attended_s = case.model.table.per_attended_token
    costs = case.market.row_s + attended_s * case.who.contexts[case.what.owners]
    ranks = case.what.gains * case.who.bids[0][case.what.owners] / costs
    order = sorted(range(len(ranks)), key=lambda node: -ranks[node])
    prefixes = [case.worth(order[:count]) for count in range(1, len(order) + 1)]
    best = max([0.0, *(worth for worth in prefixes if worth is not None)])
    chosen = np.flatnonzero(bought(case.what, case.who, case.model, case.market, case.max_rows)).tolist()
    worth = case.worth(chosen)
    assert worth is not None, "a bound is broken"
    assert worth == pytest.approx(best, abs=1e-9)
