"""The likeliest token of every row. Of 16-bit logits by their bits, as torch and NumPy would widen them first.

To widen a step's logits is to write twice what they take and to read that again, for a vocabulary of 128,000 tokens
several milliseconds.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np
import torch
from numba import njit

BLOCK = 1024  # logits of which only the greatest is kept, until it is known which block has the greatest of all
INFINITY_BITS = {torch.bfloat16: np.int16(0x7F80), torch.float16: np.int16(0x7C00)}


@njit(cache=True, nogil=True, inline="always")
def _key(bits):  # type: ignore[no-untyped-def]
    """Ascends with the number that the bits are: those of a negative one descend. -0 comes right below 0."""
    return np.int16(bits ^ np.int16((bits >> np.int16(15)) & np.int16(0x7FFF)))


@njit(cache=True, nogil=True)
def _bounds(block):  # type: ignore[no-untyped-def]
    """The least and the greatest key."""
    least, most = np.int16(0x7FFF), np.int16(-0x8000)
    for i in range(block.shape[0]):
        key = _key(block[i])
        least, most = min(least, key), max(most, key)
    return least, most


@njit(cache=True, nogil=True)
def _first_between(row, low, high):  # type: ignore[no-untyped-def]
    """The first place whose key is from low to high."""
    for i in range(row.shape[0]):
        if low <= _key(row[i]) <= high:
            return i
    return -1


@njit(cache=True, nogil=True)
def find_best(bits, infinity, best, is_finite):  # type: ignore[no-untyped-def]
    """Fill, for every row of bits int16 [num_rows, vocab_size], the place of its greatest number, and whether that is
    finite.

    Of equals the first; a NaN is above all numbers. infinity: the bits of it.
    """
    for i in range(bits.shape[0]):
        row, least, most, start = bits[i], np.int16(0x7FFF), np.int16(-0x8000), 0
        for at in range(0, row.shape[0], BLOCK):
            low, high = _bounds(row[at : at + BLOCK])
            least = min(least, low)
            if high > most:
                most, start = high, at
        if most > infinity or least < ~infinity:  # a NaN of either sign
            above, below = _first_between(row, infinity + 1, 0x7FFF), _first_between(row, -0x8000, ~infinity - 1)
            best[i], is_finite[i] = max(above, below) if min(above, below) < 0 else min(above, below), False
        else:
            zero = _first_between(row, -1, 0) if most == 0 else -1  # -0 is as great as 0
            best[i] = zero if zero >= 0 else start + _first_between(row[start:], most, most)
            is_finite[i] = ~infinity < most < infinity


def best_tokens(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(int64, bool), both [num_rows]: of every row of logits [num_rows, vocab_size], on the CPU, the place of its
    greatest number, the first of equals, and whether that is finite. A NaN is above all numbers.
    """
    infinity = INFINITY_BITS.get(logits.dtype)
    if infinity is None:
        rows = logits.float().numpy()
        best = rows.argmax(axis=-1)
        return best, np.isfinite(rows[np.arange(len(rows)), best])
    best, is_finite = np.empty(len(logits), np.int64), np.empty(len(logits), np.bool_)
    find_best(logits.contiguous().view(torch.int16).numpy(), infinity, best, is_finite)
    return best, is_finite


def compile_kernels() -> None:
    """Compile find_best, or load it from the cache on disk."""
    best_tokens(torch.zeros(1, 1, dtype=torch.bfloat16))
