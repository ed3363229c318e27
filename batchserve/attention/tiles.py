"""The arithmetic of attention in tiles of up to four queries by four keys.

A compiler's vectoriser may sum a loop in another order if fewer queries share a key. Here the order is explicit
(vector_code.py). A query has the same sums in a tile of one query and of four, so results do not depend on what else is
in the batch. A key is read and widened once for a whole tile.

Queries and sums are float32 in an order of their own (`spread`, `deinterleave_output`), padded with zeros to `padded`.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from batchserve.native import vector_code as code
from batchserve.native.elements import narrow, widen
from batchserve.native.jit import njit
from batchserve.native.vector_code import FLOAT, FLOATS, WIDTH, WORD, Array, Builder, Value, index

LANES = 4  # queries of a tile, and keys: 32 registers hold sixteen sums
_AT_ONCE = LANES if code.HAS_MANY_REGISTERS else 2  # queries computed at once


@njit(nogil=True, cache=True)
def padded(dim, parts):  # type: ignore[no-untyped-def]
    """Returns the number of floats for a query or a sum of `dim` elements, `parts` of which share a word."""
    chunk = parts * WIDTH
    return (dim + chunk - 1) // chunk * chunk


@njit(nogil=True, cache=True)
def _order(i, parts):  # type: ignore[no-untyped-def]
    """Returns the index of the i-th element in tiles: if a word has two, a chunk's even ones precede its odd ones."""
    chunk, rest = i // (parts * WIDTH), i % (parts * WIDTH)
    return (chunk * parts + rest % parts) * WIDTH + rest // parts


@njit(nogil=True, cache=True)
def spread(vector, scale, parts, lane):  # type: ignore[no-untyped-def]
    """Sets lane [padded] = scale * vector [dim]; the padding is not written."""
    for i in range(vector.shape[0]):
        lane[_order(i, parts)] = widen(vector[i]) * scale


@njit(nogil=True, cache=True)
def deinterleave_output(lane, scale, parts, vector):  # type: ignore[no-untyped-def]
    """Sets vector [dim] = scale * lane [padded]."""
    for i in range(vector.shape[0]):
        vector[i] = narrow(lane[_order(i, parts)] * scale, vector[i])


def _emit_scores(
    builder: Builder, queries: Array, lanes: list[Value], keys: Array, places: list[Value], scores: Array, j: Value
) -> None:
    sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(len(lanes) * LANES)]
    for total in sums:
        builder.store(code.splat(0.0), total)

    def body(number: Value, vectors: list[list[Value]]) -> None:
        for part in range(keys.parts):
            column = builder.add(builder.mul(number, index(WIDTH * keys.parts)), index(WIDTH * part))
            for lane, row in enumerate(lanes):
                query = code.load(builder, queries.at(row, column))
                for key, total in enumerate(sums[lane * LANES : (lane + 1) * LANES]):
                    so_far = builder.load(total, typ=FLOATS)
                    builder.store(code.multiply_add(builder, query, vectors[key][part], so_far), total)

    code.for_each_chunk(builder, keys, places, body)
    found, owners = code.horizontal_sums(builder, [builder.load(total, typ=FLOATS) for total in sums])
    for lane, row in enumerate(lanes):
        mine = range(lane * LANES, (lane + 1) * LANES)
        at = next(number for number, owned in enumerate(owners) if lane * LANES in owned)
        four = code.shuffle(builder, found[at], found[at], [owners[at].index(owner) for owner in mine])
        code.store(builder, four, scores.at(row, j))


def _emit_sums(
    builder: Builder, sums: Array, lanes: list[Value], values: Array, places: list[Value], weights: Array, j: Value
) -> None:
    factors = []
    for row in lanes:
        four = [code.load(builder, weights.at(row, builder.add(j, index(i))), FLOAT) for i in range(LANES)]
        factors.append([code.everywhere(builder, factor) for factor in four])

    def body(number: Value, vectors: list[list[Value]]) -> None:
        for part in range(values.parts):
            column = builder.add(builder.mul(number, index(WIDTH * values.parts)), index(WIDTH * part))
            for lane, row in enumerate(lanes):
                address = sums.at(row, column)
                total = code.load(builder, address)
                for i in range(LANES):
                    total = code.multiply_add(builder, factors[lane][i], vectors[i][part], total)
                code.store(builder, total, address)

    code.for_each_chunk(builder, values, places, body)


def _tile(num_lanes: int, emit: Callable[..., None]) -> Any:
    """Returns an intrinsic for lanes [first, first + num_lanes) and columns [j, j + 4) of `weights`."""

    @intrinsic
    def tile(typing_context, lanes, first, elements, places, weights, j):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            arrays = [Array(context, builder, signature.args[at], arguments[at]) for at in (0, 2, 4)]
            rows = cgutils.unpack_tuple(builder, arguments[3], LANES)
            numbers = [builder.add(arguments[1], index(i)) for i in range(num_lanes)]
            for begin in range(0, num_lanes, _AT_ONCE):
                some = numbers[begin : begin + _AT_ONCE]
                emit(builder, arrays[0], some, arrays[1], rows, arrays[2], arguments[5])
            return context.get_dummy_value()

        return types.none(lanes, types.int64, elements, places, weights, types.int64), codegen

    return tile


