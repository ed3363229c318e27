from __future__ import annotations

import pytest

from batchserve.decoding_length.price import SpeedUp


def test_nothing_is_gained_before_anything_was_drafted() -> None:
    assert SpeedUp().ratio(4) == 1.0


def test_it_becomes_the_rate_that_the_engine_reaches() -> None:
    speed = SpeedUp()
    for _ in range(500):
        speed.observe(4, 10, 0.0125, 0.010)
    assert speed.ratio(4) * 4 / 0.010 == pytest.approx(10 / 0.0125, rel=0.05)


def test_what_one_size_of_batch_gains_says_nothing_of_another() -> None:
    speed = SpeedUp()
    for _ in range(500):
        speed.observe(1, 3, 0.010, 0.010)
    assert speed.ratio(1) == pytest.approx(3.0, rel=0.2)
    assert speed.ratio(16) == 1.0


def test_it_follows_when_the_text_changes() -> None:
    speed = SpeedUp()
    for _ in range(300):
        speed.observe(1, 4, 0.010, 0.010)
    for _ in range(1000):
        speed.observe(1, 1, 0.010, 0.010)
    assert speed.ratio(1) < 1.1
