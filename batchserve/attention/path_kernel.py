"""Tree attention as one compiled loop nest: every row reduces its keys in the order of their positions.

A row at position p always has the same keys in the same order (context, then its ancestors, then itself) whatever
else is in the batch, and the compiled code for one (row, key) does not depend on any other: so results are bitwise
equal under any batching, chunking or drafting. One call serves all requests of a layer, which also makes it the
faster path while contexts are short.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from batchserve.addresses import as_pointer

if TYPE_CHECKING:
    from numba.core.ccallback import CFunc


@intrinsic
def _widen(typing_context, value):  # type: ignore[no-untyped-def]
    """float32 of an element: bfloat16 travels as its 16 upper bits."""

    def from_bfloat16(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        word = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(word, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    def as_it_is(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return arguments[0]

    return types.float32(value), from_bfloat16 if value == types.uint16 else as_it_is


@intrinsic
def _claim(typing_context, address):  # type: ignore[no-untyped-def]
    """The number at an address, which is one more afterwards: no two threads get the same."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", number, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(address), codegen


@njit(nogil=True, fastmath=True, cache=True, error_model="numpy")
def _score(queries, keys, scores, j):  # type: ignore[no-untyped-def]
    """scores[0:4, j : j + 4] = queries [4, dim] . keys [4, dim]; sixteen at a time: each is read and widened once."""
    q0, q1, q2, q3 = queries[0], queries[1], queries[2], queries[3]
    k0, k1, k2, k3 = keys[0], keys[1], keys[2], keys[3]
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0.0)
    c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = np.float32(0.0)
    for i in range(q0.shape[0]):
        w, x, y, z = _widen(k0[i]), _widen(k1[i]), _widen(k2[i]), _widen(k3[i])
        q = q0[i]
        a0, a1, a2, a3 = a0 + q * w, a1 + q * x, a2 + q * y, a3 + q * z
        q = q1[i]
        b0, b1, b2, b3 = b0 + q * w, b1 + q * x, b2 + q * y, b3 + q * z
        q = q2[i]
        c0, c1, c2, c3 = c0 + q * w, c1 + q * x, c2 + q * y, c3 + q * z
        q = q3[i]
        d0, d1, d2, d3 = d0 + q * w, d1 + q * x, d2 + q * y, d3 + q * z
    scores[0, j], scores[0, j + 1], scores[0, j + 2], scores[0, j + 3] = a0, a1, a2, a3
    scores[1, j], scores[1, j + 1], scores[1, j + 2], scores[1, j + 3] = b0, b1, b2, b3
    scores[2, j], scores[2, j + 1], scores[2, j + 2], scores[2, j + 3] = c0, c1, c2, c3
    scores[3, j], scores[3, j + 1], scores[3, j + 2], scores[3, j + 3] = d0, d1, d2, d3


@njit(nogil=True, fastmath=True, cache=True, error_model="numpy")
def _accumulate(sums, weights, j, values):  # type: ignore[no-untyped-def]
    """sums [lanes, dim] += weights [lanes, j : j + 4] . values [4, dim]; sums are read and written once for four."""
    for lane in range(sums.shape[0]):
        total, row = sums[lane], weights[lane]
        w0, w1, w2, w3 = row[j], row[j + 1], row[j + 2], row[j + 3]
        v0, v1, v2, v3 = values[0], values[1], values[2], values[3]
        for d in range(total.shape[0]):
            total[d] += w0 * _widen(v0[d]) + w1 * _widen(v1[d]) + w2 * _widen(v2[d]) + w3 * _widen(v3[d])


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
        key_plane = carray(as_pointer(addresses[s, 0]), shape, keys.dtype)
        value_plane = carray(as_pointer(addresses[s, 1]), shape, values.dtype)
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


@njit(nogil=True, cache=True)
def _gather(plane, j, first, in_context, path, depth, four):  # type: ignore[no-untyped-def]
    """A row's keys from the j-th on, of the context and then of its path, into four [4, dim]; then its last again."""
    for i in range(4):
        behind = j + i - in_context
        place = first + j + i if behind < 0 else path[max(0, depth - 1 - behind)]
        four[i, :] = plane[place]


@njit(nogil=True, fastmath=True, cache=True, error_model="numpy")
def _attend_block(lanes, planes, context, first, paths, depths, work, scale, softcap):  # type: ignore[no-untyped-def]
    """Four (row, head) queries over one K/V head: lanes are query vectors [4, dim], outputs come back in them.

    All four see the context from `first` on, then the ancestors that they have in common, then each its own. Keys are
    taken in fours from a row's first, wherever they lie, and a block is always four lanes wide (short ones repeat a
    lane), because the compiler may order a narrower reduction differently: so no sum depends on the batch.
    """
    keys, values = planes
    scores, own, sums, four = work
    in_context = context - first
    common = in_context + _common_ancestors(paths, depths)
    whole, shared = in_context // 4 * 4, common // 4 * 4
    for j in range(0, whole, 4):
        _score(lanes, keys[first + j : first + j + 4], scores, j)
    for j in range(whole, shared, 4):
        _gather(keys, j, first, in_context, paths[0], depths[0], four)
        _score(lanes, four, scores, j)
    for lane in range(4):
        row, count = scores[lane], in_context + depths[lane]
        for j in range(shared, count, 4):
            _gather(keys, j, first, in_context, paths[lane], depths[lane], four)
            _score(lanes, four, own, 0)
            row[j : j + 4] = own[lane, :4]
        for j in range(count):
            row[j] *= scale
        if softcap > 0:
            for j in range(count):
                row[j] = softcap * np.tanh(row[j] / softcap)
        own[lane, 4] = _softmax(row, count)
        row[count : count + 3] = 0  # what is gathered behind the last counts for nothing
    sums[:, :] = 0
    for j in range(0, whole, 4):
        _accumulate(sums, scores, j, values[first + j : first + j + 4])
    for j in range(whole, shared, 4):
        _gather(values, j, first, in_context, paths[0], depths[0], four)
        _accumulate(sums, scores, j, four)
    for lane in range(4):
        for j in range(shared, in_context + depths[lane], 4):
            _gather(values, j, first, in_context, paths[lane], depths[lane], four)
            _accumulate(sums[lane : lane + 1], scores[lane : lane + 1], j, four)
        for d in range(sums.shape[1]):
            lanes[lane, d] = sums[lane, d] * own[lane, 4]


