"""AdaptiveDrafting on a made-up machine (machine.py)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from batchserve.decoding_length.acceptance import Given
from batchserve.decoding_length.accounts import (
    ACCOUNT,
    CHEAP_ROW,
    FEW_NODES,
    GRACE_STEPS,
    MAX_LOSS,
    MAX_URGENCY,
    MIN_GAIN,
    MORE_NODES,
    bound_queries,
    drop_unprofitable,
    grown,
    note_steps,
)
from batchserve.decoding_length.adaptive import MAX_UNLEARNED
from batchserve.decoding_length.budget_kernels import EVEN_STEPS
from batchserve.decoding_length.policy import StepOutcome
from batchserve.decoding_length.probing import LONG_WAIT, LONGEST_WAIT, PATIENCE
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from tests.scheduler.machine import CHEAP, CHEAP_PROMPTS, DEAR, RICH, ROW_S, STEP_S, Machine, Step, Text


def test_one_pause_while_drafts_are_made_does_not_end_drafting() -> None:
    """Nothing would seem worth asking for, and it would take hundreds of steps until that was found to be wrong."""
    machine = Machine([Text("a")], DEAR)
    before = machine.steps(200, proposal_s=1e-4)[100:]
    machine.step(proposal_s=5.0)
    behind = machine.steps(50, proposal_s=1e-4)
    assert mean_rows(behind, "a") > 0.7 * mean_rows(before, "a") > 0.0


@pytest.mark.parametrize("num_before", [0, 100])
def test_one_pause_while_drafts_are_made_changes_no_price(num_before: int) -> None:
    """Also in the first step ever, when nothing is known of what drafting takes."""

    def behind(proposal_s: float) -> tuple[float, float]:
        machine = Machine([Text(name, seed=i) for i, name in enumerate("abcd")], DEAR)
        machine.steps(num_before, proposal_s=1e-4)
        machine.step(proposal_s=proposal_s)
        steps = machine.steps(50, proposal_s=1e-4)
        assert machine.adaptive.last is not None
        return machine.adaptive.last.price, sum(mean_rows(steps, name) for name in "abcd")

    paused, quiet = behind(5.0), behind(1e-4)
    assert paused == pytest.approx(quiet, rel=0.2)
    assert quiet[1] > 1.0


@pytest.mark.parametrize("max_step_s", [math.inf, 1.25])
def test_what_drafting_takes_for_one_request_is_not_charged_to_sixteen_each(max_step_s: float) -> None:
    """Most of it is the same for one as for all. Times of the bundled model's steps; max_step_s: of plain steps."""
    short = StepTimeTable((1, 1024), (0.0019, 0.0019 + 1023 * 2e-5))
    plain_s = StepTimeModel(short).predict(StepLoad(16, 16, 16))

    def rows(num_alone: int) -> int:
        machine = Machine([Text("alone", hit=0.8)], short, max_step_s=max_step_s * plain_s)
        machine.steps(num_alone, asking_s=120e-6, proposal_s=10e-6)
        machine.end("alone")
        machine.texts = [Text(f"n{i}", hit=0.6, seed=i) for i in range(16)]
        for text in machine.texts:
            machine.start(text)
        steps = machine.steps(60, asking_s=120e-6, proposal_s=10e-6)
        assert all(len(step.asked) == 16 for step in steps)
        return sum(sum(step.rows.values()) for step in steps)

    assert rows(200) > 0.9 * rows(0) > 0


def test_a_drafter_that_is_slow_for_good_is_found_out() -> None:
    machine = Machine([Text("a")], DEAR)
    machine.steps(100, proposal_s=1e-4)
    assert mean_rows(machine.steps(300, proposal_s=5.0)[200:], "a") < 0.1


def test_whoever_can_use_more_drafts_has_them_in_the_second_step() -> None:
    """Most answers are short: what is asked of a drafter must not grow slowly."""
    first, second = Machine([Text("a", hit=1.0, claim=1.0, depth=500)], CHEAP).steps(2)
    assert 1 <= first.rows["a"] <= MORE_NODES
    assert second.rows["a"] >= 3 * first.rows["a"]


