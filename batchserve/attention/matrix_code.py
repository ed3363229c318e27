"""Matrix instructions (AMX) for Numba's compiler, and the arithmetic of attention with them.

A tile is 16 rows of 64 bytes: of 16 float32, or of 16 pairs of bfloat16. A product takes its second factor in pairs of
rows, element by element. Keys as stored in memory are a first factor, so scores come out transposed. Values as stored
are pairs of columns instead. Their even columns are therefore multiplied by weights paired with zeros, and their odd
columns by zeros paired with weights. A query is a row or a column of every tile, so its sums do not depend on what else
is in its tiles.

Arrays: queries uint32 [dim / 2, 2 * TILE], pairs of bfloat16, one query per column; scores float32 [2 * TILE, any];
weights uint32 [2, 2 * TILE, any], bfloat16 in the lower half of a word and once more in the upper half; keys and values
uint16 [any, dim], bfloat16, where dim is a multiple of PAIRS.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import ctypes
import functools
import platform
import struct
import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from batchserve.native import vector_code as code
from batchserve.native.jit import njit
from batchserve.native.vector_code import WORD, WORDS, Array, Builder, Value, index

TILE = 16  # rows of a tile, and 32-bit elements of a row
PAIRS = 2 * TILE  # bfloat16 elements of a row
ROW_BYTES = 64
FEW = 4  # queries: so many are cheaper to store than a whole tile of them
AT_ONCE = 4  # tiles of sums; the others hold the factors
UPPER, NAN = 0xFFFF0000, 0x7FC00000
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64
_BYTE = ir.IntType(8)


def compiles_matrices() -> bool:
    """Returns whether Numba compiles matrix instructions."""
    return {"+amx-bf16", "+amx-tile", "+avx512f"} <= set(code.features())


@functools.cache
def can_use_amx() -> bool:
    """Returns whether Numba compiles matrix instructions and Linux, which must be asked, lets this process use them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if not compiles_matrices():
        return False
    answer: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return answer == 0


def call(builder: Builder, name: str, *arguments: Value) -> None:
    """Emits an x86 instruction by its LLVM name."""
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(code.declared(builder, f"llvm.x86.{name}", kind), arguments)


def register_number(number: int) -> Value:
    """Returns the number of one of eight tile registers as a constant."""
    return ir.Constant(_BYTE, number)


def _load(builder: Builder, register: int, array: Array, row: Value, column: Value) -> None:
    call(builder, "tileloadd64", register_number(register), array.at(row, column), array.row_bytes)


def _multiply(builder: Builder, sums: int, first: int, second: int) -> None:
    call(builder, "tdpbf16ps", register_number(sums), register_number(first), register_number(second))


def _clear(builder: Builder, registers: int) -> None:
    for register in range(registers):
        call(builder, "tilezero", register_number(register))


def _words(value: int) -> Value:
    return ir.Constant(WORDS, [value] * TILE)


@intrinsic
def begin_tiles(typing_context):  # type: ignore[no-untyped-def]
    """Configures the tiles. Each thread must call this first: other code may have used tiles of another shape."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        shapes = struct.pack("<BB14x8H16x8B8x", 1, 0, *[ROW_BYTES] * 8, *[TILE] * 8)
        constant = cgutils.create_constant_array(_BYTE, [register_number(byte) for byte in shapes])
        stored = cgutils.global_constant(builder, "tile_shapes", constant)
        call(builder, "ldtilecfg", builder.bitcast(stored, ir.PointerType()))
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def end_tiles(typing_context):  # type: ignore[no-untyped-def]
    """Releases the tiles. Each thread must call this when it is done: what tiles hold slows down thread switches."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.none(), codegen