@njit(nogil=True, fastmath=True, cache=True, error_model="numpy")
def _attend_head(query, planes, span, head, group, parents, out, window, scale, softcap, work):  # type: ignore[no-untyped-def]
    """Attend with one span's rows over one K/V head: span is (row start, rows, context length)."""
    start, rows, context = span
    lanes, paths, depths, block = work
    # Under a window every row has a first key of its own, so a block holds heads of one row only.
    width = group if window > 0 else rows * group
    for begin in range(0, rows * group, width):
        for at in range(begin, begin + width, 4):
            first = 0
            for lane in range(4):
                item = min(at + lane, begin + width - 1)
                row = item // group
                lanes[lane] = query[start + row, head * group + item % group]
                depths[lane] = _ancestors(parents, start, row, context, paths[lane])
                if window > 0:
                    first = max(0, context + depths[lane] - window)
                    depths[lane] -= max(0, first - context)
                    first = min(first, context)
            _attend_block(lanes, planes, context, first, paths, depths, block, scale, softcap)
            for lane in range(min(4, begin + width - at)):
                item = at + lane
                out[start + item // group, head * group + item % group] = lanes[lane]


# What attend_loop is given, as an int64 array: sizes, addresses of arrays, and two float32 in the place of one number.
NUM_TOKENS, NUM_HEADS, DIM, NUM_SPANS, GROUP, WINDOW, LONGEST, SCALES = range(8)
QUERY, OUT, ADDRESSES, CAPACITIES, SPANS, PARENTS, NEXT, JOB_SIZE = range(8, 16)


@functools.cache
def attend_loop(element: type[np.generic]) -> CFunc[Any]:
    """The compiled loop over all (span, K/V head) of a layer, for planes of uint16 (bfloat16) or float32.

    It takes the address of a job: NUM_TOKENS, NUM_HEADS, DIM of QUERY and OUT, float32 [num_tokens, num_heads, dim], of
    which the spans' rows are written; NUM_SPANS of ADDRESSES [num_spans, 2], CAPACITIES and SPANS, as store_rows takes
    them; PARENTS int32 [num_tokens], counted inside the span; GROUP: heads of a K/V head; WINDOW 0: none; LONGEST: the
    most keys of a row; SCALES: scale and softcap (0: none). K and V have the same dim. Threads that are given the same
    job share it: NEXT, 0 at first, is what nobody has begun yet.
    """

    @cfunc(types.void(types.CPointer(types.int64)), nopython=True, cache=True)
    def loop(job_address):  # type: ignore[no-untyped-def]
        job = carray(job_address, JOB_SIZE)
        dim, group, longest = job[DIM], job[GROUP], job[LONGEST]
        num_kv_heads = job[NUM_HEADS] // group
        shape = (job[NUM_TOKENS], job[NUM_HEADS], dim)
        query, out = (
            carray(as_pointer(job[QUERY]), shape, np.float32),
            carray(as_pointer(job[OUT]), shape, np.float32),
        )
        addresses = carray(as_pointer(job[ADDRESSES]), (job[NUM_SPANS], 2), np.int64)
        capacities = carray(as_pointer(job[CAPACITIES]), (job[NUM_SPANS],), np.int64)
        spans = carray(as_pointer(job[SPANS]), (job[NUM_SPANS], 3), np.int64)
        parents = carray(as_pointer(job[PARENTS]), (job[NUM_TOKENS],), np.int32)
        scales = job.view(np.float32)[2 * SCALES : 2 * SCALES + 2]
        block = (
            np.zeros((4, longest + 3), np.float32),
            np.zeros((4, 5), np.float32),
            np.zeros((4, dim), np.float32),
            np.zeros((4, dim), element),
        )
        work = (np.zeros((4, dim), np.float32), np.zeros((4, longest), np.int64), np.zeros(4, np.int64), block)
        while True:
            unit = _claim(job.ctypes.data + NEXT * job.itemsize)
            if unit >= job[NUM_SPANS] * num_kv_heads:
                break
            s, head = unit // num_kv_heads, unit % num_kv_heads
            plane_shape = (num_kv_heads, capacities[s], dim)
            keys = carray(as_pointer(addresses[s, 0]), plane_shape, element)
            values = carray(as_pointer(addresses[s, 1]), plane_shape, element)
            span = (spans[s, 0], spans[s, 1], spans[s, 2])
            planes = (keys[head], values[head])
            _attend_head(query, planes, span, head, group, parents, out, job[WINDOW], scales[0], scales[1], work)

    compiled: CFunc[Any] = loop
    return compiled