@pytest.mark.parametrize(
    ("least", "asked"),
    [
        (0.5 * CHEAP_ROW, [MORE_NODES, MORE_NODES + 24, MORE_NODES + 19]),
        (2 * CHEAP_ROW, [FEW_NODES, FEW_NODES + 4, FEW_NODES + 3]),
    ],
)
def test_what_is_asked_for_follows_what_was_bought(least: float, asked: list[int]) -> None:
    """Eight nodes in the first step, none in the second: at once where rows are cheap, slowly where they are dear."""
    accounts, slots, found = grown(np.zeros(0, ACCOUNT), 1), np.zeros(1, np.int64), []
    for gain in (0.9, 0.0, 0.0):
        bounds = np.full((1, 3), 1 << 40)
        bound_queries(accounts, np.zeros((1, 3)), slots, (least, 1e6), bounds, np.zeros(1))
        found.append(bounds[0, 0])
        bought, one = np.ones(8, np.bool_), np.ones(8, np.int64)
        offer, bounds_of_it = (0 * one, gain * one, one), (0.1, math.inf, math.inf)
        drop_unprofitable(accounts, slots, slots, offer, bounds_of_it, bought, np.zeros(1, np.bool_))
    assert found == asked


@pytest.mark.parametrize(
    ("max_rows", "asked"), [(1000, [60, 150, 300]), (255, [30, 75, 150]), (10, [FEW_NODES, FEW_NODES, FEW_NODES])]
)
def test_no_more_is_asked_for_than_the_step_can_run_but_for_a_few_of_each(max_rows: int, asked: list[int]) -> None:
    """What is found beyond that takes the drafter's time for nothing; a window is asked for whole."""
    accounts, slots = grown(np.zeros(0, ACCOUNT), 4), np.arange(4)
    accounts["most_chosen"] = 1000.0
    accounts["has_window"][3] = 1
    bounds = np.array([[60, 9, 9], [150, 9, 9], [300, 9, 9], [0, 9, 9]])
    bound_queries(accounts, np.zeros((4, 3)), slots, (0.0, float(max_rows)), bounds, np.zeros(4))
    assert bounds[:3, 0].tolist() == asked
    bounds = np.array([[60, 9, 9], [150, 9, 9], [300, 9, 9], [40, 9, 9]])
    bound_queries(accounts, np.zeros((4, 3)), slots, (0.0, max_rows + 40.0), bounds, np.zeros(4))
    assert bounds[:, 0].tolist() == [*asked, 40]


def mean_rows(steps: Sequence[Step], name: str) -> float:
    return sum(step.rows.get(name, 0) for step in steps) / len(steps)


def test_a_missed_target_buys_more_rows_until_it_is_met() -> None:
    """Slowness alone changes nobody's rows: it moves what time is worth and what a row costs alike."""
    urgent, plain = (
        Machine([Text("a", tpot_target_s=target), Text("b", seed=1)], DEAR, inflation=RICH) for target in (0.010, None)
    )
    slow, slow_plain = (machine.steps(200, slowness=4.0) for machine in (urgent, plain))
    assert mean_rows(slow[100:], "a") > 1.5 * mean_rows(slow_plain[100:], "a")
    assert mean_rows(slow[100:], "a") > 1.5 * mean_rows(slow[100:], "b"), "it was not his target"
    fast, fast_plain = (machine.steps(400, slowness=0.5) for machine in (urgent, plain))
    assert mean_rows(fast[300:], "a") == pytest.approx(mean_rows(fast_plain[300:], "a"), rel=0.15)


@pytest.mark.parametrize("count", [1, 4])
def test_where_all_miss_their_target_none_is_made_slower_by_it(count: int) -> None:
    """Rows hardly ever right would be worth it to each, and make the steps of all longer."""

    def time_per_token(target_s: float | None) -> float:
        texts = [Text(f"r{i}", hit=0.5, depth=40, seed=i, tpot_target_s=target_s) for i in range(count)]
        steps = Machine(texts, DEAR, inflation=RICH).steps(300)[100:]
        return sum(step.seconds for step in steps) / sum(len(step.given["r0"]) for step in steps)

    assert time_per_token(1e-6) < 1.05 * time_per_token(None)


