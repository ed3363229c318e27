from __future__ import annotations

import random

import pytest

from batchserve.decoding_length.accounts import GRACE_STEPS, MAX_LOSS
from batchserve.decoding_length.plain_steps import FEWEST, MOST, MOVED, PlainSteps
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from tests.scheduler.machine import Machine, Text

STEPS = 1200
GRACE = GRACE_STEPS + MAX_LOSS * STEPS
ROWS = (1, 8, 16, 24, 32, 48, 64, 1024)


def table(row_s: float) -> StepTimeTable:
    return StepTimeTable(ROWS, tuple(0.010 + row_s * rows for rows in ROWS))


def lost_steps(times: int, hit: float, *, has_plain_steps: bool = True, noise: float = 0.0) -> float:
    """What a request that is not drafted loses beside four that are, in steps without drafts, where a row takes so many
    times as long as believed.
    """
    texts = [Text("victim", depth=0), *(Text(f"r{i}", hit=hit, seed=i) for i in range(4))]
    truth, rng, lost = table(5e-5 * times), random.Random(0), 0.0
    machine = Machine(texts, table(5e-5), inflation=1.25, truth=truth, has_plain_steps=has_plain_steps)
    plain_s = StepTimeModel(truth).predict(StepLoad(5, 5, 5))
    for _ in range(STEPS):
        slowness = rng.lognormvariate(0.0, noise)
        lost += machine.step(slowness=slowness).seconds / slowness / plain_s - 1.0
    return lost


@pytest.mark.parametrize(("hit", "noise"), [(0.5, 0.0), (0.8, 0.05)])
def test_nobody_pays_much_more_than_his_grace_where_rows_are_dearer_than_believed(hit: float, noise: float) -> None:
    """A step of 24 rows then takes 1.2 and 1.5 times what the table says."""
    assert lost_steps(3, hit, noise=noise) < 2.0 * GRACE
    assert lost_steps(6, hit, noise=noise) < 3.0 * GRACE


def test_without_them_he_would_pay_several_times_as_much() -> None:
    assert lost_steps(6, 0.8, has_plain_steps=False) > 2.0 * lost_steps(6, 0.8)


def test_where_the_table_is_right_he_pays_his_grace_and_hardly_a_step_is_given_to_them() -> None:
    assert lost_steps(1, 0.8) == pytest.approx(GRACE, rel=0.1)
    steps = Machine([Text("a", hit=0.9)], table(5e-5), has_plain_steps=True).steps(STEPS)
    assert 0 < sum(not step.asked for step in steps) <= STEPS // MOST


def steps_until_due(plain: PlainSteps, factor: float) -> int:
    count = 0
    while not plain.is_due(4, factor):
        assert not plain.note(4, factor, is_drafted=True)
        count += 1
    return count


def test_they_are_due_where_the_machine_seems_to_have_changed_and_ever_more_rarely_if_it_goes_on() -> None:
    plain, factor, waits = PlainSteps(), 1.0, []
    for _ in range(7):
        factor *= 1.1
        waits.append(steps_until_due(plain, factor))
        assert plain.note(4, factor, is_drafted=False), "it comes behind many with drafts"
    assert waits == [min(MOST, FEWEST << number) for number in range(7)]
    assert steps_until_due(plain, factor * (1 + MOVED / 2)) == MOST, "nothing has moved"


def test_one_that_comes_by_itself_ends_the_wait() -> None:
    plain = PlainSteps()
    for _ in range(FEWEST - 1):
        plain.note(4, 1.0, is_drafted=True)
    assert not plain.note(4, 1.0, is_drafted=False), "too few had drafts"
    assert steps_until_due(plain, 1.5) == FEWEST
    assert plain.is_due(7, 1.5), "of about as many requests"
    assert not plain.is_due(8, 1.5)
