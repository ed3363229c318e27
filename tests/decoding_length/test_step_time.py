from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable, grid
from batchserve.decoding_length.time_kernels import seconds_at
from tests.factories import examples

TABLE = StepTimeTable((4, 8, 16, 32), (0.010, 0.011, 0.014, 0.022), 0.001, 0.0001, 1e-6, 1e-7)


def test_a_step_is_the_table_plus_what_its_requests_and_contexts_cost() -> None:
    model = StepTimeModel(TABLE)
    assert model.predict(StepLoad(4, 4, 1)) == pytest.approx(0.010)
    assert model.predict(StepLoad(1, 1, 1)) == pytest.approx(0.010)
    assert model.predict(StepLoad(12, 12, 1)) == pytest.approx(0.0125)
    assert model.predict(StepLoad(48, 48, 1)) == pytest.approx(0.030)
    assert model.predict(StepLoad(16, 16, 3, 1000, 5000)) == pytest.approx(0.014 + 0.002 + 0.001 + 0.0005)
    # A chunk of a prompt runs the head on one of its rows.
    assert model.predict(StepLoad(16, 1, 1)) == pytest.approx(0.014 - 0.0015)


@examples(100)
@given(st.integers(1, 80), st.integers(1, 40), st.integers(0, 500), st.lists(st.integers(1, 80), max_size=20))
def test_more_rows_are_as_a_step_that_has_them(rows: int, requests: int, context: int, seen: list[int]) -> None:
    for table in (TABLE, StepTimeTable((8,), (0.01,))):
        model = StepTimeModel(table)
        for i, each in enumerate(seen):
            model.observe(StepLoad(each, each, 1), 0.01 * (1 + i % 3))
        load = StepLoad(rows, max(1, rows // 2), requests, context, 3 * context)
        more = load._replace(num_rows=rows + 7, num_logit_rows=max(1, rows // 2) + 7, attended_tokens=3 * context + 70)
        assert seconds_at(model.arrays, tuple(load), 7.0, 70.0) == pytest.approx(model.predict(more))


def test_more_rows_never_take_less_whatever_was_measured() -> None:
    model = StepTimeModel(StepTimeTable((4, 8, 16), (0.010, 0.007, 0.012)))
    assert model.predict(StepLoad(4, 4, 1)) == pytest.approx(0.007)
    assert model.predict(StepLoad(8, 8, 1)) == pytest.approx(0.007)


def test_the_critical_length_is_the_last_within_a_quarter_more() -> None:
    assert StepTimeModel(TABLE).critical_length() == 12  # 12.5 ms
    assert StepTimeModel(StepTimeTable((1, 2), (0.01, 0.02))).critical_length() == 1
    assert StepTimeModel(StepTimeTable((4, 8), (0.01, 0.01))).critical_length() == 8


def test_a_slower_machine_moves_the_factor_and_every_prediction_with_it() -> None:
    model = StepTimeModel(TABLE)
    for rows in (4, 8, 16, 32) * 10:
        model.observe(StepLoad(rows, rows, 1), 2.0 * StepTimeModel(TABLE).predict(StepLoad(rows, rows, 1)))
    assert model.factor == pytest.approx(2.0, rel=0.05)
    assert model.predict(StepLoad(20, 20, 1)) == pytest.approx(2.0 * 0.016, rel=0.1)


def test_a_machine_that_is_suddenly_half_as_fast_is_followed_within_fifteen_steps() -> None:
    model, truth, load = StepTimeModel(TABLE), StepTimeModel(TABLE), StepLoad(16, 16, 1)
    for _ in range(15):
        model.observe(load, 2.0 * truth.predict(load))
    assert model.predict(load) == pytest.approx(2.0 * truth.predict(load), rel=0.1)


def test_a_wrong_shape_is_corrected_where_it_is_wrong() -> None:
    model, truth = StepTimeModel(TABLE), StepTimeModel(StepTimeTable((4, 8, 16, 32), (0.010, 0.011, 0.016, 0.022)))
    rng = np.random.default_rng(0)
    for _ in range(3000):
        load = StepLoad(int(rng.choice([4, 8, 16, 32])), 4, 1)
        load = StepLoad(load.num_rows, load.num_rows, 1)
        model.observe(load, truth.predict(load) * math.exp(rng.normal(0, 0.03)))
    sixteen, four = StepLoad(16, 16, 1), StepLoad(4, 4, 1)
    assert model.predict(sixteen) / model.predict(four) == pytest.approx(1.6, rel=0.05)


def test_a_table_from_a_busy_machine_is_right_within_two_hundred_steps() -> None:
    """Some of its times are up to twice what steps take once the machine is quiet."""
    disturbed = (1.9, 1.1, 2.0, 1.3)
    model = StepTimeModel(StepTimeTable(TABLE.rows, tuple(np.multiply(TABLE.seconds, disturbed).tolist())))
    quiet = StepTimeModel(StepTimeTable(TABLE.rows, TABLE.seconds))
    for step in range(200):
        load = StepLoad(4 + step * 7 % 29, 4 + step * 7 % 29, 1)
        model.observe(load, quiet.predict(load))
    for rows in (4, 8, 16, 24, 32):
        load = StepLoad(rows, rows, 1)
        assert model.predict(load) == pytest.approx(quiet.predict(load), rel=0.15), rows


def test_outliers_touch_only_the_factor() -> None:
    model = StepTimeModel(TABLE)
    before = model.predict(StepLoad(16, 16, 1)) / model.predict(StepLoad(4, 4, 1))
    for _ in range(50):
        model.observe(StepLoad(16, 16, 1), 10.0 * model.predict(StepLoad(16, 16, 1)))
    after = model.predict(StepLoad(16, 16, 1)) / model.predict(StepLoad(4, 4, 1))
    assert model.factor > 10
    assert after == pytest.approx(before)


def test_what_the_host_takes_makes_no_row_dearer() -> None:
    model, truth = StepTimeModel(TABLE), StepTimeModel(TABLE)
    one, more = StepLoad(4, 4, 1), StepLoad(16, 16, 1)
    for load in (one, more) * 50:
        model.observe(load, 1.1 * truth.predict(load), 0.005)
    assert model.host_s == pytest.approx(0.005, rel=0.01)
    assert model.predict(one) == pytest.approx(1.1 * truth.predict(one) + 0.005, rel=0.01)
    assert model.predict(more) - model.predict(one) == pytest.approx(1.1 * (0.014 - 0.010), rel=0.02)


def test_a_pause_is_no_habit() -> None:
    """Neither of the forward nor of the host, and the steps behind it leave the shape alone."""
    model, truth = StepTimeModel(TABLE), StepTimeModel(TABLE)
    loads = StepLoad(4, 4, 1), StepLoad(16, 16, 1)
    for load in loads * 50:
        model.observe(load, truth.predict(load), 0.001)
    before_s = [model.predict(load) for load in loads]
    model.observe(loads[0], 0.2, 0.2)
    assert all(model.predict(load) < 1.15 * was_s for load, was_s in zip(loads, before_s, strict=True))
    for load in loads * 20:
        model.observe(load, truth.predict(load), 0.001)
    assert [model.predict(load) for load in loads] == pytest.approx(before_s, rel=0.01)


@pytest.mark.parametrize(
    ("forward_s", "host_s"),
    [(0.0, 0.0), (-1.0, 0.0), (math.inf, 0.0), (math.nan, 0.0), (1.0, math.nan), (1.0, math.inf)],
)
def test_a_clock_that_stands_or_jumps_teaches_nothing(forward_s: float, host_s: float) -> None:
    model = StepTimeModel(TABLE)
    model.observe(StepLoad(8, 8, 1), forward_s, host_s)
    assert model.factor == 1.0
    assert model.host_s == 0.0


def test_a_host_that_took_less_than_nothing_took_nothing() -> None:
    """Differences of a clock's readings are rounded."""
    model = StepTimeModel(TABLE)
    model.observe(StepLoad(8, 8, 1), 0.022, -1e-18)
    assert model.host_s == 0.0
    assert model.factor > 1.0


@examples(50)
@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 10.0)), max_size=60))
def test_whatever_is_observed_predictions_stay_finite_and_positive(steps: list[tuple[int, float]]) -> None:
    model = StepTimeModel(TABLE)
    for rows, seconds in steps:
        model.observe(StepLoad(rows, rows, 1), seconds)
    assert all(0 < model.predict(StepLoad(rows, rows, 1)) < 1e6 for rows in (1, 4, 9, 32, 500))


@pytest.mark.parametrize(
    ("rows", "seconds"), [((), ()), ((4, 8), (0.1,)), ((8, 4), (0.1, 0.2)), ((4,), (math.nan,)), ((0,), (0.1,))]
)
def test_a_table_that_makes_no_sense_is_refused(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"rows|step time"):
        StepTimeTable(rows, seconds)


def test_the_grid_ends_with_the_most_rows() -> None:
    assert grid(1024)[-1] == 1024
    assert grid(100)[-2:] == [96, 100]
    assert grid(2) == [2]
