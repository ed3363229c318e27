"""Moves accepted K/V rows into place, in one compiled call for all requests of a step."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np
from numba import carray

from batchserve.native.addresses import as_pointer
from batchserve.native.jit import njit

UNIT = np.dtype(np.uint16)  # the unit of copying: K/V of every dtype is a multiple of it


@njit(nogil=True, cache=True)
def move_rows(slabs, planes, starts, rows):  # type: ignore[no-untyped-def]
    """Moves, in slab i, the rows rows[starts[i]] to rows[starts[i + 1] - 1] to right after its committed tokens.

    slabs int64 [num_slabs, 3]: where the addresses of its planes are, its capacity, and its number of committed tokens,
    from which rows are counted. planes int64 [num_planes, 2]: heads, and units per token. A slab's rows ascend, so none
    is overwritten before it has moved.
    """
    for i in range(len(slabs)):
        capacity, committed = slabs[i, 1], slabs[i, 2]
        addresses = carray(as_pointer(slabs[i, 0]), len(planes), np.int64)
        for p in range(len(planes)):
            heads, size = planes[p]
            plane = carray(as_pointer(addresses[p]), (heads, capacity, size), np.uint16)
            for h in range(heads):
                for j in range(starts[i], starts[i + 1]):
                    source, target = committed + rows[j], committed + j - starts[i]
                    if source != target:
                        for k in range(size):
                            plane[h, target, k] = plane[h, source, k]


def compile_kernels() -> None:
    """Compiles move_rows, or loads it from the cache on disk."""
    plane = np.zeros(2, UNIT)
    addresses = np.array([plane.ctypes.data])
    slab, shape = np.array([[addresses.ctypes.data, 2, 0]]), np.ones((1, 2), np.int64)
    move_rows(slab, shape, np.array([0, 1]), np.array([1]))
