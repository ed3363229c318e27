"""Accesses memory by address, and claims rows of an instruction for a thread."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np
from numba import carray

from batchserve.native.addresses import as_pointer, claim
from batchserve.native.jit import njit
from batchserve.program.instructions import NEXT

ROWS_AT_ONCE = 4  # rows that a thread claims


@njit(nogil=True, cache=True)
def floats_at(address, count):  # type: ignore[no-untyped-def]
    return carray(as_pointer(address), count, np.float32)


@njit(nogil=True, cache=True)
def bf16_at(address, count):  # type: ignore[no-untyped-def]
    """Returns an array of bfloat16 bits."""
    return carray(as_pointer(address), count, np.uint16)


@njit(nogil=True, cache=True)
def words_at(address, count):  # type: ignore[no-untyped-def]
    return carray(as_pointer(address), count, np.int32)


@njit(nogil=True, cache=True)
def numbers_at(address, count):  # type: ignore[no-untyped-def]
    return carray(as_pointer(address), count, np.int64)


@njit(nogil=True, cache=True)
def claim_rows(op, num_rows):  # type: ignore[no-untyped-def]
    """Claims rows that no other thread computes and returns (first, end); first >= num_rows if none are left."""
    first = claim(op.ctypes.data + NEXT * 8) * ROWS_AT_ONCE
    return first, min(num_rows, first + ROWS_AT_ONCE)