@pytest.mark.parametrize(("target_s", "is_missed"), [(0.020, False), (0.005, True)])
def test_time_per_token_is_that_of_all_tokens(target_s: float, is_missed: bool) -> None:
    """Of steps that give 1, 1, 1 and 9 tokens most are slow ones, but most tokens are not of them."""
    table = grown(np.zeros(0, ACCOUNT), 1)
    table["tpot_target_s"] = target_s
    for num_tokens in (1, 1, 1, 9) * 50:
        note_steps(table, np.zeros(1, np.int64), np.array([0, num_tokens]), 0.030, 1.0)
    assert (table["urgency"][0] > 1.5) == is_missed


@pytest.mark.parametrize("target_s", [0.020, 0.040])
def test_steps_that_are_noted_together_count_as_if_each_were_by_itself(target_s: float) -> None:
    tables, slots = [grown(np.zeros(0, ACCOUNT), 2) for _ in range(2)], np.arange(2)
    for table in tables:
        table["tpot_target_s"] = target_s
        note_steps(table, slots, np.array([0, 3, 4]), 0.020, 1.5)
    for _ in range(5):
        note_steps(tables[0], slots, np.array([0, 1, 2]), 0.030, 1.0)
    note_steps(tables[1], np.tile(slots, 5), np.arange(11), 0.030, 1.0)
    for name in ACCOUNT.names or ():
        assert tables[0][name] == pytest.approx(tables[1][name], rel=0.05), name
    assert tables[0]["num_steps"].tolist() == [6, 6]


def test_a_target_that_is_met_changes_nothing() -> None:
    targets: list[float | None] = [None, 10.0]
    with_none, with_lax = (
        Machine([Text("a", tpot_target_s=target), Text("b", seed=1)], DEAR).steps(100) for target in targets
    )
    assert with_none == with_lax


def test_what_cannot_be_met_is_not_bought_at_any_price() -> None:
    """A target far out of reach does not make rows worth running that are hardly ever right."""
    text = Text("a", hit=0.5, depth=40, tpot_target_s=1e-6)
    late = Machine([text], DEAR).steps(300)[200:]
    worth = STEP_S / ROW_S * MAX_URGENCY  # a row is worth running if it is right once in so many times
    assert 1 <= mean_rows(late, "a") <= math.log2(worth) + 1


@pytest.mark.parametrize("others", [1, 3, 15])
@pytest.mark.parametrize("kind", ["not drafted", "hopeless"])
def test_nobody_pays_more_than_his_grace_for_the_drafts_of_others(others: int, kind: str) -> None:
    victim = Text("victim", depth=0) if kind == "not drafted" else Text("victim", hit=0.0, claim=0.5)
    machine = Machine([victim, *(Text(f"r{i}", hit=1.0, seed=i) for i in range(others))], DEAR)
    plain_s = StepTimeModel(DEAR).predict(StepLoad(others + 1, others + 1, others + 1))
    lost = 0.0
    for number, step in enumerate(machine.steps(300), 1):
        lost += step.seconds / plain_s - len(step.given["victim"])
        assert lost <= GRACE_STEPS + MAX_LOSS * number + 1e-6, "after every step, not only in the end"
    # And it is the accounts that held the others back: they took what they were given, and no more.
    assert lost > 0.9 * (GRACE_STEPS + MAX_LOSS * 300)


@pytest.mark.parametrize("others", [1, 3, 15])
@pytest.mark.parametrize("kind", ["not drafted", "hopeless"])
def test_the_time_that_drafting_for_others_takes_is_on_his_account(others: int, kind: str) -> None:
    """Beyond his grace he pays only for their being asked again now and then."""
    victim = Text("victim", depth=0) if kind == "not drafted" else Text("victim", hit=0.0, claim=0.5)
    machine = Machine([victim, *(Text(f"r{i}", hit=1.0, seed=i) for i in range(others))], DEAR)
    plain_s = StepTimeModel(DEAR).predict(StepLoad(others + 1, others + 1, others + 1))
    proposal_s = 0.15 * plain_s / others
    lost = 0.0
    for number, step in enumerate(machine.steps(300, proposal_s=proposal_s), 1):
        lost += (step.seconds + proposal_s * len(step.asked)) / plain_s - len(step.given["victim"])
        assert lost <= GRACE_STEPS + MAX_LOSS * number + 2.0
    assert lost > 0.97 * (GRACE_STEPS + MAX_LOSS * 300)


