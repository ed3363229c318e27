"""Products of a step's rows with packed weights, and what is done with the results while they are in a core's cache."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from batchserve.addresses import as_pointer, claim
from batchserve.elements import narrow
from batchserve.native import njit
from batchserve.program import function_code
from batchserve.program.instructions import (
    ADDS,
    BIAS,
    BIAS_2,
    BY_BLOCK,
    BY_OUT,
    BY_X,
    COLUMNS,
    FACTORS,
    FEW_ROWS,
    FUNCTION,
    IN_WORD,
    INPUTS,
    K_CHUNK,
    NEXT,
    OUT,
    OUT_IS_HALF,
    ROW_CHUNK,
    WEIGHT,
    WEIGHT_2,
    X_PRIVATE,
    Function,
    X,
)
from batchserve.program.packing import BLOCK
from batchserve.program.product_code import BLOCKS_AT_ONCE, ROWS_AT_ONCE, multiply

PANEL = BLOCKS_AT_ONCE * BLOCK  # columns that one thread takes at once
BY_SUM = 4 * PANEL
SCRATCH_BYTES = 2 * ROW_CHUNK * BY_SUM
UINT16 = np.uint16(0)


def _loop(num_rows: int, num_blocks: int, in_word: int) -> Any:
    inner = multiply(num_rows, num_blocks, in_word)

    @njit(nogil=True)
    def loop(x, by_x, weight, by_block, num_words, sums):  # type: ignore[no-untyped-def]
        inner(x, by_x, weight, by_block, num_words, sums, BY_SUM)

    return loop


def _of_blocks(in_word: int, num_blocks: int) -> Any:
    """sums += x times one to three blocks of weights, for any number of rows."""
    eight, four = _loop(ROWS_AT_ONCE, num_blocks, in_word), _loop(4, num_blocks, in_word)
    two, one = _loop(2, num_blocks, in_word), _loop(1, num_blocks, in_word)

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


def _of_words(in_word: int) -> Any:
    """The same, for a number of blocks that is known when it runs."""
    one, two, three = (_of_blocks(in_word, min(count, BLOCKS_AT_ONCE)) for count in (1, 2, 3))

    @njit(nogil=True)
    def multiplied(num_blocks, num_rows, x, by_x, weight, by_block, num_words, sums):  # type: ignore[no-untyped-def]
        if num_blocks == 1:
            one(num_rows, x, by_x, weight, by_block, num_words, sums)
        elif num_blocks == 2:
            two(num_rows, x, by_x, weight, by_block, num_words, sums)
        else:
            three(num_rows, x, by_x, weight, by_block, num_words, sums)

    return multiplied


_FULL, _HALF = _of_words(1), _of_words(2)


@njit(nogil=True, cache=True)
def _panel(op, weight, first_block, num_blocks, num_rows, x, sums):  # type: ignore[no-untyped-def]
    """sums = x times some column blocks. By pieces of k, which stay in the core's cache for all of the rows."""
    in_word = op[IN_WORD]
    num_words = (op[INPUTS] + in_word - 1) // in_word
    zeros = carray(as_pointer(sums), num_rows * PANEL, np.float32)
    for i in range(len(zeros)):
        zeros[i] = 0.0
    for first in range(0, num_words, K_CHUNK):
        count = min(K_CHUNK, num_words - first)
        piece = weight + first_block * op[BY_BLOCK] + first * 4 * BLOCK
        at = x + first * 4 * in_word
        if in_word == 2:
            _HALF(num_blocks, num_rows, at, op[BY_X], piece, op[BY_BLOCK], count, sums)
        else:
            _FULL(num_blocks, num_rows, at, op[BY_X], piece, op[BY_BLOCK], count, sums)


@njit(nogil=True, cache=True)
def activate(function, address, count):  # type: ignore[no-untyped-def]
    """The function of `count` float32, in place; up to WIDTH - 1 more are changed, too."""
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
    if bias == 0:
        return
    added = carray(as_pointer(bias + 4 * first), count, np.float32)
    for row in range(num_rows):
        values = carray(as_pointer(sums + row * BY_SUM), count, np.float32)
        for j in range(count):
            values[j] += added[j]


@njit(nogil=True, cache=True)
def _finish(op, first, count, num_rows, row, sums, gated):  # type: ignore[no-untyped-def]
    """From sums to OUT: bias, function, what the function gates, factor, cap, and what is added to."""
    factors = op.view(np.float32)[2 * FACTORS : 2 * FACTORS + 2]
    factor, cap = factors[0], factors[1]
    _add_bias(op[BIAS], first, count, num_rows, sums)
    if gated != 0:
        _add_bias(op[BIAS_2], first, count, num_rows, gated)
    for i in range(num_rows):
        values = carray(as_pointer(sums + i * BY_SUM), count, np.float32)
        activate(op[FUNCTION], sums + i * BY_SUM, count)
        if gated != 0:
            others = carray(as_pointer(gated + i * BY_SUM), count, np.float32)
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
        if op[OUT_IS_HALF] != 0:
            halves = carray(as_pointer(out + 2 * first), count, np.uint16)
            for j in range(count):
                halves[j] = narrow(values[j], UINT16)
        else:
            wholes = carray(as_pointer(out + 4 * first), count, np.float32)
            if op[ADDS] != 0:
                for j in range(count):
                    wholes[j] += values[j]
            else:
                for j in range(count):
                    wholes[j] = values[j]


@njit(nogil=True, cache=True)
def product(op, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """OUT = x times WEIGHT, or function(x times WEIGHT) * (x times WEIGHT_2)."""
    columns = op[COLUMNS]
    num_panels = (columns + PANEL - 1) // PANEL
    num_chunks = (num_rows + ROW_CHUNK - 1) // ROW_CHUNK
    x = op[X] + (thread * op[X_PRIVATE] if num_rows <= FEW_ROWS else 0)
    gated = scratch + ROW_CHUNK * BY_SUM if op[WEIGHT_2] != 0 else 0
    while True:
        unit = claim(op.ctypes.data + NEXT * 8)
        if unit >= num_panels * num_chunks:
            break
        panel, row = unit // num_chunks, unit % num_chunks * ROW_CHUNK
        rows, first = min(ROW_CHUNK, num_rows - row), panel * PANEL
        count = min(PANEL, columns - first)
        num_blocks = (count + BLOCK - 1) // BLOCK
        at = x + row * op[BY_X]
        _panel(op, op[WEIGHT], panel * BLOCKS_AT_ONCE, num_blocks, rows, at, scratch)
        if gated != 0:
            _panel(op, op[WEIGHT_2], panel * BLOCKS_AT_ONCE, num_blocks, rows, at, gated)
        _finish(op, first, count, rows, row, scratch, gated)
