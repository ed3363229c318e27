"""Finds the likeliest token of every row. 16-bit logits are compared by their bits, without widening them first.

torch and NumPy would widen them, which writes twice the size of a step's logits and reads it again: several
milliseconds for a vocabulary of 128,000 tokens.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray, types

from batchserve.native import pool
from batchserve.native.addresses import as_pointer, claim, offset, record_at
from batchserve.native.jit import cfunc, njit

BLOCK = 1024  # logits per block; a first pass only finds out which block has the greatest
SHARED_LOGITS = 1 << 16  # one thread reads fewer logits faster than several threads do
BEST_JOB = np.dtype(  # of best_loop
    [
        ("num_rows", np.int64),
        ("vocab_size", np.int64),
        ("infinity", np.int64),  # its bits
        # Addresses, of int16 [num_rows, vocab_size], int64 [num_rows] and bool [num_rows].
        ("bits", np.int64),
        ("best", np.int64),
        ("is_finite", np.int64),
        ("next", np.int64),  # the first row that no thread has begun, initially 0
    ]
)
NEXT_AT = offset(BEST_JOB, "next")
INFINITY_BITS = {torch.bfloat16: np.int16(0x7F80), torch.float16: np.int16(0x7C00)}


@njit(cache=True, nogil=True, inline="always")
def _key(bits):  # type: ignore[no-untyped-def]
    """Maps a number's bits to an integer in the same order; negative numbers' bits descend. -0 is right below 0."""
    return np.int16(bits ^ np.int16((bits >> np.int16(15)) & np.int16(0x7FFF)))


@njit(cache=True, nogil=True)
def _bounds(block):  # type: ignore[no-untyped-def]
    """Returns the least and the greatest key."""
    least, most = np.int16(0x7FFF), np.int16(-0x8000)
    for i in range(block.shape[0]):
        key = _key(block[i])
        least, most = min(least, key), max(most, key)
    return least, most


@njit(cache=True, nogil=True)
def _first_between(row, low, high):  # type: ignore[no-untyped-def]
    """Returns the first place whose key is from low to high, or -1."""
    for i in range(row.shape[0]):
        if low <= _key(row[i]) <= high:
            return i
    return -1


@njit(cache=True, nogil=True)
def _best_of(row, infinity):  # type: ignore[no-untyped-def]
    """Returns the place of the greatest of the numbers with the bits int16 [vocab_size], and whether it is finite.

    The first of equals is taken, and a NaN is above all numbers. infinity: the bits of infinity.
    """
    least, most, start = np.int16(0x7FFF), np.int16(-0x8000), 0
    for at in range(0, row.shape[0], BLOCK):
        low, high = _bounds(row[at : at + BLOCK])
        least = min(least, low)
        if high > most:
            most, start = high, at
    if most > infinity or least < ~infinity:  # a NaN of either sign
        above, below = _first_between(row, infinity + 1, 0x7FFF), _first_between(row, -0x8000, ~infinity - 1)
        return max(above, below) if min(above, below) < 0 else min(above, below), False
    zero = _first_between(row, -1, 0) if most == 0 else -1  # -0 is as great as 0
    best = zero if zero >= 0 else start + _first_between(row[start:], most, most)
    return best, ~infinity < most < infinity


@functools.cache
def best_loop() -> Any:
    """Returns the compiled loop over rows. Threads that are given the same job share it."""

    @cfunc(types.void(types.int64), nopython=True, cache=True)
    def loop(job_address):  # type: ignore[no-untyped-def]
        job = record_at(job_address, BEST_JOB)
        count, infinity = job.num_rows, np.int16(job.infinity)
        bits = carray(as_pointer(job.bits), (count, job.vocab_size), np.int16)
        best = carray(as_pointer(job.best), count, np.int64)
        is_finite = carray(as_pointer(job.is_finite), count, np.bool_)
        while True:
            i = claim(job_address + NEXT_AT)
            if i >= count:
                break
            best[i], is_finite[i] = _best_of(bits[i], infinity)

    return loop


def best_tokens(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int64, bool), both [num_rows]: the place of each row's greatest logit, the first of equals, and whether
    that is finite. logits: [num_rows, vocab_size] on the CPU. A NaN is above all numbers.
    """
    infinity = INFINITY_BITS.get(logits.dtype)
    if infinity is None:
        rows = logits.float().numpy()
        best = rows.argmax(axis=-1)
        return best, np.isfinite(rows[np.arange(len(rows)), best])
    bits, (num_rows, vocab_size) = logits.contiguous(), logits.shape
    best, is_finite = np.empty(num_rows, np.int64), np.empty(num_rows, np.bool_)
    arrays = bits.data_ptr(), best.ctypes.data, is_finite.ctypes.data
    job = np.array((num_rows, vocab_size, infinity, *arrays, 0), BEST_JOB)
    is_shared = num_rows * vocab_size > SHARED_LOGITS
    pool.run(best_loop().address, job.ctypes.data, torch.get_num_threads() if is_shared else 1)
    return best, is_finite


@njit(cache=True, nogil=True)
def best_of_parts(greatest, logits_at, vocab_size, width, best, is_finite):  # type: ignore[no-untyped-def]
    """Fills best int64 and is_finite bool, both [num_rows], as best_tokens returns them.

    greatest float32 [num_parts, num_rows or more]: the greatest of each `width` logits of a row, or NaN if there is
    one. The logits, float32 [num_rows, vocab_size] at an address, are only read in the part with the greatest.
    """
    logits = carray(as_pointer(logits_at), (len(best), vocab_size), np.float32)
    for row in range(len(best)):
        part, most = 0, greatest[0, row]
        for other in range(1, len(greatest)):
            if greatest[other, row] > most or (greatest[other, row] != greatest[other, row] and most == most):
                part, most = other, greatest[other, row]
        column, end = part * width, min((part + 1) * width, vocab_size) - 1
        while (
            column < end
            and logits[row, column] != most
            and (most == most or logits[row, column] == logits[row, column])
        ):
            column += 1
        best[row], is_finite[row] = column, np.isfinite(most)


def compile_kernels() -> None:
    """Compiles best_loop and best_of_parts, or loads them from the cache on disk."""
    best_loop()
    one, best, is_finite = np.zeros((1, 1), np.float32), np.empty(1, np.int64), np.empty(1, np.bool_)
    best_of_parts(one, one.ctypes.data, 1, 1, best, is_finite)