def test_whoever_fell_behind_for_others_catches_up_first() -> None:
    """His drafts are run though better ones of others are there: otherwise those could not be run, either."""
    texts = [Text(f"good{i}", hit=0.9, claim=0.9, seed=i) for i in range(3)]
    steps = Machine([*texts, Text("slow", hit=0.6, claim=0.6, seed=9)], DEAR).steps(400)[100:]
    for name in ("slow", *(text.name for text in texts)):
        assert mean_rows(steps, name) > 1, name
    plain_s = StepTimeModel(DEAR).predict(StepLoad(4, 4, 4))
    seconds = sum(step.seconds for step in steps)
    assert sum(len(step.given["slow"]) for step in steps) > 0.97 * seconds / plain_s
    assert sum(len(step.given["good0"]) for step in steps) > 1.4 * seconds / plain_s


def test_whoever_is_ahead_pays_for_others_longer() -> None:
    """Until it has lost what its own drafts had gained it."""

    def lost_behind(num_good_steps: int) -> float:
        victim = Text("victim", hit=1.0)
        machine = Machine([victim, Text("b", hit=1.0, seed=1)], DEAR)
        machine.steps(num_good_steps)
        victim.depth = 0
        plain_s = StepTimeModel(DEAR).predict(StepLoad(2, 2, 2))
        return sum(step.seconds / plain_s - 1.0 for step in machine.steps(60))

    assert lost_behind(0) <= GRACE_STEPS + MAX_LOSS * 60
    assert lost_behind(40) > 2 * (GRACE_STEPS + MAX_LOSS * 100)


WINDOW = 6


def test_a_window_is_run_whole_or_not_at_all() -> None:
    texts = [Text(f"r{i}", hit=0.6, depth=4, window=WINDOW, seed=i) for i in range(3)]
    machine, rng, seen = Machine(texts, CHEAP), random.Random(1), set()
    for _ in range(200):
        step = machine.step(max_rows=rng.randrange(30))
        seen |= set(step.window_rows.values())
    assert seen == {0, WINDOW}


@pytest.mark.parametrize(("earned", "least", "most"), [(1.0, 384, 384), (0.0, 2, 8)])
def test_a_window_is_worth_what_its_n_grams_have_earned(earned: float, least: int, most: int) -> None:
    """At 0.6 tokens, the price of its rows, it is tried at first; it stays if a token is accepted for each.

    Otherwise it is tried again ever more rarely, but never given up: its worth is not known unless it is run.
    """
    machine = Machine([Text("a", hit=earned, claim=0.9, depth=1, window=WINDOW)], DEAR)
    steps = machine.steps(400)
    assert steps[0].window_rows["a"] == WINDOW
    late = [step.window_rows.get("a", 0) for step in steps[16:]]
    assert set(late) <= {0, WINDOW}
    assert least <= late.count(WINDOW) <= most


def test_a_window_earns_nothing_by_what_is_known_without_it() -> None:
    """As of n-grams of the prompt: they are accepted in every step, and the window's rows bring nothing."""
    machine = Machine([Text("a", hit=1.0, claim=0.9, depth=1, window=WINDOW, has_found=False)], DEAR)
    late = machine.steps(400)[16:]
    assert mean_rows(late, "a") > 0.9
    assert 2 <= sum(step.window_rows.get("a", 0) == WINDOW for step in late) <= 8


def test_a_window_earns_nothing_by_what_is_accepted_without_it() -> None:
    """At 2 tokens, the price of its rows, it is not even tried, however many others are accepted."""
    machine = Machine([Text("a", hit=1.0, claim=0.9, depth=1, window=20)], DEAR)
    steps = machine.steps(300)
    assert mean_rows(steps, "a") > 0.9
    assert not any(step.window_rows["a"] for step in steps)


def test_a_window_without_memory_is_not_charged_for() -> None:
    machine = Machine([Text("a", depth=0, window=WINDOW)], CHEAP)
    step_done = machine.adaptive.step_done

    def refusing(outcome: StepOutcome, given: Given) -> None:
        machine.adaptive.refused(machine.slot("a"))
        step_done(outcome, given)

    machine.adaptive.step_done = refusing  # type: ignore[method-assign, assignment]
    assert all(step.window_rows["a"] for step in machine.steps(100)), "nothing is known against it"


