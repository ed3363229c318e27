"""Linears of few rows, by our own kernels where these were measured to be faster than torch's.

The product is a torch operator, so that a compiler of the model does not look into it. The choice of kernel depends
only on the numbers of rows and features, because a CUDA graph repeats what was launched when it was captured.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.nn import functional

from batchserve.kernel_overlap import launch_options

DTYPES = (torch.bfloat16, torch.float16)
ROW_COUNTS = (1, 4, 16, 32, 64)  # each serves numbers of rows above the previous one, up to itself
MAX_VECTOR_ROWS = 4
MIN_MATRIX_ROWS = 16  # the fewest that tensor cores are given


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to multiply: each program takes block_n rows of the weights, in blocks of block_k columns.

    num_stages: blocks in flight; for vectors, the unroll factor of the loop over blocks. is_fetched: if kernels
    overlap, the first block is prefetched into the cache before the kernel waits (not for vectors, which have loaded it
    by then).
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    by_vectors: bool = False
    is_fetched: bool = False


class Shape(NamedTuple):
    """The shape and dtype of weights, for which a kernel is chosen."""

    out_features: int
    in_features: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: torch.Tensor) -> Shape:
        return cls(weight.shape[0], weight.shape[1], weight.dtype)


# The candidates. Each start times them and takes the fastest for each shape and number of rows.
BY_VECTORS = tuple(Variant(*sizes, by_vectors=True) for sizes in ((4, 512, 4, 2), (4, 1024, 4, 4), (2, 1024, 4, 2)))
FETCHED = ((64, 128, 4, 6), (32, 128, 2, 6), (32, 256, 4, 5), (128, 64, 4, 6))
BY_MATRICES = (
    *(Variant(*sizes) for sizes in (*FETCHED, (64, 64, 4, 8), (128, 128, 8, 3))),
    *(Variant(*sizes, is_fetched=True) for sizes in FETCHED),
)


def variants(shape: Shape, count: int, *, overlaps: bool) -> list[Variant]:
    """Returns the variants worth a trial that can multiply up to `count` rows, one of ROW_COUNTS."""
    if shape.dtype not in DTYPES:
        return []
    vectors = [each for each in BY_VECTORS if count <= MAX_VECTOR_ROWS and each.block_k <= shape.in_features]
    matrices = [each for each in BY_MATRICES if count > 1 and shape.in_features % each.block_k == 0]
    return vectors + [each for each in matrices if overlaps or not each.is_fetched]


# An operator takes only tensors and numbers, so Choices are passed by number.
_choices: WeakValueDictionary[int, Choices] = WeakValueDictionary()
_numbers = itertools.count()


class Choices:
    """The variant to use for each shape and each of ROW_COUNTS; None: torch's own product.

    overlaps: kernels start while their predecessors finish (kernel_overlap.py).
    """

    def __init__(self, *, overlaps: bool = False) -> None:
        self._chosen: dict[Shape, tuple[Variant | None, ...]] = {}
        self.overlaps = overlaps
        self.number = next(_numbers)
        _choices[self.number] = self

    def set(self, shape: Shape, chosen: tuple[Variant | None, ...]) -> None:
        self._chosen[shape] = chosen

    def variant(self, shape: Shape, num_rows: int) -> Variant | None:
        chosen = self._chosen.get(shape)
        return None if chosen is None or not 0 < num_rows <= ROW_COUNTS[-1] else chosen[_row_class(num_rows)]


def _row_class(num_rows: int) -> int:
    """Returns the index in ROW_COUNTS."""
    return bisect_left(ROW_COUNTS, num_rows)


def multiply(
    variant: Variant,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    overlaps: bool = False,
) -> torch.Tensor:
    """Returns x [rows, in_features] @ weight.T + bias + residual for 1 to ROW_COUNTS[-1] rows; weight is contiguous."""
    from batchserve.gpu import kernels

    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, (out_features, in_features) = x.shape[0], weight.shape
    out = x.new_empty(num_rows, out_features)
    tensors = (x, weight, weight if bias is None else bias, out if residual is None else residual.contiguous(), out)
    numbers = (num_rows, out_features, in_features, x.stride(0))
    most_rows = ROW_COUNTS[_row_class(num_rows)]
    constants = {
        "BLOCK_N": variant.block_n,
        "BLOCK_K": variant.block_k,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "num_warps": variant.num_warps,
        "enable_fp_fusion": True,
        **launch_options(overlaps=overlaps),
    }
    grid = (-(-out_features // variant.block_n),)
    if variant.by_vectors:
        loop = {"UNROLL": variant.num_stages, "HAS_REST": in_features % variant.block_k != 0}
        kernels.multiply_few[grid](*tensors, *numbers, MAX_ROWS=most_rows, **loop, **constants)
    else:
        loop = {"IS_FETCHED": variant.is_fetched, "num_stages": variant.num_stages}
        least = max(most_rows, MIN_MATRIX_ROWS)
        kernels.multiply_rows[grid](*tensors, *numbers, MAX_ROWS=least, **loop, **constants)
    return out


def _row_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, choices: int
) -> torch.Tensor:
    """Returns x [..., in_features] @ weight.T + bias + residual; residual has the result's shape."""
    out_features, in_features = weight.shape
    of_engine = _choices[choices]
    variant = of_engine.variant(Shape.of(weight), x.numel() // in_features)
    if variant is None:
        out = functional.linear(x, weight, bias)
        return out if residual is None else out.add_(residual)
    rows = None if residual is None else residual.reshape(-1, out_features)
    out = multiply(variant, x.reshape(-1, in_features), weight, bias, rows, overlaps=of_engine.overlaps)
    return out.view(*x.shape[:-1], out_features)


product_op = torch.library.custom_op(
    "batchserve::row_product",
    _row_product,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int choices) -> Tensor",
)


@product_op.register_fake
def _shape_of(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, choices: int
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class RowLinear(torch.nn.Module):
    """Replaces a linear and keeps its weights."""

    def __init__(self, linear: torch.nn.Linear, choices: Choices) -> None:
        super().__init__()
        self._choices = choices  # kept alive here: the table has a weak reference
        self._number = choices.number
        self.weight, self.bias = linear.weight, linear.bias
        self.out_features, self.in_features = linear.out_features, linear.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.batchserve.row_product(x, self.weight, self.bias, None, self._number)
        return out