def _transposed(builder: Builder, rows: list[Value]) -> list[Value]:
    """Transposes TILE vectors of TILE elements."""
    half = TILE // 2
    while half:
        lower = [place if place & half == 0 else TILE + place - half for place in range(TILE)]
        upper = [place + half if place & half == 0 else TILE + place for place in range(TILE)]
        for i in range(TILE):
            if i & half == 0:
                pair = rows[i], rows[i + half]
                rows[i], rows[i + half] = (code.shuffle(builder, *pair, places) for places in (lower, upper))
        half //= 2
    return rows


@intrinsic
def copy_row(typing_context, source, row, target, place):  # type: ignore[no-untyped-def]
    """Sets target[place] = source[row], for keys, values or lanes."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, target = (Array(context, builder, signature.args[i], arguments[i]) for i in (0, 2))
        with cgutils.for_range(builder, builder.udiv(target.columns, index(PAIRS))) as loop:
            column = builder.mul(loop.index, index(PAIRS))
            words = code.load(builder, source.at(arguments[1], column), WORDS)
            code.store(builder, words, target.at(arguments[3], column))
        return context.get_dummy_value()

    return types.none(source, types.int64, target, types.int64), codegen


@intrinsic
def clear_row(typing_context, target, place):  # type: ignore[no-untyped-def]
    """Sets target[place] = 0, for keys or values."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        target = Array(context, builder, signature.args[0], arguments[0])
        with cgutils.for_range(builder, builder.udiv(target.columns, index(PAIRS))) as loop:
            code.store(builder, _words(0), target.at(arguments[1], builder.mul(loop.index, index(PAIRS))))
        return context.get_dummy_value()

    return types.none(target, types.int64), codegen