def test_a_window_that_earns_nothing_is_probed_ever_more_rarely() -> None:
    """However little its rows cost: looking at it does cost them."""
    machine = Machine([Text("a", depth=0, window=WINDOW)], CHEAP)
    run = [number for number, step in enumerate(machine.steps(600)) if step.window_rows.get("a")]
    gaps = [b - a for a, b in pairwise(run)]
    assert gaps[:PATIENCE] == [1] * PATIENCE
    later = gaps[PATIENCE:]
    assert len(later) >= 4
    assert all(b >= 1.5 * a for a, b in pairwise(later))


@pytest.mark.parametrize(("count", "chunk"), [(1, 8), (1, 64), (1, 256), (4, 8), (4, 256)])
def test_a_prompt_in_the_same_step_makes_rows_neither_cheap_nor_dear(count: int, chunk: int) -> None:
    """Where a row costs the same behind the prompt's rows: the same choice in every step, and the same lessons."""
    alone, beside = (
        Machine([Text(f"r{i}", is_bushy=True, seed=i) for i in range(count)], DEAR).steps(120, chunk=rows)
        for rows in (0, chunk)
    )
    assert [step.rows for step in alone] == [step.rows for step in beside]
    assert sum(sum(step.rows.values()) for step in alone) > 60, "nothing is shown"


