"""The tensor form of the noise is the NumPy one: every bit of the hash, every digit that a logarithm can promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchserve.sampling import noise
from batchserve.sampling.device_noise import draws, gumbel, gumbel_fp32, mix, stream_keys
from batchserve.sampling.noise import GOLDEN, MASK64
from tests.factories import examples
from tests.sampling.test_noise import key_for

words = st.integers(0, MASK64)
END_WORDS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, MASK64 - 1, MASK64, GOLDEN]


def as_int64(words: list[int]) -> torch.Tensor:
    """The int64 tensor of the same bits."""
    return torch.from_numpy(np.array(words, dtype=np.uint64).view(np.int64))


def as_words(tensor: torch.Tensor) -> list[int]:
    return tensor.numpy().view(np.uint64).tolist()


@examples(100)
@given(st.lists(words, min_size=1, max_size=30))
def test_the_hash_has_the_same_bits(some_words: list[int]) -> None:
    some_words += END_WORDS
    assert as_words(mix(as_int64(some_words))) == [noise.mix(word) for word in some_words]


@examples(100)
@given(st.lists(st.tuples(words, st.integers(0, 2**40)), min_size=1, max_size=30))
def test_keys_of_any_seed_and_position_have_the_same_bits(pairs: list[tuple[int, int]]) -> None:
    pairs += [(seed, 2**20) for seed in END_WORDS]
    seeds, positions = zip(*pairs, strict=True)
    keys = stream_keys(as_int64(list(seeds)), torch.tensor(positions))
    assert as_words(keys) == [noise.stream_key(seed, position) for seed, position in pairs]


@examples(50)
@given(st.lists(words, min_size=1, max_size=4), st.lists(st.integers(0, 2**18), min_size=1, max_size=50))
def test_noise_is_equal_but_for_the_last_digits_of_a_logarithm(keys: list[int], token_ids: list[int]) -> None:
    draw = draws(as_int64(keys).unsqueeze(1), torch.tensor(token_ids))
    expected = np.stack([noise.gumbel(key, np.array(token_ids)) for key in keys])
    np.testing.assert_allclose(gumbel(draw).numpy(), expected, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(gumbel_fp32(draw).numpy(), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("word", [0, 2**32, 2**62, 2**63 - 1, 2**63, MASK64 - 2**34, MASK64])
def test_the_ends_and_the_middle_of_the_draw(word: int) -> None:
    """Where float32 could not tell the uniform from 1, and where its two branches meet."""
    key = key_for(word, 5)
    draw = draws(as_int64([key]), torch.tensor([5]))
    expected = noise.gumbel(key, np.array([5]))
    assert draw.item() == noise.mix(key + 6 * GOLDEN & MASK64) >> 32 == word >> 32
    assert gumbel(draw).numpy() == pytest.approx(expected, rel=1e-14)
    assert gumbel_fp32(draw).numpy() == pytest.approx(expected, abs=5e-5)
