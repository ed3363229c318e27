"""Finds the likeliest token of every row of logits."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np
from numba import carray

from batchserve.native.addresses import as_pointer
from batchserve.native.jit import njit


def best_tokens(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int64, bool), both [num_rows]: the place of each row's greatest logit, the first of equals, and whether
    that is finite. logits: float32 [num_rows, vocab_size]. A NaN is above all numbers.
    """
    best = logits.argmax(axis=-1)
    return best, np.isfinite(logits[np.arange(len(logits)), best])


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
    """Compiles best_of_parts, or loads it from the cache on disk."""
    one, best, is_finite = np.zeros((1, 1), np.float32), np.empty(1, np.int64), np.empty(1, np.bool_)
    best_of_parts(one, one.ctypes.data, 1, 1, best, is_finite)
