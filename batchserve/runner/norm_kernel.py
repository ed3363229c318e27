"""RMS norm of a step's rows in compiled code: torch's is several kernels, which at few rows is a tenth of a small step.

A row's sum is taken in the same order whatever other rows there are, so its bits do not depend on them.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import carray, types

from batchserve.addresses import as_pointer
from batchserve.elements import narrow, widen
from batchserve.native import cfunc, njit

if TYPE_CHECKING:
    from collections.abc import Callable

# Sums in lanes: the order differs from the written one, but is the same for every row.
LANES = {"reassoc", "contract"}


@njit(cache=True, nogil=True, fastmath=LANES)
def _normalise(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """x and out [num_rows, dim], float32 or the bits of bfloat16, which are rounded once; weight float32 [dim]."""
    dim = x.shape[1]
    for i in range(x.shape[0]):
        total = np.float32(0.0)
        for j in range(dim):
            total += widen(x[i, j]) * widen(x[i, j])
        scale = np.float32(1.0) / np.sqrt(total / np.float32(dim) + eps)
        for j in range(dim):
            out[i, j] = narrow(widen(x[i, j]) * scale * weight[j], x[i, j])


# Of addresses: x and out [num_rows, dim], the weight; num_rows, dim, eps. Numba's own way from arrays into compiled
# code takes twice as long as the norm of a few rows.
_SIGNATURE = types.void(*[types.int64] * 5, types.float32)


@functools.cache
def _loop(element: str) -> Callable[..., None]:
    """The compiled norm of "uint16" (bfloat16) or "float32"; made when it is needed, as compiling takes a moment."""
    dtype = np.dtype(element)

    @cfunc(_SIGNATURE, nopython=True, cache=True)
    def normalise(x_at, out_at, weight_at, num_rows, dim, eps):  # type: ignore[no-untyped-def]
        x, out = carray(as_pointer(x_at), (num_rows, dim), dtype), carray(as_pointer(out_at), (num_rows, dim), dtype)
        _normalise(x, carray(as_pointer(weight_at), dim, np.float32), eps, out)

    compiled: Any = normalise
    return compiled.ctypes  # type: ignore[no-any-return]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; x float32 or bfloat16 on a CPU, weight float32 and contiguous."""
    x, dim = x.contiguous(), len(weight)
    out = torch.empty_like(x)
    normalise = _loop("uint16" if x.dtype == torch.bfloat16 else "float32")
    normalise(x.data_ptr(), out.data_ptr(), weight.data_ptr(), x.numel() // dim, dim, eps)
    return out
