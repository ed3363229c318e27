"""Multiplies a step's rows by packed weights, and processes the results while they are in a core's cache."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from typing import Any

import numpy as np

from batchserve.attention.matrix_code import compiles_matrices
from batchserve.native.addresses import claim
from batchserve.native.elements import narrow
from batchserve.native.jit import njit
from batchserve.native.vector_code import multiplies_pairs
from batchserve.program import function_code, tile_code
from batchserve.program.expert_operations import tiles_of
from batchserve.program.instructions import (
    ADDS,
    BEST,
    BIAS,
    BIAS_2,
    BLOCK,
    BY_BEST,
    BY_BLOCK,
    BY_EXPERT,
    BY_OUT,
    BY_X,
    COLUMNS,
    FACTORS,
    FEW_ROWS,
    FUNCTION,
    K_CHUNK,
    KERNEL,
    NEXT,
    NUM_WORDS,
    OUT,
    OUT_IS_BF16,
    PER_ROW,
    ROW_CHUNK,
    SIZE,
    WEIGHT,
    WEIGHT_2,
    X_PRIVATE,
    Function,
    Kernel,
    X,
    Y,
)
from batchserve.program.pieces import bf16_at, floats_at, numbers_at, words_at
from batchserve.program.product_code import BLOCKS_AT_ONCE, ROWS_AT_ONCE, multiply

PANEL, TILE_PANEL = BLOCKS_AT_ONCE * BLOCK, tile_code.BLOCKS_AT_ONCE * BLOCK
BY_SUM = 4 * max(PANEL, TILE_PANEL)
SCRATCH_BYTES = 2 * ROW_CHUNK * BY_SUM
UINT16 = np.uint16(0)
INFINITY = np.int32(0x7F800000)  # bits of a float32


def _loop(num_rows: int, num_blocks: int, kernel: Kernel) -> Any:
    inner = multiply(num_rows, num_blocks, kernel)

    @njit(nogil=True)
    def loop(x, by_x, weight, by_block, num_words, sums):  # type: ignore[no-untyped-def]
        inner(x, by_x, weight, by_block, num_words, sums, BY_SUM)

    return loop


def _of_blocks(kernel: Kernel, num_blocks: int) -> Any:
    """Returns a function: sums += x times num_blocks blocks of weights, for any number of rows."""
    eight, four, two, one = (_loop(count, num_blocks, kernel) for count in (ROWS_AT_ONCE, 4, 2, 1))

    @njit(nogil=True)
    def multiplied(num_rows, x, by_x, weight, by_block, num_words, sums):  # type: ignore[no-untyped-def]
        row = 0
        while num_rows - row >= ROWS_AT_ONCE:
            eight(x + row * by_x, by_x, weight, by_block, num_words, sums + row * BY_SUM)
            row += ROWS_AT_ONCE
        if num_rows - row >= 4:
            four(x + row * by_x, by_x, weight, by_block, num_words, sums + row * BY_SUM)
            row += 4
        if num_rows - row >= 2:
            two(x + row * by_x, by_x, weight, by_block, num_words, sums + row * BY_SUM)
            row += 2
        if num_rows - row >= 1:
            one(x + row * by_x, by_x, weight, by_block, num_words, sums + row * BY_SUM)

    return multiplied


def _of_kernel(kernel: Kernel) -> Any:
    """Returns the same function for a number of blocks that is only known at run time."""
    one, most = _of_blocks(kernel, 1), _of_blocks(kernel, BLOCKS_AT_ONCE)

    @njit(nogil=True)
    def multiplied(num_blocks, num_rows, x, by_x, weight, by_block, num_words, sums):  # type: ignore[no-untyped-def]
        if num_blocks == BLOCKS_AT_ONCE:
            most(num_rows, x, by_x, weight, by_block, num_words, sums)
        else:
            for block in range(num_blocks):
                at = sums + 4 * BLOCK * block
                one(num_rows, x, by_x, weight + block * by_block, by_block, num_words, at)

    return multiplied


@njit(nogil=True, cache=True)
def _in_tiles(num_blocks, num_rows, x, by_x, weight, by_block, num_words, sums):  # type: ignore[no-untyped-def]
    tile_code.multiply(num_blocks, num_rows, x, by_x, weight, by_block, num_words, sums, BY_SUM)


# The kernel for bfloat16 weights on this machine. PAIRS and TILES take bfloat16 rows.
BF16_KERNEL = Kernel.TILES if compiles_matrices() else Kernel.PAIRS if multiplies_pairs() else Kernel.WIDENED
_FLOATS = _of_kernel(Kernel.FLOATS)
_HALVES = _in_tiles if BF16_KERNEL == Kernel.TILES else _of_kernel(BF16_KERNEL)


def kernel_of(dtype: str) -> Kernel:
    """Returns the kernel for weights of a type on this machine."""
    return Kernel.FLOATS if dtype == "float32" else BF16_KERNEL


@njit(nogil=True, cache=True)
def columns_at_once(kernel):  # type: ignore[no-untyped-def]
    """Returns the number of columns that a thread takes at once."""
    return TILE_PANEL if kernel == Kernel.TILES else PANEL


@njit(nogil=True, cache=True)
def activate(function, address, count):  # type: ignore[no-untyped-def]
    """Applies a function to `count` float32 in place; changes up to WIDTH - 1 more."""
    if function == Function.SILU:
        _SILU(address, count)
    elif function == Function.GELU:
        _GELU(address, count)
    elif function == Function.GELU_TANH:
        _GELU_TANH(address, count)
    elif function == Function.RELU:
        _RELU(address, count)
    elif function == Function.SIGMOID:
        _SIGMOID(address, count)
    elif function == Function.TANH:
        _TANH(address, count)
    elif function == Function.QUICK_GELU:
        _QUICK_GELU(address, count)


_SILU = function_code.apply(Function.SILU)
_GELU = function_code.apply(Function.GELU)
_GELU_TANH = function_code.apply(Function.GELU_TANH)
_RELU = function_code.apply(Function.RELU)
_SIGMOID = function_code.apply(Function.SIGMOID)
_TANH = function_code.apply(Function.TANH)
_QUICK_GELU = function_code.apply(Function.QUICK_GELU)


@njit(nogil=True, cache=True)
def _add_bias(bias, first, count, num_rows, sums):  # type: ignore[no-untyped-def]
    """Adds a bias to all rows. first: the column, counted from the first column of the first expert."""
    if bias == 0:
        return
    added = floats_at(bias + 4 * first, count)
    for row in range(num_rows):
        values = floats_at(sums + row * BY_SUM, count)
        for j in range(count):
            values[j] += added[j]


@njit(nogil=True, cache=True)
def _finish(op, expert, first, count, num_rows, row, sums, gated):  # type: ignore[no-untyped-def]
    """Applies bias, function, gate, factor and cap to sums, and writes them to OUT or adds them to it."""
    factors = op.view(np.float32)[2 * FACTORS : 2 * FACTORS + 2]
    factor, cap = factors[0], factors[1]
    _add_bias(op[BIAS], expert * op[COLUMNS] + first, count, num_rows, sums)
    if gated != 0:
        _add_bias(op[BIAS_2], expert * op[COLUMNS] + first, count, num_rows, gated)
    for i in range(num_rows):
        values = floats_at(sums + i * BY_SUM, count)
        activate(op[FUNCTION], sums + i * BY_SUM, count)
        if gated != 0:
            others = floats_at(gated + i * BY_SUM, count)
            for j in range(count):
                values[j] *= others[j]
        if factor != 1.0:
            for j in range(count):
                values[j] *= factor
        if cap > 0.0:
            for j in range(count):
                values[j] /= cap
            activate(Function.TANH, sums + i * BY_SUM, count)
            for j in range(count):
                values[j] *= cap
        out = op[OUT] + (row + i) * op[BY_OUT]
        if op[OUT_IS_BF16] != 0:
            halves = bf16_at(out + 2 * first, count)
            for j in range(count):
                halves[j] = narrow(values[j], UINT16)
        else:
            wholes = floats_at(out + 4 * first, count)
            if op[BEST] != 0:
                panel = first // columns_at_once(op[KERNEL])
                _note_best(sums + i * BY_SUM, count, op[BEST] + panel * op[BY_BEST] + 4 * (row + i))
            if op[ADDS] != 0:
                for j in range(count):
                    wholes[j] += values[j]
            else:
                for j in range(count):
                    wholes[j] = values[j]


@njit(nogil=True, cache=True)
def _note_best(address, count, out):  # type: ignore[no-untyped-def]
    """Writes the maximum of `count` float32 at an address to `out`, or a NaN if there is one.

    Compares integer keys, which are made of a number's bits and ascend with it: compilers vectorise only integers here.
    """
    bits = words_at(address, count)
    least, most = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for j in range(count):
        key = np.int32(bits[j] ^ np.int32(np.int32(bits[j] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        least, most = min(least, key), max(most, key)
    if most > INFINITY or least < ~INFINITY:
        most = np.int32(INFINITY + 1)
    words_at(out, 1)[0] = np.int32(most ^ np.int32(np.int32(most >> np.int32(31)) & np.int32(0x7FFFFFFF)))


def _panel_of(multiplied: Any, bytes_of_word: int) -> Any:
    """Returns a function: sums = x times some column blocks. bytes_of_word: in x, for each word of a weight."""

    @njit(nogil=True)
    def panel(op, weight, first_block, num_blocks, num_rows, x, sums):  # type: ignore[no-untyped-def]
        zeros = floats_at(sums, num_rows * (BY_SUM // 4))
        for i in range(len(zeros)):
            zeros[i] = 0.0
        for first in range(0, op[NUM_WORDS], K_CHUNK):  # in pieces of k that stay in the core's cache for all rows
            count = min(K_CHUNK, op[NUM_WORDS] - first)
            piece = weight + first_block * op[BY_BLOCK] + first * 4 * BLOCK
            at = x + first * bytes_of_word
            multiplied(num_blocks, num_rows, at, op[BY_X], piece, op[BY_BLOCK], count, sums)

    return panel


def _product_of(panel: Any) -> Any:
    """Returns a function: OUT = x times WEIGHT, or function(x times WEIGHT) * (x times WEIGHT_2).

    A pair uses its expert's weights.
    """

    @njit(nogil=True)
    def product(op, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
        columns, by_panel = op[COLUMNS], columns_at_once(op[KERNEL])
        num_panels = (columns + by_panel - 1) // by_panel
        is_paired = op[PER_ROW] > 0
        tiles = tiles_of(op[Y], num_rows) if is_paired else numbers_at(op.ctypes.data, 0).reshape((0, 3))
        num_chunks = len(tiles) if is_paired else (num_rows + ROW_CHUNK - 1) // ROW_CHUNK
        x = op[X] + (thread * op[X_PRIVATE] if num_rows <= FEW_ROWS else 0)
        gated = scratch + ROW_CHUNK * BY_SUM if op[WEIGHT_2] != 0 else 0
        while True:
            unit = claim(op.ctypes.data + NEXT * 8)
            if unit >= num_panels * num_chunks:
                break
            first, chunk, expert = unit // num_chunks * by_panel, unit % num_chunks, 0
            if is_paired:
                expert, row, rows = tiles[chunk, 0], tiles[chunk, 1], tiles[chunk, 2]
            else:
                row, rows = chunk * ROW_CHUNK, min(ROW_CHUNK, num_rows - chunk * ROW_CHUNK)
            count = min(by_panel, columns - first)
            num_blocks = (count + BLOCK - 1) // BLOCK
            at = x + row * op[BY_X]
            by_expert = expert * op[BY_EXPERT]
            panel(op, op[WEIGHT] + by_expert, first // BLOCK, num_blocks, rows, at, scratch)
            if gated != 0:
                panel(op, op[WEIGHT_2] + by_expert, first // BLOCK, num_blocks, rows, at, gated)
            _finish(op, expert, first, count, rows, row, scratch, gated)

    return product


_OF_FLOATS = _product_of(_panel_of(_FLOATS, 4))
_OF_HALVES = _product_of(_panel_of(_HALVES, 8 if BF16_KERNEL == Kernel.WIDENED else 4))


def multiply_floats(op_at, step_at, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """A product by float32 weights."""
    _OF_FLOATS(numbers_at(op_at, SIZE), num_rows, thread, scratch)


def multiply_halves(op_at, step_at, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """A product by bfloat16 weights."""
    _OF_HALVES(numbers_at(op_at, SIZE), num_rows, thread, scratch)
