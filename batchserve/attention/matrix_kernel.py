"""Tree attention with matrix instructions in bfloat16: path_kernel.py's contract, sixteen queries at a time.

A row takes its keys in tiles of 16 positions. Tiles that all rows of a block share are contiguous in memory, and are
multiplied for all queries of the block at once. The rest of a row's keys, its tail, is copied together (context, then
ancestors) and multiplied for that row's queries. Both use the same instructions over the same tiles, so the keys that a
row shares with others do not change a bit of the result. Weights are rounded to bfloat16, as in SDPA.

A row that sees NaN is NaN. A row's invisible keys are multiplied by zero, so a V that is not finite may make NaN of
rows that do not see it: in a chain the rows before it in its block, and under a window those that have just lost sight
of it. What is in other branches of a tree does not affect a row.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import carray, types

from batchserve.attention import matrix_code as matrix
from batchserve.attention import tiles
from batchserve.attention.matrix_code import AT_ONCE, ROW_BYTES, TILE
from batchserve.attention.path_kernel import ancestors, softmax_weights
from batchserve.attention.span_job import NEXT_AT, SPAN_JOB, arrays_of, planes_of, store_heads, vector
from batchserve.native.addresses import as_pointer, claim, record_at
from batchserve.native.jit import cfunc, njit

if TYPE_CHECKING:
    from numba.core.ccallback import CFunc


class _Work(NamedTuple):
    """A thread's memory, for one block at a time. The queries of a block are its lanes."""

    lanes: np.ndarray  # uint16 [TILE, dim]
    queries: np.ndarray  # the lanes as matrix_code.py describes them, like weights and sums
    scores: np.ndarray  # float32 [2 * TILE, keys]
    weights: np.ndarray
    sums: np.ndarray
    spare_sums: np.ndarray
    tiles: np.ndarray
    inverse: np.ndarray  # float32 [TILE]: the factors of sums
    sinks: np.ndarray  # float32 [TILE]
    rows: np.ndarray  # int64 [TILE]: the row of each lane
    heads: np.ndarray  # int64 [TILE]
    tail: np.ndarray  # uint16 [rows + 2 * TILE, dim]
    paths: np.ndarray  # int64 [TILE, rows]: see path_kernel.ancestors
    depths: np.ndarray  # int64 [TILE]
    ends: np.ndarray  # int64 [TILE]: the lane after the last one of each row


@njit(nogil=True, cache=True)
def _whole(count):  # type: ignore[no-untyped-def]
    """Returns `count` rounded up to a whole tile."""
    return (count + TILE - 1) // TILE * TILE


@njit(nogil=True, cache=True, inline="always")
def _next(address, array):  # type: ignore[no-untyped-def]
    """Returns the next aligned address after an array; no row of a tile that starts there lies in two cache lines."""
    return (address + array.nbytes + ROW_BYTES - 1) // ROW_BYTES * ROW_BYTES