@pytest.mark.parametrize("seed", range(4))
def test_a_choice_depends_on_no_name_and_no_place_in_the_batch(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [
        {
            "seed": i,
            "hit": rng.uniform(0.3, 0.95),
            "context": rng.randrange(500),
            "is_bushy": rng.random() < 0.6,
            "window": rng.choice([0, 0, 5]),
            "depth": rng.choice([0, 4, 12]),
            "tpot_target_s": rng.choice([None, 0.008]),
        }
        for i in range(6)
    ]
    table = StepTimeTable((1, 8, 32, 256), (0.010, 0.012, 0.022, 0.140), per_attended_token=1e-7)

    def rows(names: Sequence[str], order: Sequence[int]) -> list[list[int]]:
        texts = [Text(names[i], **kinds[i]) for i in range(6)]  # type: ignore[arg-type]
        steps = Machine([texts[i] for i in order], table, inflation=1.5).steps(80)
        return [[step.rows.get(name, 0) for name in names] for step in steps]

    first = rows([f"r{i}" for i in range(6)], range(6))
    assert first == rows([f"r{i}" for i in range(6)], range(6)), "the same history, the same choice"
    assert first == rows([f"{9 - i} zebra" for i in range(6)], range(6))
    assert first == rows([f"r{i}" for i in range(6)], rng.sample(range(6), 6))
    assert sum(map(sum, first)) > 80, "nothing is shown"


def test_no_more_rows_than_the_step_can_take() -> None:
    texts = [Text(f"r{i}", hit=0.9, is_bushy=i % 2 == 0, window=3 * (i % 3 == 0), seed=i) for i in range(6)]
    machine, rng, filled = Machine(texts, CHEAP), random.Random(2), 0
    for _ in range(100):
        max_rows = rng.choice([0, 1, 2, 5, 17, 40])
        num_rows = sum(machine.step(max_rows=max_rows).rows.values())
        assert num_rows <= max_rows
        filled += num_rows == max_rows > 0
    assert filled > 20


@pytest.mark.parametrize("count", [1, 4])
def test_no_step_is_made_longer_than_its_hard_bound(count: int) -> None:
    """Though everybody would gain by it."""

    def longest_s(max_step_s: float) -> float:
        texts = [Text(f"r{i}", hit=1.0, seed=i) for i in range(count)]
        return max(step.seconds for step in Machine(texts, DEAR, max_step_s=max_step_s).steps(60))

    bound_s = 1.8 * STEP_S
    assert STEP_S + 2 * ROW_S < longest_s(bound_s) <= bound_s * (1 + 1e-9)
    assert longest_s(math.inf) > bound_s


def test_what_drafting_takes_is_part_of_the_hard_bound() -> None:
    texts, bound_s, proposal_s = [Text(f"r{i}", hit=1.0, seed=i) for i in range(4)], 1.8 * STEP_S, 0.1 * STEP_S
    steps = Machine(texts, DEAR, max_step_s=bound_s).steps(200, proposal_s=proposal_s)
    known = [step.seconds + proposal_s * len(step.asked) for step in steps[100:]]  # what it takes is learned slowly
    assert STEP_S + 2 * ROW_S < max(known) <= bound_s * 1.02


@pytest.mark.parametrize("proposal_s", [3e-3, 50e-3])
def test_drafting_that_has_no_room_in_the_hard_bound_exceeds_it_but_rarely(proposal_s: float) -> None:
    steps = Machine([Text("a", hit=1.0)], DEAR, max_step_s=1.2 * STEP_S).steps(600, proposal_s=proposal_s)
    assert 1 <= sum(bool(step.asked) for step in steps[100:]) <= 6


def test_drafting_that_took_too_long_for_the_bound_is_tried_again() -> None:
    machine = Machine([Text("a", hit=1.0)], DEAR, max_step_s=1.8 * STEP_S)
    machine.steps(100, proposal_s=0.01 * STEP_S)
    machine.steps(100, proposal_s=STEP_S)
    assert mean_rows(machine.steps(100, proposal_s=0.01 * STEP_S), "a") > 1


def test_a_step_is_stretched_beyond_its_inflation_only_where_everybody_gains_or_is_even() -> None:
    def stretches(hits: Sequence[float]) -> list[float]:
        texts = [Text(f"r{i}", hit=hit, depth=16 if hit else 0, seed=i) for i, hit in enumerate(hits)]
        plain_s = StepTimeModel(DEAR).predict(StepLoad(len(hits), len(hits), len(hits)))
        return [step.seconds / plain_s for step in Machine(texts, DEAR, inflation=1.25).steps(40)]

    found = stretches([1.0, 0.0])
    too_long = [stretch for stretch in found if stretch > 1.25 + 1e-9]
    assert 0 < sum(stretch - 1.0 for stretch in too_long) <= EVEN_STEPS, "no more than this costs who gains nothing"
    assert 1.1 < max(found[20:]) <= 1.25 + 1e-9
    assert min(stretches([1.0, 1.0])[20:]) > 1.5


def gaps_of(steps: Sequence[Step], name: str) -> list[int]:
    asked = [number for number, step in enumerate(steps) if name in step.asked]
    return [b - a for a, b in pairwise(asked)]


@pytest.mark.parametrize("claim", [0.3, 1.0])
def test_a_drafter_that_is_always_wrong_is_asked_for_probes_only(claim: float) -> None:
    machine = Machine([Text("a", hit=0.0, claim=claim)], DEAR)
    steps = machine.steps(400)
    gaps = gaps_of(steps, "a")
    first = next(i for i, gap in enumerate(gaps) if gap > 1)
    assert first <= 20, "it took long to be found out"
    assert gaps[first : first + 2] == [3, 5]
    for gap, wait in zip(gaps[first + 2 : first + 5], (8, 16, 32), strict=True):
        assert 1 < gap <= wait + 1, "until all are asked together"
    assert set(gaps[first + 5 :]) == {LONGEST_WAIT}
    assert not any(step.rows for step in steps[32:]), "a probe takes no rows"


def test_a_drafter_is_asked_again_when_the_text_changes_its_character() -> None:
    change = 300
    machine = Machine([Text("a", hit=0.0, claim=0.9, repeats_from=change)], DEAR)
    before = machine.steps(change)
    assert gaps_of(before, "a")[-1] == LONGEST_WAIT
    after = machine.steps(100)
    # Eight tokens until they come again, some five more until that is a change.
    assert next(i for i, step in enumerate(after) if "a" in step.asked) <= 16
    assert sum("a" in step.asked for step in after[20:]) == len(after[20:])
    assert mean_rows(after[20:], "a") > 1


def test_one_request_s_failures_do_not_silence_another_s_drafter() -> None:
    texts = [Text("bad", hit=0.0, claim=0.9), Text("good", hit=0.9, seed=1)]
    steps = Machine(texts, CHEAP).steps(200)
    assert all("good" in step.asked for step in steps)
    assert mean_rows(steps[100:], "good") > 1
    assert mean_rows(steps[100:], "bad") < 0.4 * mean_rows(steps[100:], "good")
    # Where rows are not nearly free, the other's successes do not speak for it, either.
    texts = [Text("bad", hit=0.0, claim=0.9), Text("good", hit=0.9, seed=1)]
    steps = Machine(texts, DEAR).steps(200)[100:]
    assert mean_rows(steps, "bad") < 0.2 * mean_rows(steps, "good")


@pytest.mark.parametrize(("count", "least"), [(1, 8.0), (4, 6.5)])
def test_where_rows_are_free_unlikely_ones_are_run_too(count: int, least: float) -> None:
    """As beside a large GPU: however few requests there are, a row costs a small part of a step only."""
    texts = [Text(str(i), hit=0.6, claim=0.6, depth=40, seed=i) for i in range(count)]
    steps = Machine(texts, CHEAP).steps(60)[20:]
    assert all(mean_rows(steps, text.name) > least for text in texts)


def test_what_is_expected_to_gain_next_to_nothing_is_not_run_however_cheap() -> None:
    """Calibration begins with what a drafter claims: that is what decides in the first step."""
    for claim, is_run in ((0.9 * MIN_GAIN, False), (2.0 * MIN_GAIN, True)):
        step = Machine([Text("a", claim=claim, depth=1)], CHEAP).step()
        assert bool(step.rows) == is_run


def test_a_request_that_has_ended_leaves_nothing_to_the_next_of_its_name() -> None:
    machine = Machine([Text("a", hit=0.0, claim=0.9)], DEAR)
    machine.steps(100)
    assert not any(machine.is_asked("a") for _ in range(3))
    machine.end("a")
    machine.end("a")  # harmless
    machine.start(machine.texts[0])
    assert all(machine.is_asked("a") for _ in range(3))


def steps_until_left_alone(machine: Machine, name: str) -> int:
    return next(number for number in range(100) if name not in machine.step().asked)


def joined(machine: Machine, text: Text) -> Text:
    """In the place of those before."""
    for other in machine.texts:
        machine.end(other.name)
    machine.texts = [text]
    machine.start(text)
    return text


def test_newcomers_have_less_patience_with_a_drafter_that_has_failed_all_before_them() -> None:
    machine = Machine([Text("r0", hit=0.0, claim=0.02)], DEAR)
    patience = [steps_until_left_alone(machine, "r0")]
    for number in range(1, PATIENCE + 2):
        joined(machine, Text(f"r{number}", hit=0.0, claim=0.02, seed=number))
        patience.append(steps_until_left_alone(machine, f"r{number}"))
    assert patience == [PATIENCE + 1 - number for number in range(PATIENCE + 1)] + [1]
    joined(machine, Text("good", hit=0.95, claim=0.95))
    assert mean_rows(machine.steps(100), "good") > 1, "one try is enough for those who gain"
    joined(machine, Text("bad", hit=0.0, claim=0.02, seed=99))
    assert steps_until_left_alone(machine, "bad") == PATIENCE + 1


def test_where_nobody_gains_newcomers_are_first_asked_together() -> None:
    """Most of what asking takes is the same for one as for all; whoever can be drafted waits a few steps for that."""
    machine = Machine([Text("r0", hit=0.0, claim=0.02)], DEAR)
    for number in range(1, 16):
        steps_until_left_alone(machine, machine.texts[0].name)
        joined(machine, Text(f"r{number}", hit=0.0, claim=0.02, seed=number))
    late = [Text(f"late{i}", hit=0.0, claim=0.02, seed=50 + i) for i in range(3)]
    first: dict[str, int] = {}
    for step in range(2 * LONG_WAIT):
        if step % 2 == 0 and late:
            machine.texts.append(late.pop())
            machine.start(machine.texts[-1])
        for name in machine.step().asked:
            first.setdefault(name, step)
    places = [place for name, place in first.items() if name.startswith("late")]
    assert len(places) == 3
    assert all((place - places[0]) % LONG_WAIT == 0 for place in places)
    assert max(places) < LONG_WAIT + 4
    joined(machine, Text("good", hit=0.95, claim=0.95))
    assert mean_rows(machine.steps(LONG_WAIT + 50)[LONG_WAIT:], "good") > 1


def test_steps_without_drafts_are_learned_from_a_little_later() -> None:
    machine = Machine([Text("a", depth=0), Text("b", depth=0)], DEAR)
    machine.steps(MAX_UNLEARNED - 1, slowness=2.0)
    assert machine.adaptive.step_time.factor == 1.0
    machine.step(slowness=2.0)
    assert machine.adaptive.step_time.factor > 1.5


def test_whoever_ends_leaves_nothing_to_be_learned_of_the_next_of_his_name() -> None:
    machine = Machine([Text("a", hit=0.0, claim=0.02)], DEAR)
    while "a" in machine.step().asked:
        pass
    machine.end("a")
    assert not machine.adaptive._unlearned
    machine.end("a")


def test_nothing_is_called_for_nobody_that_may_not_be_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a server's drafter is being compiled, steps do not wait for what belongs to it."""
    machine, prompt = Machine([], DEAR), StepLoad(64, 1, 1)
    monkeypatch.setattr("batchserve.decoding_length.adaptive.note_steps", None)
    longer_s = 1.2 * machine.adaptive.step_time.predict(prompt)
    machine.adaptive.step_done(StepOutcome(prompt, StepLoad(1, 1, 1), prompt, longer_s, longer_s), Given.of({0: [1]}))
    assert machine.adaptive.step_time.factor > 1.0, "the step was learned from all the same"


def test_steps_beside_prompts_are_learned_from_at_once() -> None:
    machine = Machine([Text("a", depth=0)], DEAR)
    machine.step(chunk=16, slowness=2.0)
    assert machine.adaptive.step_time.factor > 1.0


def test_nobody_s_drafter_is_to_blame_where_a_prompt_fills_the_step() -> None:
    machine = Machine([Text("a", hit=0.9, claim=0.9)], CHEAP_PROMPTS, max_step_s=2.0 * STEP_S)
    machine.steps(20)
    full = machine.steps(40, chunk=1000)
    assert not any(step.asked for step in full)
    assert all("a" in step.asked and step.rows["a"] > 1 for step in machine.steps(10))


@pytest.mark.parametrize("full", [{"chunk": 505}, {"max_rows": 2}, {"max_rows": 0}])
def test_whoever_finds_the_step_full_is_not_to_blame(full: dict[str, int]) -> None:
    """Of sixteen whose drafts are worth their rows few have any; as soon as there is room all do."""
    texts = [Text(f"r{i}", hit=0.9, claim=0.9, seed=i) for i in range(16)]
    machine = Machine(texts, CHEAP_PROMPTS, max_step_s=2.0 * STEP_S)
    before = machine.steps(50)[-1]
    for step in machine.steps(20, **full):
        assert sum(step.rows.values()) < 16
    behind = machine.step()
    assert behind.asked == before.asked == {text.name for text in texts}
    assert sum(behind.rows.values()) > 0.8 * sum(before.rows.values())


def test_a_drafter_that_does_not_pay_is_found_out_in_full_steps_too() -> None:
    texts = [Text("a", hit=0.9, claim=0.9), Text("b", hit=0.0, claim=0.02, seed=1)]
    steps = Machine(texts, DEAR).steps(100, max_rows=1)
    assert all("a" in step.asked for step in steps)
    assert sum("b" in step.asked for step in steps) < 30


def test_what_was_offered_before_a_preemption_is_not_held_against_what_comes_later() -> None:
    machine = Machine([Text("a", hit=1.0, depth=8), Text("b", hit=1.0, depth=8, seed=1)], DEAR)
    machine.step(max_rows=0)
    assert machine.adaptive.acceptance.num_open == 2
    machine.adaptive.skip(machine.slot("a"))
    machine.adaptive.skip(99)
    assert machine.adaptive.acceptance.num_open == 1


def test_what_was_not_learned_from_yet_is_before_anything_is_chosen() -> None:
    machine = Machine([Text("a", hit=0.0, claim=0.02)], DEAR)
    while "a" in machine.step(slowness=2.0).asked:
        pass
    machine.step(slowness=2.0)  # it waits for one step more
    before = machine.adaptive.step_time.factor
    alone = StepLoad(1, 1, 1, 50, 50)
    machine.adaptive.begin_step(alone, alone, 1)
    assert machine.adaptive.step_time.factor > before


def test_the_price_that_is_shown_stays_while_nobody_decodes() -> None:
    machine = Machine([Text("a", hit=1.0, depth=4)], DEAR)
    for _ in range(3):
        machine.step()
    shown = machine.adaptive.last
    assert shown is not None
    prompt = StepLoad(64, 0, 1)
    machine.adaptive.step_done(StepOutcome(prompt, StepLoad(0, 0, 0), prompt, 0.05, 0.05), Given.of({}))
    later = machine.adaptive.last
    assert later is not None
    assert later.price == shown.price > 0.0
    assert later.step_s == 0.05
