"""Linears and norms of few rows as Triton kernels. Importing this module imports Triton; operators do it when they run.

With few rows a product is as fast as its weights can be read. In both kernels each program reads some rows of the
weights once, with all of their columns. They differ in what they multiply with: vector instructions or tensor cores. An
element is summed in float32, in an order that follows from the variant and the element's feature. A row therefore has
the same bits for any number of rows that one variant serves.

OVERLAPS: the kernel starts while the kernel before it finishes (kernel_overlap.py). No kernel writes weights, so the
first of them may be loaded meanwhile.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def _store(result, where, mask, residual, out, HAS_RESIDUAL: tl.constexpr):
    """Stores a result, rounded as often as by a linear followed by an addition."""
    if HAS_RESIDUAL:
        added = tl.load(residual + where, mask=mask, other=0.0).to(tl.float32)
        result = result.to(out.dtype.element_ty).to(tl.float32) + added
    tl.store(out + where, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_row(
    sums, added, row: tl.constexpr, num_rows, place, residual, out, out_features, HAS_RESIDUAL: tl.constexpr
):  # fmt: skip
    """Stores multiply_few's result for a row, if there is such a row."""
    mask = place < tl.where(num_rows > row, out_features, 0)
    _store(tl.sum(sums, 1) + added, row * out_features + place, mask, residual, out, HAS_RESIDUAL)


@triton.jit
def _fetch(places):
    """Prefetches what is at these places into the device's cache, without waiting."""
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_few(
    x, weight, bias, residual, out, num_rows, out_features, in_features, row_stride,
    MAX_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
    HAS_REST: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of out_features,): out [num_rows, out_features] = x [num_rows, in_features] @ weight.T, by vectors.

    Then bias [out_features] and residual, of out's shape, are added. num_rows is at most MAX_ROWS, which is 1 or 4.
    in_features is at least BLOCK_K; HAS_REST: it is no multiple of BLOCK_K. Each row has its own variable for sums,
    because Triton would move an array of them between threads for every block.
    """
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Unused features and rows repeat the last ones, so that no load needs a mask.
    feature = tl.minimum(place, out_features - 1)
    weights = weight + feature.to(tl.int64)[:, None] * in_features
    lane = tl.arange(0, BLOCK_K)
    x1 = x + tl.minimum(1, num_rows - 1) * row_stride
    x2 = x + tl.minimum(2, num_rows - 1) * row_stride
    x3 = x + tl.minimum(3, num_rows - 1) * row_stride
    block = tl.load(weights + lane[None, :], eviction_policy="evict_first").to(tl.float32)
    if OVERLAPS:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    sums = block * tl.load(x + lane).to(tl.float32)[None, :]
    if MAX_ROWS > 1:
        sums1 = block * tl.load(x1 + lane).to(tl.float32)[None, :]
        sums2 = block * tl.load(x2 + lane).to(tl.float32)[None, :]
        sums3 = block * tl.load(x3 + lane).to(tl.float32)[None, :]
    whole = in_features // BLOCK_K * BLOCK_K
    for start in tl.range(BLOCK_K, whole, BLOCK_K, loop_unroll_factor=UNROLL):
        block = tl.load(weights + start + lane[None, :], eviction_policy="evict_first").to(tl.float32)
        sums += block * tl.load(x + start + lane).to(tl.float32)[None, :]
        if MAX_ROWS > 1:
            sums1 += block * tl.load(x1 + start + lane).to(tl.float32)[None, :]
            sums2 += block * tl.load(x2 + start + lane).to(tl.float32)[None, :]
            sums3 += block * tl.load(x3 + start + lane).to(tl.float32)[None, :]
    if HAS_REST:
        rest = whole + lane
        is_in = rest < in_features
        block = tl.load(weights + rest[None, :], mask=is_in[None, :], other=0.0).to(tl.float32)
        sums += block * tl.load(x + rest, mask=is_in, other=0.0).to(tl.float32)[None, :]
        if MAX_ROWS > 1:
            sums1 += block * tl.load(x1 + rest, mask=is_in, other=0.0).to(tl.float32)[None, :]
            sums2 += block * tl.load(x2 + rest, mask=is_in, other=0.0).to(tl.float32)[None, :]
            sums3 += block * tl.load(x3 + rest, mask=is_in, other=0.0).to(tl.float32)[None, :]
    added = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + feature).to(tl.float32)
    _store_row(sums, added, 0, num_rows, place, residual, out, out_features, HAS_RESIDUAL)
    if MAX_ROWS > 1:
        _store_row(sums1, added, 1, num_rows, place, residual, out, out_features, HAS_RESIDUAL)
        _store_row(sums2, added, 2, num_rows, place, residual, out, out_features, HAS_RESIDUAL)
        _store_row(sums3, added, 3, num_rows, place, residual, out, out_features, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_rows(
    x, weight, bias, residual, out, num_rows, out_features, in_features, row_stride,
    MAX_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_FETCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Like multiply_few, with tensor cores. MAX_ROWS is a power of two, in_features a multiple of BLOCK_K.

    The weights are the left factor: tensor cores take at least 16 or 64 rows of the left factor, and 8 columns of the
    right. Loading a first block of weights before the wait would cost shared memory that the loop's blocks need.
    IS_FETCHED: it is prefetched into the cache instead.
    """
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    feature = tl.minimum(place, out_features - 1)  # unused ones repeat the last
    row = tl.arange(0, MAX_ROWS)
    lane = tl.arange(0, BLOCK_K)
    weights = weight + feature.to(tl.int64)[:, None] * in_features
    # Unused rows are not loaded: all programs would ask for the cache lines of the row that they repeat.
    inputs, is_row = x + row[None, :] * row_stride, (row < num_rows)[None, :]
    # Each program begins at another block: otherwise all would ask for the same lines of x at once.
    first = tl.program_id(0) % (in_features // BLOCK_K) * BLOCK_K
    if OVERLAPS:
        if IS_FETCHED:  # one address per cache line of 64 numbers
            _fetch(weights + first + (tl.arange(0, BLOCK_K // 64) * 64)[None, :])
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    sums = tl.zeros([BLOCK_N, MAX_ROWS], tl.float32)
    for done in range(0, in_features, BLOCK_K):
        start = first + done
        start = tl.where(start < in_features, start, start - in_features)
        block = tl.load(weights + start + lane[None, :])
        sums = tl.dot(block, tl.load(inputs + start + lane[:, None], mask=is_row, other=0.0), sums)
    if HAS_BIAS:
        sums += tl.load(bias + feature).to(tl.float32)[:, None]
    mask = is_row & (place < out_features)[:, None]
    _store(sums, row[None, :] * out_features + place[:, None], mask, residual, out, HAS_RESIDUAL)


@triton.jit
def normalise(x, scale, out, dim, eps, row_stride, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Grid (rows,): out [rows, dim] = x / rms(x) * scale [dim], rounded once."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    mask = lane < dim
    scales = tl.load(scale + lane, mask=mask, other=0.0)
    if OVERLAPS:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    values = tl.load(x + row.to(tl.int64) * row_stride + lane, mask=mask, other=0.0).to(tl.float32)
    result = values * tl.rsqrt(tl.sum(values * values) / dim + eps) * scales
    tl.store(out + row.to(tl.int64) * dim + lane, result.to(out.dtype.element_ty), mask=mask)