@intrinsic
def transpose_queries(typing_context, lanes, queries):  # type: ignore[no-untyped-def]
    """Sets queries[:, :TILE] to the transposed lanes, bfloat16 as uint16 [TILE, dim]."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        lanes, queries = (Array(context, builder, signature.args[i], arguments[i]) for i in range(2))
        with cgutils.for_range(builder, builder.udiv(lanes.columns, index(PAIRS))) as loop:
            column, first = builder.mul(loop.index, index(PAIRS)), builder.mul(loop.index, index(TILE))
            rows = [code.load(builder, lanes.at(index(i), column), WORDS) for i in range(TILE)]
            for i, row in enumerate(_transposed(builder, rows)):
                code.store(builder, row, queries.at(builder.add(first, index(i)), index(0)))
        return context.get_dummy_value()

    return types.none(lanes, queries), codegen


def _score(num_queries: int, num_tiles: int) -> Any:
    """Returns an intrinsic for queries [first, first + num_queries) and num_tiles tiles of keys, from `key` on."""

    @intrinsic
    def score(typing_context, queries, first, keys, key, scores, column, spare, scale):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            arrays = [Array(context, builder, signature.args[i], arguments[i]) for i in (0, 2, 4, 6)]
            queries, keys, scores, spare = arrays
            first, key, column, scale = (arguments[i] for i in (1, 3, 5, 7))
            _clear(builder, num_tiles)
            with cgutils.for_range(builder, builder.udiv(keys.columns, index(PAIRS))) as loop:
                _load(builder, AT_ONCE, queries, builder.mul(loop.index, index(TILE)), first)
                for tile in range(num_tiles):
                    own, row = AT_ONCE + 1 + tile % 3, builder.add(key, index(TILE * tile))
                    _load(builder, own, keys, row, builder.mul(loop.index, index(PAIRS)))
                    _multiply(builder, tile, own, AT_ONCE)
            for tile in range(num_tiles):
                call(
                    builder,
                    "tilestored64",
                    register_number(tile),
                    spare.at(index(TILE * tile), index(0)),
                    spare.row_bytes,
                )
            factor = code.everywhere(builder, scale)
            for tile in range(num_tiles):
                rows = [code.load(builder, spare.at(index(TILE * tile + i), index(0))) for i in range(TILE)]
                for lane, found in enumerate(_transposed(builder, rows)[:num_queries]):
                    address = scores.at(builder.add(first, index(lane)), builder.add(column, index(TILE * tile)))
                    code.store(builder, builder.fmul(found, factor), address)
            return context.get_dummy_value()

        number = types.int64
        return types.none(queries, number, keys, number, scores, number, spare, types.float32), codegen

    return score


_score_few, _score_few_more = _score(FEW, 1), _score(FEW, AT_ONCE)
_score_all, _score_all_more = _score(TILE, 1), _score(TILE, AT_ONCE)


@njit(nogil=True, cache=True)
def score(queries, first, count, keys, start, stop, scores, column, spare, scale):  # type: ignore[no-untyped-def]
    """Sets scores[first + i, column:] = scale * (query first + i) . keys[start:stop], for at least `count` queries.

    keys[start:stop] are whole tiles. spare: float32 [AT_ONCE * TILE, TILE].
    """
    column -= start
    while start + AT_ONCE * TILE <= stop:
        if count <= FEW:
            _score_few_more(queries, first, keys, start, scores, column + start, spare, scale)
        else:
            _score_all_more(queries, first, keys, start, scores, column + start, spare, scale)
        start += AT_ONCE * TILE
    while start < stop:
        if count <= FEW:
            _score_few(queries, first, keys, start, scores, column + start, spare, scale)
        else:
            _score_all(queries, first, keys, start, scores, column + start, spare, scale)
        start += TILE


def _rounded(builder: Builder, words: Value) -> Value:
    """Rounds words of finite float32: the upper halves become the nearest bfloat16, ties to even."""
    is_odd = builder.and_(builder.lshr(words, _words(16)), _words(1))
    return builder.add(builder.add(words, is_odd), _words(0x7FFF))


@intrinsic
def to_weights(typing_context, scores, lane, count, until, even, odd):  # type: ignore[no-untyped-def]
    """Writes weights to even[lane, :until] and odd[lane, :until]: the first `count` scores, then zeros.
    Finite scores are rounded to the nearest bfloat16.
    """

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        scores, even, odd = (Array(context, builder, signature.args[i], arguments[i]) for i in (0, 4, 5))
        lane, count, until = arguments[1:4]
        numbers = ir.Constant(WORDS, list(range(TILE)))
        with cgutils.for_range(builder, builder.udiv(until, index(TILE))) as loop:
            column = builder.mul(loop.index, index(TILE))
            rounded = _rounded(builder, code.load(builder, scores.at(lane, column), WORDS))
            left = code.everywhere(builder, builder.trunc(builder.sub(count, column), WORD))
            kept = builder.select(builder.icmp_signed("<", numbers, left), rounded, _words(0))
            code.store(builder, builder.lshr(kept, _words(16)), even.at(lane, column))
            code.store(builder, builder.and_(kept, _words(UPPER)), odd.at(lane, column))
        return context.get_dummy_value()

    number = types.int64
    return types.none(scores, number, number, number, even, odd), codegen


def _add(num_tiles: int) -> Any:
    """Returns an intrinsic that adds weights[.., first:, at:] . values[start:stop, column:] to num_tiles tiles."""

    @intrinsic
    def add(typing_context, even, odd, first, at, values, start, stop, column):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            even, odd, values = (Array(context, builder, signature.args[i], arguments[i]) for i in (0, 1, 4))
            first, at, start, stop, column = (arguments[i] for i in (2, 3, 5, 6, 7))
            with cgutils.for_range(builder, builder.udiv(builder.sub(stop, start), index(TILE))) as loop:
                behind = builder.mul(loop.index, index(TILE))
                for i, weights in enumerate((even, odd)):
                    _load(builder, AT_ONCE + i, weights, first, builder.add(at, behind))
                for part in range(num_tiles // 2):
                    own = AT_ONCE + 2 + part
                    _load(builder, own, values, builder.add(start, behind), builder.add(column, index(PAIRS * part)))
                    for i in range(2):
                        _multiply(builder, 2 * part + i, AT_ONCE + i, own)
            return context.get_dummy_value()

        number = types.int64
        return types.none(even, odd, number, number, values, number, number, number), codegen

    return add


_add_half, _add_all = _add(AT_ONCE // 2), _add(AT_ONCE)


@njit(nogil=True, cache=True)
def _add_keys(weights, first, at, values, start, stop, column):  # type: ignore[no-untyped-def]
    if values.shape[1] - column >= AT_ONCE * TILE:
        _add_all(weights[0], weights[1], first, at, values, start, stop, column)
    else:
        _add_half(weights[0], weights[1], first, at, values, start, stop, column)


@intrinsic
def _clear_sums(typing_context):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _clear(builder, AT_ONCE)
        return context.get_dummy_value()

    return types.none(), codegen


def _move(name: str) -> Any:
    @intrinsic
    def move(typing_context, sums, first, column):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            sums = Array(context, builder, signature.args[0], arguments[0])
            for tile in range(AT_ONCE):
                at = sums.at(arguments[1], builder.add(arguments[2], index(TILE * tile)))
                call(builder, name, register_number(tile), at, sums.row_bytes)
            return context.get_dummy_value()

        return types.none(sums, types.int64, types.int64), codegen

    return move


_load_sums, _store_sums = _move("tileloadd64"), _move("tilestored64")


@njit(nogil=True, cache=True)
def weighted_sum(weights, first, values, start, stop, tail, num_tail, sums):  # type: ignore[no-untyped-def]
    """Sets sums[first + i] = weights[.., first + i] . (values[start:stop], then tail[:num_tail]), all whole tiles.

    Writes TILE sums. sums: float32 [2 * TILE, dim padded to AT_ONCE tiles], in the order that `give` expects.
    """
    for column in range(0, values.shape[1], AT_ONCE * TILE):
        _clear_sums()
        _add_keys(weights, first, 0, values, start, stop, column)
        _add_keys(weights, first, stop - start, tail, 0, num_tail, column)
        _store_sums(sums, first, column)


@njit(nogil=True, cache=True)
def accumulate_weighted_sum(weights, first, count, at, tail, num_tail, sums, spare):  # type: ignore[no-untyped-def]
    """Adds weights[.., at:] . tail[:num_tail] to sums[first : first + count]. spare: as sums, TILE of them."""
    for column in range(0, tail.shape[1], AT_ONCE * TILE):
        _load_sums(sums, first, column)
        _add_keys(weights, first, at, tail, 0, num_tail, column)
        _store_sums(spare, 0, column)
    for i in range(count):
        for j in range(sums.shape[1]):
            sums[first + i, j] = spare[i, j]


@intrinsic
def store_output(typing_context, sums, lane, factor, out, row):  # type: ignore[no-untyped-def]
    """Sets out[row] = factor * sums[lane], bfloat16 as uint16, with even and odd columns interleaved."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        sums, out = (Array(context, builder, signature.args[i], arguments[i]) for i in (0, 3))
        scale = code.everywhere(builder, arguments[2])

        def element(column: Value) -> Value:
            found = builder.fmul(code.load(builder, sums.at(arguments[1], column)), scale)
            rounded = _rounded(builder, builder.bitcast(found, WORDS))
            return builder.select(builder.fcmp_unordered("uno", found, found), _words(NAN), rounded)

        with cgutils.for_range(builder, builder.udiv(out.columns, index(PAIRS))) as loop:
            column = builder.mul(loop.index, index(PAIRS))
            even, odd = element(column), element(builder.add(column, index(TILE)))
            pairs = builder.or_(builder.lshr(even, _words(16)), builder.and_(odd, _words(UPPER)))
            code.store(builder, pairs, out.at(arguments[4], column))
        return context.get_dummy_value()

    number = types.int64
    return types.none(sums, number, types.float32, out, number), codegen
