"""Tree attention as one compiled loop nest: every row reduces its keys in the order of their positions.

A row at position p always has the same keys in the same order (context, then its ancestors, then itself) whatever
else is in the batch, and the compiled code for one (row, key) does not depend on any other: so results are bitwise
equal under any batching, chunking or drafting. One call serves all requests of a layer, which also makes it the
faster path while contexts are short.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def _as_pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """An int64 address as a void pointer, for carray."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@intrinsic
def _widen(typing_context, value):  # type: ignore[no-untyped-def]
    """float32 of an element: bfloat16 travels as its 16 upper bits."""

    def from_bfloat16(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        word = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(word, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    def as_it_is(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return arguments[0]

    return types.float32(value), from_bfloat16 if value == types.uint16 else as_it_is


@njit(nogil=True, fastmath=True, cache=True, error_model="numpy")
def _dot4(queries, key, scores, j):  # type: ignore[no-untyped-def]
    """scores[0:4, j] = queries [4, dim] . key [dim]; four at a time, so that a key is read and widened once."""
    q0, q1, q2, q3 = queries[0], queries[1], queries[2], queries[3]
    t0 = t1 = t2 = t3 = np.float32(0.0)
    for d in range(key.shape[0]):
        k = _widen(key[d])
        t0 += q0[d] * k
        t1 += q1[d] * k
        t2 += q2[d] * k
        t3 += q3[d] * k
    scores[0, j], scores[1, j], scores[2, j], scores[3, j] = t0, t1, t2, t3


@njit(nogil=True, fastmath=True, cache=True, error_model="numpy")
def _accumulate4(sums, scores, j, value):  # type: ignore[no-untyped-def]
    """sums [4, dim] += scores[:, j] * value [dim]."""
    s0, s1, s2, s3 = sums[0], sums[1], sums[2], sums[3]
    w0, w1, w2, w3 = scores[0, j], scores[1, j], scores[2, j], scores[3, j]
    for d in range(value.shape[0]):
        v = _widen(value[d])
        s0[d] += w0 * v
        s1[d] += w1 * v
        s2[d] += w2 * v
        s3[d] += w3 * v


@intrinsic
def _power_of_two(typing_context, exponent):  # type: ignore[no-untyped-def]
    """2 ** exponent for an int32 in [-126, 127]: the exponent field of a float32."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        biased = builder.add(arguments[0], ir.Constant(ir.IntType(32), 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(ir.IntType(32), 23)), ir.FloatType())

    return types.float32(types.int32), codegen


@njit(nogil=True, fastmath=True, cache=True, error_model="numpy")
def _exp_in_place(values, count):  # type: ignore[no-untyped-def]
    """exp of non-positive values, to about 2 units in the last place; unlike libm's it is vectorised.

    exp(x) = 2^n * exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2, by a Taylor polynomial of degree 7.
    """
    for j in range(count):
        x = max(values[j], np.float32(-87.0))
        n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
        r = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
        p = np.float32(1 / 5040)
        p = p * r + np.float32(1 / 720)
        p = p * r + np.float32(1 / 120)
        p = p * r + np.float32(1 / 24)
        p = p * r + np.float32(1 / 6)
        p = p * r + np.float32(0.5)
        p = p * r + np.float32(1.0)
        p = p * r + np.float32(1.0)
        values[j] = p * _power_of_two(np.int32(n))


@njit(nogil=True, fastmath=True, cache=True, error_model="numpy")
def _softmax(scores, count):  # type: ignore[no-untyped-def]
    """In place over scores[:count]; returns 1 / sum, so that the caller scales once."""
    highest = scores[0]
    for j in range(1, count):
        highest = max(highest, scores[j])
    total = np.float32(0.0)
    for j in range(count):
        scores[j] -= highest
    _exp_in_place(scores, count)
    for j in range(count):
        total += scores[j]
    return np.float32(1.0) / total


@njit(nogil=True, cache=True)
def store_rows(keys, values, addresses, capacities, spans):  # type: ignore[no-untyped-def]
    """Copy every span's new K and V behind its context.

    keys and values [num_tokens, num_kv_heads, dim] (uint16 for bfloat16); addresses int64 [num_spans, 2] of this
    layer's planes [num_kv_heads, capacity, dim]; spans int64 [num_spans, 3]: row start, rows, context length.
    """
    num_kv_heads, dim = keys.shape[1], keys.shape[2]
    for s in range(spans.shape[0]):
        start, rows, context = spans[s, 0], spans[s, 1], spans[s, 2]
        shape = (num_kv_heads, capacities[s], dim)
        key_plane = carray(_as_pointer(addresses[s, 0]), shape, keys.dtype)
        value_plane = carray(_as_pointer(addresses[s, 1]), shape, values.dtype)
        for i in range(rows):
            for h in range(num_kv_heads):
                key_plane[h, context + i, :] = keys[start + i, h, :]
                value_plane[h, context + i, :] = values[start + i, h, :]


@njit(nogil=True, cache=True)
def _ancestors(parents, start, row, context, path):  # type: ignore[no-untyped-def]
    """Write the slab places of a row's ancestors and itself into path, leaf first; returns how many."""
    depth = 0
    while row >= 0:
        path[depth] = context + row
        depth += 1
        row = parents[start + row]
    return depth


@njit(nogil=True, cache=True)
def _common_ancestors(paths, depths):  # type: ignore[no-untyped-def]
    """How many ancestors, from the root on, the four lanes share."""
    common, limit = 0, depths.min()
    while common < limit:
        place = paths[0, depths[0] - 1 - common]
        for lane in range(1, 4):
            if paths[lane, depths[lane] - 1 - common] != place:
                return common
        common += 1
    return common


@njit(nogil=True, fastmath=True, cache=True, error_model="numpy")
def _attend_block(lanes, planes, context, first, paths, depths, work, scale, softcap):  # type: ignore[no-untyped-def]
    """Four (row, head) queries over one K/V head: lanes are query vectors [4, dim], sums come back in work.

    All four see the context from `first` on, then the ancestors that they have in common, then each its own. A block
    is always four wide (short ones repeat a lane), because the compiler may order a narrower reduction differently.
    """
    keys, values = planes
    scores, own, sums, own_sums = work
    in_context = context - first
    common = _common_ancestors(paths, depths)
    sums[:, :] = 0
    for j in range(in_context):
        _dot4(lanes, keys[first + j], scores, j)
    for a in range(common):
        _dot4(lanes, keys[paths[0, depths[0] - 1 - a]], scores, in_context + a)
    for lane in range(4):
        depth = depths[lane]
        for a in range(common, depth):
            _dot4(lanes, keys[paths[lane, depth - 1 - a]], own, 0)
            scores[lane, in_context + a] = own[lane, 0]
        row = scores[lane]
        for j in range(in_context + depth):
            row[j] *= scale
        if softcap > 0:
            for j in range(in_context + depth):
                row[j] = softcap * np.tanh(row[j] / softcap)
        own[lane, 1] = _softmax(row, in_context + depth)
    for j in range(in_context):
        _accumulate4(sums, scores, j, values[first + j])
    for a in range(common):
        _accumulate4(sums, scores, in_context + a, values[paths[0, depths[0] - 1 - a]])
    for lane in range(4):
        depth = depths[lane]
        own_sums[:, :] = sums
        for a in range(common, depth):
            _accumulate4(own_sums, scores, in_context + a, values[paths[lane, depth - 1 - a]])
        for d in range(sums.shape[1]):
            lanes[lane, d] = own_sums[lane, d] * own[lane, 1]


@njit(nogil=True, fastmath=True, cache=True, error_model="numpy")
def attend_rows(query, sample, addresses, capacities, spans, parents, out, heads, window, scale, softcap):  # type: ignore[no-untyped-def]
    """Attend with K/V heads [heads[0], heads[1]) of all spans.

    query float32 [num_tokens, num_heads, dim]; sample: an array of the planes' dtype; parents int32 [num_tokens],
    counted inside the span; out float32 [num_tokens, num_heads, dim], written for the spans' rows; heads int64
    [first, end, group, num_kv_heads]; window 0: none; softcap 0: none. K and V have the same dim.
    """
    dim, group, num_kv_heads = query.shape[2], heads[2], heads[3]
    longest = 1
    for s in range(spans.shape[0]):
        longest = max(longest, spans[s, 1] + spans[s, 2])
    work = (
        np.zeros((4, longest), np.float32),
        np.zeros((4, 2), np.float32),
        np.zeros((4, dim), np.float32),
        np.zeros((4, dim), np.float32),
    )
    lanes = np.zeros((4, dim), np.float32)
    paths, depths = np.zeros((4, longest), np.int64), np.zeros(4, np.int64)
    for s in range(spans.shape[0]):
        start, rows, context = spans[s, 0], spans[s, 1], spans[s, 2]
        shape = (num_kv_heads, capacities[s], dim)
        key_plane = carray(_as_pointer(addresses[s, 0]), shape, sample.dtype)
        value_plane = carray(_as_pointer(addresses[s, 1]), shape, sample.dtype)
        for h in range(heads[0], heads[1]):
            planes = (key_plane[h], value_plane[h])
            # Under a window every row has a first key of its own, so a block holds heads of one row only.
            span = group if window > 0 else rows * group
            for begin in range(0, rows * group, span):
                for at in range(begin, begin + span, 4):
                    first = 0
                    for lane in range(4):
                        item = min(at + lane, begin + span - 1)
                        row = item // group
                        lanes[lane] = query[start + row, h * group + item % group]
                        depths[lane] = _ancestors(parents, start, row, context, paths[lane])
                        if window > 0:
                            first = max(0, context + depths[lane] - window)
                            depths[lane] -= max(0, first - context)
                            first = min(first, context)
                    _attend_block(lanes, planes, context, first, paths, depths, work, scale, softcap)
                    for lane in range(min(4, begin + span - at)):
                        item = at + lane
                        out[start + item // group, h * group + item % group] = lanes[lane]
