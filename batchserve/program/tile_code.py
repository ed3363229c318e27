"""Multiplies bfloat16 rows by packed weights in tiles (AMX): 16 rows by 16 columns at once.

A run of 16 packed words is a tile of weights as it lies in memory. An output is summed in one chain in the order of k,
whatever other rows and columns are computed with it. Rows after the last one are also read and computed, up to a whole
tile; their results are ignored.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from batchserve.attention import matrix_code
from batchserve.attention.matrix_code import ROW_BYTES, TILE, begin_tiles, register_number
from batchserve.native.jit import njit
from batchserve.native.vector_code import Builder, Value, index
from batchserve.program.instructions import BLOCK
from batchserve.program.product_code import prefetch

BLOCKS_AT_ONCE = 4  # with one row tile; with two, half as many, and each tile of weights is used twice
TILE_BYTES = TILE * ROW_BYTES
AHEAD = 4  # steps that weights are prefetched ahead
_POINTER = ir.PointerType()


@functools.cache
def _multiply(num_row_tiles: int, num_blocks: int) -> Any:
    """Returns an intrinsic: sums += x times weights, over num_steps times TILE words of k.

    x: the address of bfloat16 rows, by_row bytes apart. weights: the address of the first block's words, by_block
    bytes apart. sums: the address of float32 rows, by_sum bytes apart. All are int64.
    """
    first_x, first_weight = num_row_tiles * num_blocks, num_row_tiles * num_blocks + num_row_tiles
    num_spare = 8 - first_weight  # tiles that weights use in turn

    @intrinsic
    def multiplied(typing_context, x, by_row, weights, by_block, num_steps, sums, by_sum):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            x, by_row, weights, by_block, num_steps, sums, by_sum = arguments

            def move(name: str) -> None:
                for row in range(num_row_tiles):
                    for block in range(num_blocks):
                        offset = builder.add(builder.mul(by_sum, index(TILE * row)), index(4 * BLOCK * block))
                        _move(builder, name, row * num_blocks + block, builder.add(sums, offset), by_sum)

            move("tileloadd64")
            with cgutils.for_range(builder, num_steps) as loop:
                at_x, at_weight = (builder.mul(loop.index, index(size)) for size in (ROW_BYTES, TILE_BYTES))
                for row in range(num_row_tiles):
                    start = builder.add(builder.add(x, at_x), builder.mul(by_row, index(TILE * row)))
                    _move(builder, "tileloadd64", first_x + row, start, by_row)
                for block in range(num_blocks):
                    start = builder.add(builder.add(weights, at_weight), builder.mul(by_block, index(block)))
                    for line in range(0, TILE_BYTES, ROW_BYTES):
                        prefetch(builder, _pointer(builder, builder.add(start, index(AHEAD * TILE_BYTES + line))))
                    own = first_weight + block % num_spare
                    _move(builder, "tileloadd64", own, start, index(ROW_BYTES))
                    for row in range(num_row_tiles):
                        registers = (row * num_blocks + block, first_x + row, own)
                        matrix_code.call(builder, "tdpbf16ps", *map(register_number, registers))
            move("tilestored64")
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return multiplied


def _pointer(builder: Builder, address: Value) -> Value:
    return builder.inttoptr(address, _POINTER)


def _move(builder: Builder, name: str, register: int, address: Value, by_row: Value) -> None:
    matrix_code.call(builder, name, register_number(register), _pointer(builder, address), by_row)


def _loop(num_row_tiles: int, num_blocks: int) -> Any:
    inner = _multiply(num_row_tiles, num_blocks)

    @njit(nogil=True)
    def loop(x, by_x, weight, by_block, num_steps, sums, by_sum):  # type: ignore[no-untyped-def]
        inner(x, by_x, weight, by_block, num_steps, sums, by_sum)

    return loop


_ONE, _TWO, _THREE, _FOUR = (_loop(1, count) for count in range(1, BLOCKS_AT_ONCE + 1))
_TWO_BY_ONE, _TWO_BY_TWO = _loop(2, 1), _loop(2, 2)


@njit(nogil=True, cache=True)
def multiply(num_blocks, num_rows, x, by_x, weight, by_block, num_words, sums, by_sum):  # type: ignore[no-untyped-def]
    """sums += x times up to BLOCKS_AT_ONCE blocks of weights; num_words is a multiple of TILE."""
    begin_tiles()
    num_steps, row = num_words // TILE, 0
    while num_rows - row > TILE:
        at, to, block = x + row * by_x, sums + row * by_sum, 0
        while num_blocks - block >= 2:
            _TWO_BY_TWO(at, by_x, weight + block * by_block, by_block, num_steps, to + 4 * BLOCK * block, by_sum)
            block += 2
        if block < num_blocks:
            _TWO_BY_ONE(at, by_x, weight + block * by_block, by_block, num_steps, to + 4 * BLOCK * block, by_sum)
        row += 2 * TILE
    if row < num_rows:
        at, to = x + row * by_x, sums + row * by_sum
        if num_blocks == 1:
            _ONE(at, by_x, weight, by_block, num_steps, to, by_sum)
        elif num_blocks == 2:
            _TWO(at, by_x, weight, by_block, num_steps, to, by_sum)
        elif num_blocks == 3:
            _THREE(at, by_x, weight, by_block, num_steps, to, by_sum)
        else:
            _FOUR(at, by_x, weight, by_block, num_steps, to, by_sum)
