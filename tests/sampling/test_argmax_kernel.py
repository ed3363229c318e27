"""The likeliest token by the bits of 16-bit logits, against NumPy over the same numbers widened."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchserve.sampling.argmax_kernel import BLOCK, best_tokens
from tests.factories import examples

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


Found = tuple[list[int], list[bool]]


def found(logits: torch.Tensor) -> Found:
    best, is_finite = best_tokens(logits)
    return best.tolist(), is_finite.tolist()


def expected(logits: torch.Tensor) -> Found:
    rows = logits.float().numpy()
    best = rows.argmax(axis=-1)
    return best.tolist(), np.isfinite(rows[np.arange(len(rows)), best]).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5000])
def test_the_greatest_is_found_wherever_it_is(dtype: torch.dtype, vocab_size: int) -> None:
    for seed in range(20):
        logits = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(seed)) * 10.0 - 8.0 * (seed % 3)
        rows = logits.to(dtype)
        assert found(rows) == expected(rows)
    for place in {0, vocab_size // 2, vocab_size - 1}:
        logits = torch.full((1, vocab_size), -3.0)
        logits[0, place] = -2.0
        assert found(logits.to(dtype)) == ([place], [True])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pair_of_kinds_of_bits_is_ordered_as_the_numbers_are(dtype: torch.dtype) -> None:
    """All exponents and signs with a few mantissas, zeros, infinities and NaNs of both signs among them."""
    bits = np.unique(np.arange(1 << 16, dtype=np.uint16) & np.uint16(0xFFC1)).view(np.int16)
    first, second = np.repeat(bits, len(bits)), np.tile(bits, len(bits))
    pairs = torch.from_numpy(np.stack([first, second], axis=1)).view(dtype)
    assert found(pairs) == expected(pairs)


@examples(300)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, -4.0, np.inf, -np.inf, np.nan, -np.nan]), min_size=1, max_size=6),
    st.integers(0, 2 * BLOCK),
    st.sampled_from(DTYPES),
    st.sampled_from([-5.0, -0.0, -np.inf]),
)
def test_of_equals_the_first_and_nothing_that_is_no_number(
    values: list[float], start: int, dtype: torch.dtype, rest: float
) -> None:
    logits = torch.full((2, 2 * BLOCK + 6), rest)
    logits[1, start : start + len(values)] = torch.tensor(values)
    rows = logits.to(dtype)
    assert found(rows) == expected(rows)


def test_rows_that_do_not_lie_one_behind_the_other() -> None:
    logits = torch.randn(6, 3000).to(torch.bfloat16)
    for rows in (logits[::2], logits[:, 100:2000], logits[:, ::3]):
        assert found(rows) == expected(rows)
    assert best_tokens(logits[:0])[0].shape == (0,)
