"""DraftTime against times that are known."""

from __future__ import annotations

from itertools import pairwise

import pytest

from batchserve.decoding_length.draft_time import FIRST_SHARE, LONGEST_WAIT, DraftTime
from batchserve.decoding_length.price import MAX_SURPRISE

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
    assert time.observe(4, 5.0, STEP_S) == MAX_SURPRISE * usual_s
    assert time.predict(4) <= MAX_SURPRISE * usual_s


def test_what_is_too_long_is_tried_ever_more_rarely() -> None:
    time = DraftTime()
    tried = [step for step in range(1000) if time.is_tried(16, is_too_long=True)]
    gaps = [after - before for before, after in pairwise([-1, *tried])]
    assert gaps[:6] == [3, 5, 9, 17, 33, 65]
    assert set(gaps[6:]) == {LONGEST_WAIT + 1}
    assert time.is_tried(16, is_too_long=False)
    assert not time.is_tried(16, is_too_long=True)