# score_one(queries, lane, keys, places, scores, j): scores[lane, j : j + 4] = queries[lane] . keys[places].
# add_one(sums, lane, values, places, weights, j): sums[lane] += weights[lane, j : j + 4] . values[places], one by one.
# The others do the same for two, three or four lanes, from `lane` on.
score_one, _score_two, _score_three, score_four = (_tile(n, _emit_scores) for n in (1, 2, 3, 4))
add_one, _add_two, _add_three, add_four = (_tile(n, _emit_sums) for n in (1, 2, 3, 4))


@njit(nogil=True, cache=True)
def score(queries, count, keys, start, stop, scores):  # type: ignore[no-untyped-def]
    """Sets scores[lane, : stop - start] = queries[lane] . keys[start:stop] for `count` lanes, four keys at a time."""
    if count == 4:
        for at in range(start, stop, 4):
            score_four(queries, 0, keys, (at, at + 1, at + 2, at + 3), scores, at - start)
    elif count == 3:
        for at in range(start, stop, 4):
            _score_three(queries, 0, keys, (at, at + 1, at + 2, at + 3), scores, at - start)
    elif count == 2:
        for at in range(start, stop, 4):
            _score_two(queries, 0, keys, (at, at + 1, at + 2, at + 3), scores, at - start)
    else:
        for at in range(start, stop, 4):
            score_one(queries, 0, keys, (at, at + 1, at + 2, at + 3), scores, at - start)


@njit(nogil=True, cache=True)
def add_weighted(sums, count, values, start, stop, weights):  # type: ignore[no-untyped-def]
    """Adds weights[lane, : stop - start] . values[start:stop] to sums[lane], in order, for the first `count` lanes."""
    if count == 4:
        for at in range(start, stop, 4):
            add_four(sums, 0, values, (at, at + 1, at + 2, at + 3), weights, at - start)
    elif count == 3:
        for at in range(start, stop, 4):
            _add_three(sums, 0, values, (at, at + 1, at + 2, at + 3), weights, at - start)
    elif count == 2:
        for at in range(start, stop, 4):
            _add_two(sums, 0, values, (at, at + 1, at + 2, at + 3), weights, at - start)
    else:
        for at in range(start, stop, 4):
            add_one(sums, 0, values, (at, at + 1, at + 2, at + 3), weights, at - start)


@intrinsic
def exp_in_place(typing_context, rows, row, count):  # type: ignore[no-untyped-def]
    """Sets rows[row, :count] to exp(x - max x); returns the sum. Writes WIDTH more, with 0 up to a multiple of 4."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array = Array(context, builder, signature.args[0], arguments[0])
        _, row, count = arguments
        code.store(builder, code.splat(-math.inf), array.at(row, count))
        num_vectors = builder.udiv(builder.add(count, index(WIDTH - 1)), index(WIDTH))

        def fold(first: Value, step: Callable[[Value, Value], Value]) -> Value:
            folded = cgutils.alloca_once(builder, FLOATS)
            builder.store(first, folded)
            with cgutils.for_range(builder, num_vectors) as loop:
                address = array.at(row, builder.mul(loop.index, index(WIDTH)))
                builder.store(step(builder.load(folded, typ=FLOATS), address), folded)
            return builder.load(folded, typ=FLOATS)

        def higher(one: Value, other: Value) -> Value:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        def add_exp(total: Value, address: Value) -> Value:
            found = code.exp(builder, builder.fsub(code.load(builder, address), highest))
            code.store(builder, found, address)
            return builder.fadd(total, found)

        highest = fold(code.splat(-math.inf), lambda one, address: higher(one, code.load(builder, address)))
        highest = code.across(builder, highest, higher)
        total = code.across(builder, fold(code.splat(0.0), add_exp), builder.fadd)
        return builder.extract_element(total, ir.Constant(WORD, 0))

    return types.float32(rows, types.int64, types.int64), codegen


@intrinsic
def cap_in_place(typing_context, rows, row, count, most):  # type: ignore[no-untyped-def]
    """Sets x = rows[row, :count] to most * tanh(x / most), using exponentials; writes up to its last vector's end."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array = Array(context, builder, signature.args[0], arguments[0])
        _, row, count, most = arguments
        high = code.everywhere(builder, most)
        one, sign = code.splat(1.0), ir.Constant(code.WORDS, [1 << 31] * WIDTH)
        num_vectors = builder.udiv(builder.add(count, index(WIDTH - 1)), index(WIDTH))
        with cgutils.for_range(builder, num_vectors) as loop:
            address = array.at(row, builder.mul(loop.index, index(WIDTH)))
            words = builder.bitcast(code.load(builder, address), code.WORDS)
            negative = builder.bitcast(builder.or_(words, sign), FLOATS)
            ratio = builder.fdiv(negative, high)
            power = code.exp(builder, builder.fmul(ratio, code.splat(2.0)))
            exact = builder.fdiv(builder.fsub(one, power), builder.fadd(one, power))
            # Near zero this subtracts two numbers that are close to one, so the series is used there.
            square = builder.fmul(ratio, ratio)
            inner = builder.fsub(code.splat(1.0 / 3.0), builder.fmul(square, code.splat(2.0 / 15.0)))
            series = builder.fmul(ratio, builder.fsub(builder.fmul(square, inner), one))
            is_small = builder.fcmp_ordered("<", square, code.splat(0.01))
            size = builder.fmul(high, builder.select(is_small, series, exact))
            signed = builder.or_(builder.bitcast(size, code.WORDS), builder.and_(words, sign))
            code.store(builder, builder.bitcast(signed, FLOATS), address)
        return context.get_dummy_value()

    return types.none(rows, types.int64, types.int64, types.float32), codegen
