"""Benchmarks of the adaptive decoding length: the simulated machine, ceilings, statistics, a drafter that is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.bench.replay import ReplayRecord, count_accepted
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree, NullDrafter
from benchmarks.adaptive import overhead
from benchmarks.adaptive.driver import CONFIDENCE, Contender, Run, fixed, interleave, median_interval
from benchmarks.adaptive.never_slower import HostileDrafter, random_records
from benchmarks.adaptive.oracle import KnownOdds, Oracle, accepted_path, draw, in_order
from benchmarks.adaptive.row_price import LENGTHS, measure
from benchmarks.adaptive.simulation import HOST_S, Simulation, draft_s
from benchmarks.adaptive.workloads import Options, new_drafter
from benchmarks.common import RESULTS
from tests.factories import examples, random_tree

TABLE = StepTimeTable((4, 8, 16, 32, 64, 128), (0.019, 0.021, 0.028, 0.040, 0.065, 0.118), per_attended_token=2e-8)
VOCAB = 50


class Guesses(Drafter):
    """A chain of the truth, each token of which is replaced with probability `wrong`; claims to know the odds."""

    name = "guesses"

    def __init__(self, records: Sequence[ReplayRecord], wrong: float = 0.3) -> None:
        self._truth = {tuple(r.prompt_token_ids): r.response_token_ids for r in records}
        self._wrong = wrong
        self._answers: dict[str, list[int]] = {}
        self._places: dict[str, int] = {}

    def start(self, request: DraftRequest) -> None:
        self._answers[request.request_id] = self._truth[tuple(request.prompt_token_ids)]
        self._places[request.request_id] = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        return [self._chain(query) for query in queries]

    def _chain(self, query: DraftQuery) -> DraftTree:
        place, tree, prob = self._places[query.request_id], DraftTree(), 1.0
        answer = self._answers[query.request_id]
        for i, token in enumerate(answer[place : place + min(query.max_tokens, query.max_depth)]):
            prob *= 1.0 - self._wrong
            is_wrong = random.Random(answer[0] * 1000 + place + i).random() < self._wrong
            tree.add(VOCAB if is_wrong else token, i - 1, prob)
        return tree

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._places[request_id] += len(token_ids)

    def end(self, request_id: str) -> None:
        del self._answers[request_id], self._places[request_id]


def make_records(count: int = 12) -> list[ReplayRecord]:
    rng = random.Random(1)
    return [
        ReplayRecord([i] * 20, [rng.randrange(VOCAB) for _ in range(rng.randint(20, 90))], []) for i in range(count)
    ]


@pytest.fixture
def simulation() -> Simulation:
    records = make_records()
    return Simulation(TABLE, Guesses(records), [], records)


def test_plain_decoding_takes_what_the_table_says(simulation: Simulation) -> None:
    run = simulation.driver().run(simulation.records, [(1, 40)], fixed(0))
    assert run.tokens == len(run.step_s) == 40
    assert run.step_rows == [1] * 40
    contexts = [round((s - HOST_S - 0.019) / 2e-8) for s in run.step_s]
    first = contexts[0]
    assert 20 <= first <= 20 + 45  # a prompt, and less than half an answer
    model, ends = StepTimeModel(TABLE), [i for i, (a, b) in enumerate(pairwise(contexts)) if b != a + 1]
    assert all(contexts[i + 1] >= 20 for i in ends)
    assert run.step_s[0] == pytest.approx(model.predict(StepLoad(1, 1, 1, first, first)) + HOST_S)


@pytest.mark.parametrize(
    ("contender", "charged_s"),
    [("off", HOST_S), ("4", HOST_S + draft_s(overhead.SIZE)), ("adaptive", HOST_S + draft_s(overhead.SIZE))],
)
def test_the_simulated_host_takes_about_what_the_real_one_was_measured_to_take(
    contender: str, charged_s: float
) -> None:
    """Within a quarter: whoever measures it anew, and finds it far off, must change what the simulation charges."""
    measured = json.loads((RESULTS / "adaptive" / "overhead.json").read_text())
    assert measured["requests"] == overhead.SIZE
    host_ms = measured["models"]["90m"]["contenders"][contender]["host_ms"]
    assert charged_s * 1e3 == pytest.approx(host_ms, rel=0.25)


def test_what_is_published_before_a_forward_makes_no_row_dearer(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the forward waits for it."""
    driver, contender = simulation.driver(), simulation.adaptive()
    core, clock, publish_s = driver.core, driver.core.executor.clock, 2e-3
    publish = core._publish
    monkeypatch.setattr(core, "_publish", lambda: (clock.advance(publish_s), publish()))
    driver.run(simulation.records, [(4, 400)], contender)
    model = contender.adaptive.step_time
    assert model.factor == pytest.approx(1.0, rel=1e-3)
    assert model.host_s == pytest.approx(HOST_S + publish_s, rel=1e-3)


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_load_is_held(simulation: Simulation, is_cut: bool) -> None:
    driver = simulation.driver()
    run = driver.run(simulation.records, [(3, 300), (1, 100), (5, 200)], fixed(2), is_cut=is_cut)
    sizes = [rows - drafts for rows, drafts in zip(run.step_rows, run.step_draft_rows, strict=True)]
    assert run.tokens >= 600
    assert sizes[0] == 3
    assert sizes[-1] == 5
    assert set(sizes) == {1, 3, 5} | (set() if is_cut else {2})  # from three to one requests leave one by one
    assert run.requests_steps == sum(sizes)
    assert not driver.core.has_work
    assert driver.core.executor.forced == {}


