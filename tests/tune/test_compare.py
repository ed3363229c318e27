"""Settings are told apart by what three rounds can show, and not by noise."""

from __future__ import annotations

import math
import random

import pytest

from batchserve.tune.compare import Comparison, equals_of
from batchserve.tune.sweep import Measured, Repeated, Setting


def make_runs(rates: dict[int, float], seqs: int = 2) -> Repeated:
    setting = Setting(1, seqs, True)
    return Repeated(
        setting, tuple(Measured(setting, rate, 0.01, 0.02, 0.1, 1, 4, 9, turn) for turn, rate in rates.items())
    )


def told_apart(*ratios: float) -> bool:
    return Comparison(ratios).is_told_apart


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((), False),
        ((2.0,), False),
        ((2.0, 2.0), False),
        ((2.0, 2.0, 2.0), True),
        ((0.5, 0.5, 0.5), True),
        ((1.005, 1.005, 1.005), False),  # too little to matter
        ((1.02, 1.02, 1.02), True),
        ((1.5, 1.4, 0.9), False),
        ((1.01, 1.02, 1.12), False),  # of equal settings, one in four has three rounds on one side
        ((1.20, 1.25, 1.22), True),
        ((1.05, 1.04, 1.06, 1.05, 1.03), True),
        ((1.05,) * 50, True),
    ],
)
def test_what_is_told_apart(ratios, expected):
    assert told_apart(*ratios) is expected
    assert told_apart(*(1 / ratio for ratio in ratios)) is expected, "it is the same from the other side"


def test_rounds_are_compared_with_themselves():
    """A machine that was twice as slow in one round says nothing about settings."""
    one, other = make_runs({0: 110, 1: 55, 2: 111}), make_runs({0: 100, 1: 50, 2: 100})
    assert Comparison.of(one, other, "tokens_per_s").is_told_apart
    assert not Comparison.of(one, make_runs({0: 100, 1: 100, 2: 50}), "tokens_per_s").is_told_apart


def test_only_rounds_that_both_have_are_compared():
    one, other = make_runs({0: 10, 1: 20, 2: math.nan, 3: 40}), make_runs({1: 10, 2: 10, 3: 10, 4: 10})
    assert Comparison.of(one, other, "tokens_per_s").ratios == (2, 4)


def test_noise_seldom_tells_equal_settings_apart():
    """Of sweeps of eight equal settings in three rounds, 3 in 100 take the last one, the default, for worse."""
    rng, num_wrong, num_sweeps = random.Random(0), 0, 1000
    for _ in range(num_sweeps):
        pace = [rng.lognormvariate(0, 0.2) for _ in range(3)]  # of the machine, in each round
        settings = [
            make_runs({turn: 100 * pace[turn] * rng.lognormvariate(0, 0.03) for turn in range(3)}, seqs)
            for seqs in range(1, 9)
        ]
        best = max(settings, key=lambda each: each.median("tokens_per_s"))
        num_wrong += settings[-1] not in equals_of(best, settings, "tokens_per_s")
    assert num_wrong / num_sweeps < 0.05


def test_the_best_is_one_of_its_equals():
    best, other = make_runs({0: 200, 1: 202, 2: 198}), make_runs({0: 100, 1: 101, 2: 102}, 4)
    assert equals_of(best, [other, best], "tokens_per_s") == [best]
