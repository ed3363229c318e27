"""DraftTime against times that are known."""

from __future__ import annotations

import pytest

from batchserve.scheduler.draft_time import FIRST_SHARE, FORGOTTEN, MOST_SURPRISE, DraftTime

STEP_S = 1.0


def test_nothing_is_known_at_first() -> None:
    assert DraftTime().predict(4) == 0.0


def test_the_first_time_counts_whole_and_later_ones_ever_less() -> None:
    time = DraftTime()
    assert time.observe(4, 0.02, STEP_S) == 0.02 == time.predict(4)
    time.observe(4, 0.03, STEP_S)
    assert time.predict(4) == pytest.approx(0.025)
    for _ in range(200):
        time.observe(4, 0.01, STEP_S)
    assert time.predict(4) == pytest.approx(0.01, rel=1e-3)


def test_a_number_that_was_never_asked_for_takes_what_the_nearest_does() -> None:
    time = DraftTime()
    time.observe(1, 0.01, STEP_S)
    time.observe(16, 0.03, STEP_S)
    assert [time.predict(number) for number in (1, 2, 8, 16, 31, 64)] == [0.01, 0.01, 0.03, 0.03, 0.03, 0.03]


def test_a_pause_counts_as_a_bounded_time() -> None:
    time = DraftTime()
    assert time.observe(4, 5.0, STEP_S) == FIRST_SHARE * STEP_S
    usual_s = time.predict(4)
    assert time.observe(4, 5.0, STEP_S) == MOST_SURPRISE * usual_s
    assert time.predict(4) <= MOST_SURPRISE * usual_s


def test_what_is_too_long_to_be_tried_is_forgotten_bit_by_bit() -> None:
    time = DraftTime()
    time.observe(1, 0.1, STEP_S)
    for _ in range(3):
        time.forget(16)
    assert time.predict(16) == pytest.approx(0.1 * FORGOTTEN**3)
    assert time.predict(1) == 0.1