class Unverified(Guesses):
    """The truth, as rows that only the drafter wants to know of."""

    name = "unverified"

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        trees = super().propose(queries)
        return [DraftTree(t.token_ids, t.parents, t.probs, [False] * len(t)) for t in trees]


def test_rows_that_are_not_verified_gain_nothing_in_simulation() -> None:
    records = make_records()
    driver = Simulation(TABLE, Unverified(records, wrong=0.0), [], records).driver()
    run = driver.run(records, [(2, 60)], fixed(4))
    assert run.draft_rows > 0
    assert run.tokens == run.requests_steps


@pytest.mark.parametrize("size", [1, 5])
def test_parts_of_answers_are_the_same_for_every_contender(simulation: Simulation, size: int) -> None:
    """However fast each request is: of a run that ends at a number of tokens the easy ones would give most."""
    driver = simulation.driver()
    off, fast = (driver.run_parts(simulation.records, size, 16, fixed(length), seed=3) for length in (0, 8))
    assert off.tokens == fast.tokens == 16 * size
    assert off.requests_steps == 16 * size > fast.requests_steps
    assert len(off.request_rates) == len(fast.request_rates) == size
    assert off.seconds == pytest.approx(sum(off.step_s))
    assert fast.seconds == pytest.approx(sum(16 / rate for rate in fast.request_rates) / size)
    assert fast.all_tokens >= fast.tokens
    assert not driver.core.has_work
    assert driver.core.executor.forced == {}


def test_a_row_s_price_is_seen_to_be_right_or_wrong(simulation: Simulation) -> None:
    """Of a machine that is as the table says, and of one whose rows take twice as long as was measured."""
    options = Options(None, True, "guesses", "")
    dearer = replace(TABLE, seconds=tuple(2 * s - 0.019 for s in TABLE.seconds))
    right, wrong = (
        measure(replace(simulation, table=truth).driver(), TABLE, simulation.records, 8, options)
        for truth in (TABLE, dearer)
    )
    assert right["real_over_predicted"]["median"] == pytest.approx(1.0)
    # A step of as many rows as are mostly run is foretold right by then, so one of fewer is held to be too long.
    assert wrong["real_over_predicted"]["median"] < 0.9
    for length in LENGTHS[1:]:
        assert 0.75 * 8 * length < right[str(length)]["rows"] <= 8 * length
        assert right[str(length)]["believed_over_real"] == pytest.approx(1.0, rel=0.01)
        assert 0.5 < wrong[str(length)]["believed_over_real"] < 0.9


def test_rounds_begin_with_one_after_the_other() -> None:
    order: list[tuple[str, int]] = []

    def noting(contender: Contender, number: int) -> Run:
        order.append((contender.name, number))
        return Run(seconds=1.0, tokens=1)

    runs = interleave([fixed(0), fixed(2)], 2, noting)
    assert order == [("off", 0), ("2", 0), ("2", 1), ("off", 1), ("off", 2), ("2", 2)]
    assert {name: len(of) for name, of in runs.items()} == {"off": 2, "2": 2}


@pytest.mark.parametrize("size", [1, 4, 16])
def test_no_length_beats_the_ceilings(simulation: Simulation, size: int) -> None:
    driver, load = simulation.driver(), [(size, 400 * size)]
    speeds = {k: driver.run(simulation.records, load, fixed(k)).tokens_per_s for k in (0, 1, 2, 4, 8)}
    adaptive = driver.run(simulation.records, load, simulation.adaptive()).tokens_per_s
    length, nodes = (simulation.ceiling(driver, load, is_paying_for_misses=pays).tokens_per_s for pays in (True, False))
    assert speeds[0] < adaptive < length <= nodes * 1.002
    assert length >= max(speeds.values())


