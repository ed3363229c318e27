"""The noise behind every sampled token: a pure function of its key, uniform, independent and bounded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.sampling.noise import GOLDEN, HIGHEST_NOISE, LOWEST_NOISE, MASK64, gumbel, mix, stream_key
from tests.factories import examples

words = st.integers(0, MASK64)
NUM_DRAWS = 1 << 14
INDEPENDENT = 4 / math.sqrt(NUM_DRAWS)  # four standard deviations of the correlation of independent draws


def unmix(y: int) -> int:
    """The inverse of mix: which word is mixed to this one."""
    y ^= (y >> 31) ^ (y >> 62)
    y = y * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK64
    y ^= (y >> 27) ^ (y >> 54)
    y = y * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK64
    return y ^ (y >> 30) ^ (y >> 60)


def key_for(word: int, token_id: int) -> int:
    """The key under which this token's draw is the mixed `word`."""
    return (unmix(word) - (token_id + 1) * GOLDEN) & MASK64


def literal_noise(key: int, token_id: int) -> float:
    """The definition, one token at a time in Python's own integers and floats."""
    word = mix((key + (token_id + 1) * GOLDEN) & MASK64)
    return -math.log(-math.log(((word >> 32) + 0.5) / 2**32))


def draws(seeds: range | list[int], positions: range | list[int], token_ids: np.ndarray) -> np.ndarray:
    """Uniform draws, one row for each (seed, position)."""
    keys = [stream_key(seed, position) for seed in seeds for position in positions]
    return np.stack([np.exp(-np.exp(-gumbel(key, token_ids))) for key in keys])


def chi_square(counts: np.ndarray) -> float:
    """Against equal expectations, in standard deviations from its mean."""
    expected = counts.sum() / counts.size
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


# One long run of draws along each of the three parts of the key.
STREAMS = {
    "along tokens": lambda: draws([3], [17], np.arange(NUM_DRAWS)).ravel(),
    "along positions": lambda: draws([3], range(NUM_DRAWS), np.array([17])).ravel(),
    "along seeds": lambda: draws(range(NUM_DRAWS), [3], np.array([17])).ravel(),
}


@pytest.fixture(scope="module", params=sorted(STREAMS))
def stream(request: pytest.FixtureRequest) -> np.ndarray:
    return STREAMS[request.param]()


@examples(50)
@given(words)
def test_mix_is_a_bijection(word: int) -> None:
    assert mix(unmix(word)) == word
    assert unmix(mix(word)) == word


@examples(50)
@given(words, st.lists(st.integers(0, 2**18), min_size=1, max_size=20))
def test_equals_the_literal_definition_for_any_set_of_tokens(key: int, token_ids: list[int]) -> None:
    """Also: what other tokens are asked for, and in which order, changes nothing."""
    together = gumbel(key, np.array(token_ids))
    alone = [gumbel(key, np.array([token_id]))[0] for token_id in token_ids]
    assert together.tolist() == alone
    assert together == pytest.approx([literal_noise(key, token_id) for token_id in token_ids], rel=1e-12, abs=1e-12)


def test_is_the_same_in_every_release() -> None:
    """A seed is a promise: these numbers may only change with a note to users."""
    assert (stream_key(7, 11), stream_key(7, 11, 1)) == (0xF87FD3DE4476A4B5, 0x7FDFEFECDE917D76)
    expected = [1.316808380024202, 1.9606131027446274, -1.7528581584872933]
    assert gumbel(stream_key(7, 11), np.array([0, 1, 31_999])) == pytest.approx(expected, rel=1e-12)


def test_every_part_of_the_key_matters() -> None:
    seeds = [0, 1, 2, MASK64, GOLDEN, 1 << 32]
    keys = {stream_key(seed, position, sample) for seed in seeds for position in range(500) for sample in range(4)}
    assert len(keys) == len(seeds) * 500 * 4


def test_draws_are_uniform(stream: np.ndarray) -> None:
    counts, _ = np.histogram(stream, bins=64, range=(0, 1))
    assert abs(chi_square(counts)) < 4
    assert stream.mean() == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / NUM_DRAWS))


@pytest.mark.parametrize("lag", [1, 2, 7, 256])
def test_draws_along_any_part_of_the_key_are_independent(stream: np.ndarray, lag: int) -> None:
    first, second = stream[:-lag], stream[lag:]
    assert abs(np.corrcoef(first, second)[0, 1]) < INDEPENDENT
    joint, _, _ = np.histogram2d(first, second, bins=16, range=((0, 1), (0, 1)))
    assert abs(chi_square(joint)) < 4


def test_rows_of_neighbouring_keys_are_independent() -> None:
    """The tokens' noise at one position says nothing of the next position's or the next seed's."""
    tokens = np.arange(NUM_DRAWS)
    rows = draws([5, 6], [40, 41], tokens)
    correlations = np.corrcoef(rows)[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < INDEPENDENT


def test_bounds_hold_at_the_very_ends_of_the_draw_and_are_tight() -> None:
    lowest = gumbel(key_for(0, 5), np.array([5]))[0]
    highest = gumbel(key_for(MASK64, 5), np.array([5]))[0]
    assert LOWEST_NOISE <= lowest < LOWEST_NOISE + 1e-3
    assert HIGHEST_NOISE - 1e-3 < highest <= HIGHEST_NOISE