@njit(nogil=True, cache=True)
def _work_at(at, dim, longest, most_rows):  # type: ignore[no-untyped-def]
    """Returns (work, the address after it) for spans of up to most_rows rows with up to `longest` keys.

    The arrays have no owner: Numba counts references to owned arrays wherever they are passed on.
    """
    keys, wide = _whole(longest) + 2 * TILE, (dim + AT_ONCE * TILE - 1) // (AT_ONCE * TILE) * AT_ONCE * TILE
    lanes = carray(as_pointer(at), (TILE, dim), np.uint16)
    at = _next(at, lanes)
    queries = carray(as_pointer(at), (dim // 2, 2 * TILE), np.uint32)
    at = _next(at, queries)
    scores = carray(as_pointer(at), (2 * TILE, keys), np.float32)
    at = _next(at, scores)
    weights = carray(as_pointer(at), (2, 2 * TILE, keys), np.uint32)
    at = _next(at, weights)
    sums = carray(as_pointer(at), (2 * TILE, wide), np.float32)
    at = _next(at, sums)
    spare_sums = carray(as_pointer(at), (TILE, wide), np.float32)
    at = _next(at, spare_sums)
    tiles = carray(as_pointer(at), (AT_ONCE * TILE, TILE), np.float32)
    at = _next(at, tiles)
    inverse = carray(as_pointer(at), TILE, np.float32)
    at = _next(at, inverse)
    sinks = carray(as_pointer(at), TILE, np.float32)
    at = _next(at, sinks)
    rows = carray(as_pointer(at), TILE, np.int64)
    at = _next(at, rows)
    heads = carray(as_pointer(at), TILE, np.int64)
    at = _next(at, heads)
    tail = carray(as_pointer(at), (most_rows + 2 * TILE, dim), np.uint16)
    at = _next(at, tail)
    paths = carray(as_pointer(at), (TILE, most_rows), np.int64)
    at = _next(at, paths)
    depths = carray(as_pointer(at), TILE, np.int64)
    at = _next(at, depths)
    ends = carray(as_pointer(at), TILE, np.int64)
    at = _next(at, ends)
    arrays = (lanes, queries, scores, weights, sums, spare_sums, tiles, inverse, sinks, rows, heads, tail)
    return _Work(*arrays, paths, depths, ends), at


@njit(nogil=True, cache=True)
def _softmax_weights(scores, lane, num_keys, num_hidden, until, softcap, sink, weights):  # type: ignore[no-untyped-def]
    """Turns a query's num_keys scores into weights. The query does not see the first num_hidden keys.

    Returns the factor for the sums of these weights.
    """
    if softcap > 0:
        tiles.cap_in_place(scores, lane, num_keys, softcap)
    for i in range(num_hidden):
        scores[lane, i] = -np.inf
    inverse = softmax_weights(scores, lane, num_keys, sink)
    matrix.to_weights(scores, lane, num_keys, until, weights[0], weights[1])
    return inverse


@njit(nogil=True, cache=True)
def _first_seen(end, window):  # type: ignore[no-untyped-def]
    """Returns the first key that is visible to a row whose keys end at `end`. window 0: there is none."""
    return max(0, end - window) if window > 0 else 0


@njit(nogil=True, cache=True)
def _attend_chain(planes, heads, context, count, window, scales, work):  # type: ignore[no-untyped-def]
    """Attends for rows that form a chain after the context. Each takes all keys; invisible ones weigh nothing."""
    end = context + work.rows[count - 1] + 1
    begin = _first_seen(context + work.rows[0] + 1, window) // TILE * TILE
    shared, until = end // TILE * TILE, _whole(end)
    # A slab ends with a whole tile, so memory after the last key can be read. Scores of that memory are not used.
    for head in range(heads[0], heads[1]):
        lane = (head - heads[0]) * count
        keys = planes[0][head]
        matrix.score(work.queries, lane, count, keys, begin, until, work.scores, 0, work.tiles, scales[0])
    for lane in range((heads[1] - heads[0]) * count):
        own_end = context + work.rows[lane] + 1
        num_hidden = _first_seen(own_end, window) - begin
        what = (lane, own_end - begin, num_hidden, until - begin, scales[1], work.sinks[lane])
        work.inverse[lane] = _softmax_weights(work.scores, *what, work.weights)
    for head in range(heads[0], heads[1]):
        values = planes[1][head]
        for place in range(shared, end):
            matrix.copy_row(values, place, work.tail, place - shared)
        for i in range(end - shared, until - shared):
            matrix.clear_row(work.tail, i)
        lane, tail = (head - heads[0]) * count, (work.tail, until - shared)
        matrix.weighted_sum(work.weights, lane, values, begin, shared, *tail, work.sums)


@njit(nogil=True, cache=True)
def _straight(context, paths, depths, count):  # type: ignore[no-untyped-def]
    """Returns how many shared ancestors of the first `count` rows directly follow the context, one after another."""
    common, limit = 0, depths[:count].min()
    while common < limit:
        for i in range(count):
            if paths[i, depths[i] - 1 - common] != context + common:
                return common
        common += 1
    return common


@njit(nogil=True, cache=True)
def _copy_tail(plane, begin, context, path, depth, tail):  # type: ignore[no-untyped-def]
    """Copies a row's keys or values from position `begin` on, and zeros up to a whole tile; returns their number."""
    count = context + depth - begin
    for i in range(count):
        behind = begin + i - context
        matrix.copy_row(plane, begin + i if behind < 0 else path[depth - 1 - behind], tail, i)
    for i in range(count, _whole(count)):
        matrix.clear_row(tail, i)
    return count


@njit(nogil=True, cache=True)
def _attend_tree(planes, heads, context, count, window, start, parents, scales, work):  # type: ignore[no-untyped-def]
    """Attends for rows of a tree, or for one row under a window."""
    first_row = work.rows[0]
    num_rows = work.rows[count - 1] - first_row + 1
    for i in range(num_rows):
        work.depths[i] = ancestors(parents, start, first_row + i, context, work.paths[i])
        work.ends[i] = np.searchsorted(work.rows[:count], first_row + i, side="right")
    first = _first_seen(context + work.depths[0], window)
    begin = first // TILE * TILE
    shared = max(begin, (context + _straight(context, work.paths, work.depths, num_rows)) // TILE * TILE)
    for head in range(heads[0], heads[1]):
        keys, at, lane = planes[0][head], (head - heads[0]) * count, (head - heads[0]) * count
        matrix.score(work.queries, lane, count, keys, begin, shared, work.scores, 0, work.tiles, scales[0])
        for i in range(num_rows):
            until = at + work.ends[i]
            num_own = _copy_tail(keys, shared, context, work.paths[i], work.depths[i], work.tail)
            own = (work.tail, 0, _whole(num_own), work.scores, shared - begin, work.tiles, scales[0])
            matrix.score(work.queries, lane, until - lane, *own)
            num_keys = shared - begin + num_own
            for each in range(lane, until):
                what = (each, num_keys, first - begin, _whole(num_keys), scales[1], work.sinks[each])
                work.inverse[each] = _softmax_weights(work.scores, *what, work.weights)
            lane = until
    for head in range(heads[0], heads[1]):
        values, at, lane = planes[1][head], (head - heads[0]) * count, (head - heads[0]) * count
        matrix.weighted_sum(work.weights, lane, values, begin, shared, work.tail, 0, work.sums)
        for i in range(num_rows):
            until = at + work.ends[i]
            num_own = _copy_tail(values, shared, context, work.paths[i], work.depths[i], work.tail)
            rest = (shared - begin, work.tail, _whole(num_own))
            matrix.accumulate_weighted_sum(work.weights, lane, until - lane, *rest, work.sums, work.spare_sums)
            lane = until


@njit(nogil=True, cache=True)
def _attend_block(query, planes, heads, span, chain, items, group, parents, out, window, scales, sinks, work):  # type: ignore[no-untyped-def]
    """Attends for some (row, head) items of a span over some K/V heads: at most TILE items, over all heads together.

    span: (row start, rows, context length), whose first `chain` rows form a chain. items: [first, end), counted over
    the span's rows and the `group` heads of a K/V head. heads: [first, end) of the K/V heads.
    """
    (start, _, context), (at, end) = span, items
    count = end - at
    for head in range(heads[0], heads[1]):
        for i in range(count):
            lane, row, own = (head - heads[0]) * count + i, (at + i) // group, head * group + (at + i) % group
            work.rows[lane], work.heads[lane] = row, own
            work.sinks[lane] = sinks[own] if len(sinks) else -np.inf
            matrix.copy_row(vector(query, start + row, own, out.shape[2], out.dtype), 0, work.lanes, lane)
    matrix.transpose_queries(work.lanes, work.queries)
    if work.rows[count - 1] < chain:
        _attend_chain(planes, heads, context, count, window, scales, work)
    else:
        _attend_tree(planes, heads, context, count, window, start, parents, scales, work)
    for lane in range((heads[1] - heads[0]) * count):
        matrix.store_output(work.sums, lane, work.inverse[lane], out[start + work.rows[lane]], work.heads[lane])


@njit(nogil=True, cache=True)
def _attend_part(query, planes, heads, span, part, group, parents, out, window, scales, sinks, work):  # type: ignore[no-untyped-def]
    """Attends for the rows [first, end) of a span over the K/V heads [first, end), block by block."""
    first, last = part[0] * group, part[1] * group
    if span[1] + span[2] <= window:  # the window hides nothing yet
        window = 0
    chain = 0
    while chain < span[1] and parents[span[0] + chain] == chain - 1:
        chain += 1
    width = group if window > 0 and part[1] > chain else last - first  # rows of a tree differ in their first key
    at_once = max(1, TILE // width)
    for head in range(heads[0], heads[1], at_once):
        some = (head, min(head + at_once, heads[1]))
        for begin in range(first, last, width):
            for at in range(begin, begin + width, TILE):
                items = (at, min(at + TILE, begin + width))
                what = (chain, items, group, parents, out, window, scales, sinks, work)
                _attend_block(query, planes, some, span, *what)


@functools.cache
def attend_loop() -> CFunc[Any]:
    """Returns path_kernel.attend_loop for bfloat16 (uint16). dim must be a multiple of PAIRS.

    A block holds the queries of as many of a thread's K/V heads as fit.
    """
    dtype = np.dtype(np.uint16)

    @cfunc(types.void(types.int64), nopython=True, cache=True)
    def loop(job_address):  # type: ignore[no-untyped-def]
        job = record_at(job_address, SPAN_JOB)
        spans, parents, query, key, value = arrays_of(job)
        num_heads, dim, num_spans, part_rows = job.num_heads, job.dim, job.num_spans, job.part_rows
        num_kv_heads, at_once = num_heads // job.group, job.heads_at_once
        out = carray(as_pointer(job.out), (job.num_tokens, num_heads, dim), dtype)
        sinks = carray(as_pointer(job.sinks), num_heads if job.sinks != 0 else 0, np.float32)
        scales = (job.scale, job.softcap)
        size = (dim, job.longest, job.most_rows)
        memory = np.empty(_work_at(0, *size)[1] + ROW_BYTES, np.uint8)
        work, _ = _work_at(_next(memory.ctypes.data - 1, memory[:1]), *size)
        matrix.begin_tiles()
        num_parts, num_groups = (job.most_rows + part_rows - 1) // part_rows, (num_kv_heads + at_once - 1) // at_once
        while True:
            unit = claim(job_address + NEXT_AT)
            if unit >= num_spans * num_groups * num_parts:
                break
            s, head = unit // num_parts // num_groups, unit // num_parts % num_groups * at_once
            first_row = unit % num_parts * part_rows
            if first_row >= spans[s, 1]:
                continue
            planes, span = planes_of(job, s, dtype), (spans[s, 0], spans[s, 1], spans[s, 2])
            heads = (head, min(head + at_once, num_kv_heads))
            if job.stores != 0:
                store_heads(planes, heads, span, key, value)
            part = (first_row, min(first_row + part_rows, span[1]))
            what = (part, job.group, parents, out, job.window, scales, sinks, work)
            _attend_part(query, planes, heads, span, *what)
        matrix.end_tiles()
        memory[0] = 0  # kept alive until here

    compiled: CFunc[Any] = loop
    return compiled