@examples(200)
@given(st.integers(0, 2**32), st.integers(1, 25))
def test_bundles_hold_what_is_accepted_at_ratios_that_fall(seed: int, num_nodes: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, num_nodes, 3)
    for i, parent in enumerate(tree.parents):
        tree.probs[i] = (1.0 if parent < 0 else tree.probs[parent]) * rng.choice([0.2, 0.5, 0.9, 1.0])
    text = [rng.randrange(3) for _ in range(12)]
    start = rng.randint(0, len(text))
    path = accepted_path(tree, text, start)
    assert len(path) == count_accepted(tree, text, start)
    bundles = in_order(tree, path)
    assert sum(tokens for tokens, _ in bundles) == len(path)
    ratios = [tokens / len(nodes) for tokens, nodes in bundles]
    assert all(a > b for a, b in pairwise(ratios))
    bought: set[int] = set()
    for _, nodes in bundles:
        bought.update(nodes)
        assert all(tree.parents[node] in bought | {-1} for node in nodes)
    assert set(path) <= bought


def test_outcomes_are_drawn_as_often_as_their_odds_say() -> None:
    tree = DraftTree([1, 2, 3, 4], [-1, -1, 0, 1], [0.5, 0.3, 0.4, 0.3])
    rng, count = random.Random(0), 20_000
    paths = [draw(tree, [0.5, 0.3, 0.8, 1.0], rng) for _ in range(count)]
    expected = {(): 0.2, (0,): 0.1, (0, 2): 0.4, (1, 3): 0.3}
    assert set(map(tuple, paths)) == set(expected)
    for path, odds in expected.items():
        assert abs(paths.count(list(path)) / count - odds) < 5 * (odds * (1 - odds) / count) ** 0.5
    both = [draw(tree, [1.5, 0.5, 0.0, 0.0], rng) for _ in range(count)]  # siblings share what they claim together
    assert abs(both.count([0]) / count - 0.75) < 5 * (0.75 * 0.25 / count) ** 0.5
    assert [] not in both


@pytest.mark.parametrize(("size", "wrong"), [(1, 0.3), (4, 0.3), (16, 0.1)])
def test_odds_that_are_known_are_worth_what_they_bring(size: int, wrong: float) -> None:
    """The guesses know their odds, so adaptive gets on the truth about what can be had of draws from them."""
    records = make_records(40)
    simulation = Simulation(TABLE, Guesses(records, wrong), [], records)
    driver, load = simulation.driver(), [(size, 3000)]
    adaptive = driver.run(records, load, simulation.adaptive()).tokens_per_s
    odds = simulation.known_odds(driver, load)
    assert odds.foresight.rate < odds.hindsight.rate
    assert odds.foresight.rate == pytest.approx(adaptive, rel=0.12)


def test_where_nothing_is_left_to_chance_hindsight_gains_nothing() -> None:
    records = make_records(40)
    simulation = Simulation(TABLE, Guesses(records, 0.0), [], records)
    odds = simulation.known_odds(simulation.driver(), [(4, 3000)])
    assert odds.foresight.rate > 0.9 * odds.hindsight.rate


@pytest.mark.parametrize("n", [1, 2, 4, 5, 10, 30])
def test_the_interval_is_the_tightest_that_is_wide_enough(n: int) -> None:
    found = median_interval([float(i) for i in reversed(range(n))])
    low, high = int(found["low"]), int(found["high"])

    def coverage(k: int) -> float:
        """Of the k-th value from both ends, over all ways in which n values may lie about the median."""
        return sum(comb(n, below) for below in range(k + 1, n - k)) / 2**n

    assert high == n - 1 - low
    assert found["median"] == (n - 1) / 2
    assert low == 0 or coverage(low) >= CONFIDENCE
    assert low + 1 > n // 2 - 1 or coverage(low + 1) < CONFIDENCE


def test_the_hostile_drafter_is_never_right_and_always_certain() -> None:
    record = ReplayRecord([1, 2], [0, 4, 5, 9], [])
    drafter = HostileDrafter({"a": record.prompt_token_ids + record.response_token_ids})
    drafter.start(DraftRequest("a", record.prompt_token_ids))
    for place in range(4):
        query = DraftQuery("a", 6, 3)
        tree = drafter.propose([query])[0]
        tree.check(query)
        assert len(tree) == 3
        assert tree.probs == [1.0] * 3
        assert count_accepted(tree, record.response_token_ids, place) == 0
        drafter.accept("a", record.response_token_ids[place : place + 1])


