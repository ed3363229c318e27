"""The near-tie rule: no false alarm under rounding within the bound, and no pass for a token that plainly loses."""

from __future__ import annotations

import numpy as np
import pytest

from batchserve.sampling.near_tie import FP32_BOUND, is_near_tie, rounding_bound
from batchserve.sampling.noise import gumbel, stream_key
from batchserve.sampling.sampler import sample_row
from tests.factories import make_sampling

BOUND = 1e-3
GREEDY = make_sampling(temperature=0.0)


def test_greedy_passes_up_to_the_bound_and_not_beyond() -> None:
    logits = np.array([1.0, 1.0 + BOUND / 2, 1.0 - BOUND, -5.0], dtype=np.float32)
    assert [is_near_tie(logits, token, 0, GREEDY, BOUND) for token in range(4)] == [True, True, False, False]


def test_the_bound_of_16_bit_types_grows_with_the_logits() -> None:
    small, large = np.array([0.5, 0.1], dtype=np.float32), np.array([60.0, -2.0], dtype=np.float32)
    assert rounding_bound("float32", small) == rounding_bound("float32", large) == FP32_BOUND
    for dtype, spacing in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        assert rounding_bound(dtype, large) == 60 * rounding_bound(dtype, small)
        assert rounding_bound(dtype, large) >= 60 * spacing  # at least one rounding of the largest logit


@pytest.mark.parametrize("forbidden", [float("-inf"), float(np.finfo(np.float32).min), -1e9])
def test_a_forbidden_token_excuses_no_other(forbidden: float) -> None:
    logits = np.array([1.0, 5.0, 2.0, forbidden], dtype=np.float32)
    assert rounding_bound("bfloat16", logits) == rounding_bound("bfloat16", logits[:3])


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_have_the_least_bound(broken: float) -> None:
    logits = np.full(3, broken)
    assert rounding_bound("bfloat16", logits) == rounding_bound("bfloat16", np.zeros(3))
    logits[0] = 1.0  # is_near_tie says what is wrong with such a row: nothing raises on the way there
    assert rounding_bound("bfloat16", logits) == rounding_bound("bfloat16", np.zeros(3))


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (8, 1.0), (0, 0.9), (0, 0.4), (20, 0.9)])
def test_rounding_within_the_bound_never_raises_an_alarm(temperature: float, top_k: int, top_p: float) -> None:
    """Whoever wins after every logit was moved by at most half the bound passes by the plain logits."""
    rng = np.random.default_rng(8)
    flips = 0
    for position in range(150):
        logits = (rng.standard_normal(120) * rng.choice([0.02, 0.5, 3])).astype(np.float32)
        moved = (logits + rng.uniform(-BOUND / 2, BOUND / 2, 120)).astype(np.float32)
        sampling = make_sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=position)
        winner = sample_row(moved, position, sampling)
        flips += winner != sample_row(logits, position, sampling)
        assert is_near_tie(logits, winner, position, sampling, BOUND)
    assert flips < 75  # the rule was not needed for most


def test_a_sampled_token_that_loses_by_more_does_not_pass() -> None:
    """The runner-up by perturbed score passes exactly when its gap is within the bound over the temperature."""
    rng = np.random.default_rng(9)
    seen = set()
    for position in range(400):
        logits = (rng.standard_normal(60) * 0.3).astype(np.float32)
        sampling = make_sampling(temperature=0.5, seed=3)
        scores = logits.astype(np.float64) / 0.5 + gumbel(stream_key(3, position), np.arange(60))
        second, first = np.argsort(scores)[-2:]
        gap = scores[first] - scores[second]
        seen.add(expected := bool(gap <= 0.05 / 0.5))
        assert is_near_tie(logits, int(second), position, sampling, 0.05) is expected
    assert seen == {True, False}


def test_an_unlikely_winner_is_held_to_like_any_other() -> None:
    """Noise may lift a token of the last 2% of the mass to the top; without top_p nobody else passes then."""
    logits = np.log(np.array([0.985, *[0.0015] * 10], dtype=np.float32))
    lucky = 0
    for position in range(1000):
        sampling = make_sampling(temperature=1.0, seed=2)
        winner = sample_row(logits, position, sampling)
        lucky += winner != 0
        passed = [token for token in range(11) if is_near_tie(logits, token, position, sampling, FP32_BOUND)]
        assert passed == [winner]
    assert lucky > 3


def test_a_token_outside_top_k_passes_only_at_its_very_edge() -> None:
    logits = np.array([3.0, 2.0, 2.0 - BOUND / 2, 1.0], dtype=np.float32)
    passed = {2: 0, 3: 0}
    for position in range(200):
        sampling = make_sampling(temperature=1.0, top_k=2, seed=1)
        for token in passed:
            passed[token] += is_near_tie(logits, token, position, sampling, BOUND)
    assert passed[2] > 0
    assert passed[3] == 0


def test_a_token_outside_the_nucleus_does_not_pass() -> None:
    logits = np.log(np.array([0.6, 0.3, 0.08, 0.02], dtype=np.float32))
    sampling = make_sampling(temperature=1.0, top_p=0.85)
    assert not any(is_near_tie(logits, token, p, sampling, BOUND) for token in (2, 3) for p in range(100))