class Counted(Guesses):
    """Is wrong so often that it is soon left alone; counts its queries."""

    def __init__(self, records: Sequence[ReplayRecord]) -> None:
        super().__init__(records, wrong=0.99)
        self.num_queries = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        self.num_queries += len(queries)
        return super().propose(queries)


def test_who_knows_odds_or_outcomes_asks_everybody_in_every_step() -> None:
    records = make_records()
    drafter = Counted(records)
    simulation = Simulation(TABLE, drafter, [], records)
    driver, load = simulation.driver(), [(4, 400)]
    run = driver.run(records, load, simulation.adaptive())
    assert drafter.num_queries < 0.5 * run.requests_steps
    oracle = Oracle(TABLE, driver.core.executor.forced, 50.0, is_paying_for_misses=False)
    odds = KnownOdds(TABLE, 1.25, (50.0, 50.0), 0.0)
    for chooser in (oracle, odds):
        drafter.num_queries = 0
        run = driver.run(records, load, Contender("all", 8, chooser))
        assert drafter.num_queries >= 0.9 * run.requests_steps  # an answer's last token is drafted by nobody


def test_a_run_finds_a_drafter_that_has_seen_the_warm_records_only() -> None:
    """What the run before it has taught, or shared, is forgotten."""
    records = make_records()
    simulation = Simulation(TABLE, new_drafter("mixture"), records[:6], records[6:])
    driver = simulation.driver()
    runs = [driver.run(records[6:], [(4, 400)], fixed(4)) for _ in range(2)]
    assert runs[0].step_rows == runs[1].step_rows
    assert runs[0].tokens_per_s == pytest.approx(runs[1].tokens_per_s)
    again = simulation.driver().run(records[6:], [(4, 400)], fixed(4))
    assert again.step_rows == runs[0].step_rows


@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_drafter_that_is_never_right_is_soon_left_alone(size: int) -> None:
    records = random_records(VOCAB)
    simulation = Simulation(TABLE, NullDrafter(), [], records)
    driver = simulation.driver()
    hostile = HostileDrafter(driver.core.executor.forced)
    driver.core.drafts.drafter = hostile
    run = driver.run(records, [(size, size * 160)], simulation.adaptive())
    assert sum(run.step_draft_rows[:32]) > 0  # it was given a chance
    assert sum(run.step_draft_rows[32:]) < 0.01 * sum(run.step_rows[32:])


# With the trie, which claims more, the chances of new requests come to more than that where each is alone.
@pytest.mark.parametrize(
    ("drafter", "size"), [*product(("mixture", "reference"), (1, 4, 16)), ("trie", 4), ("trie", 16)]
)
def test_text_that_cannot_be_drafted_soon_has_no_drafts(drafter: str, size: int) -> None:
    """Random tokens of a large vocabulary: hardly a guess ever comes true. Each new request is given a chance."""
    records = random_records(30_000)
    warm, measured = records[: len(records) // 2], records[len(records) // 2 :]
    simulation = Simulation(TABLE, new_drafter(drafter), warm, measured)
    run = simulation.driver().run(measured, [(size, max(1000, size * 160))], simulation.adaptive())
    assert sum(run.step_draft_rows[32:]) < 0.01 * sum(run.step_rows[32:])


class Silent(NullDrafter):
    """Never has anything to say; counts how often it is asked."""

    def __init__(self) -> None:
        self.num_queries = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        self.num_queries += len(queries)
        return super().propose(queries)


def test_a_drafter_that_has_nothing_to_say_is_only_probed() -> None:
    records = random_records(VOCAB)
    simulation = Simulation(TABLE, NullDrafter(), [], records)
    driver, silent = simulation.driver(), Silent()
    driver.core.drafts.drafter = silent
    run = driver.run(records, [(4, 4 * 160)], simulation.adaptive())
    assert 0 < silent.num_queries < 0.2 * run.requests_steps


def test_a_part_inside_of_another_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(overhead.time, "perf_counter", lambda: now)
    parts = overhead.Parts()
    inner = parts.timed("inner", lambda: spend(2.0))

    def outer() -> None:
        spend(1.0)
        inner()
        spend(4.0)
        inner()

    step = parts.step(parts.timed("outer", outer))
    step()
    step()
    assert parts.steps == [{"inner": 4.0, "outer": 5.0, "other": 0.0}] * 2
