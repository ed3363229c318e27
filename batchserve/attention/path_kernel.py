"""Tree attention as one compiled loop nest: every row reduces its keys in the order of their positions.

A row at position p always has the same keys in the same order (context, its ancestors, itself), whatever else is in the
batch. The arithmetic of one (row, key) does not depend on any other (tiles.py). Results are therefore bitwise equal
under any batching, chunking or drafting. One call serves all requests of a layer.

A row that sees NaN is NaN; one that sees an infinite V may be. Rows in other branches of its tree do not affect a row.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import carray, types

from batchserve.attention import tiles
from batchserve.attention.span_job import NEXT_AT, SPAN_JOB, arrays_of, planes_of, store_heads, vector
from batchserve.attention.tiles import LANES
from batchserve.native.addresses import as_pointer, claim, record_at
from batchserve.native.jit import cfunc, njit
from batchserve.native.vector_code import WIDTH

if TYPE_CHECKING:
    from numba.core.ccallback import CFunc


@njit(nogil=True, cache=True)
def ancestors(parents, start, row, context, path):  # type: ignore[no-untyped-def]
    """Writes the slab places of a row's ancestors and of the row itself to path, leaf first; returns their number."""
    depth = 0
    while row >= 0:
        path[depth] = context + row
        depth += 1
        row = parents[start + row]
    return depth


@njit(nogil=True, cache=True)
def _common_ancestors(paths, depths, count):  # type: ignore[no-untyped-def]
    """Returns how many ancestors, from the root on, the first `count` lanes share."""
    common, limit = 0, depths[:count].min()
    while common < limit:
        place = paths[0, depths[0] - 1 - common]
        for lane in range(1, count):
            if paths[lane, depths[lane] - 1 - common] != place:
                return common
        common += 1
    return common


@njit(nogil=True, cache=True)
def _place(j, first, in_context, path, depth):  # type: ignore[no-untyped-def]
    """Returns the place of a row's j-th key: in the context, then on its path. Past the end it is the last key's."""
    behind = j - in_context
    return first + j if behind < 0 else path[max(0, depth - 1 - behind)]


@njit(nogil=True, cache=True)
def _places(j, first, in_context, path, depth):  # type: ignore[no-untyped-def]
    """Returns the places of four of a row's keys, from the j-th on."""
    return (
        _place(j, first, in_context, path, depth),
        _place(j + 1, first, in_context, path, depth),
        _place(j + 2, first, in_context, path, depth),
        _place(j + 3, first, in_context, path, depth),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def softmax_weights(scores, lane, num_keys, sink):  # type: ignore[no-untyped-def]
    """Turns a query's scores into exponentials, followed by zeros up to a multiple of four; returns 1 / their sum.

    sink: a logit that takes some of the probability and adds no value, -inf if there is none.
    """
    if sink == -np.inf:
        return np.float32(1.0) / tiles.exp_in_place(scores, lane, num_keys)
    scores[lane, num_keys] = sink  # one more key, after the others, without a value
    total = tiles.exp_in_place(scores, lane, num_keys + 1)
    scores[lane, num_keys] = 0.0
    return np.float32(1.0) / total


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_block(count, planes, context, first, paths, depths, work, softcap, sinks):  # type: ignore[no-untyped-def]
    """Attends for `count` (row, head) queries, [4, padded], over one K/V head. The outputs are written to sums.

    All queries see the context from `first` on, then their common ancestors, then each its own. Keys are taken in fours
    from a row's first key on, wherever they are in memory. sinks [4]: a logit per query that takes some of the
    probability and adds no value, -inf if there is none. No sum depends on what else is in the block (tiles.py). That
    rules out fastmath, which could also reorder the sums of the tiles.
    """
    keys, values = planes
    queries, sums, scores, inverse = work
    in_context = context - first
    common = in_context + _common_ancestors(paths, depths, count)
    whole, shared = in_context // 4 * 4, common // 4 * 4
    tiles.score(queries, count, keys, first, first + whole, scores)
    for j in range(whole, shared, 4):
        tiles.score_four(queries, 0, keys, _places(j, first, in_context, paths[0], depths[0]), scores, j)
    sums[:count] = 0
    for lane in range(count):
        num_keys = in_context + depths[lane]
        for j in range(shared, num_keys, 4):
            places = _places(j, first, in_context, paths[lane], depths[lane])
            tiles.score_one(queries, lane, keys, places, scores, j)
        if softcap > 0:
            tiles.cap_in_place(scores, lane, num_keys, softcap)
        inverse[lane] = softmax_weights(scores, lane, num_keys, sinks[lane])
    tiles.add_weighted(sums, count, values, first, first + whole, scores)
    for j in range(whole, shared, 4):
        tiles.add_four(sums, 0, values, _places(j, first, in_context, paths[0], depths[0]), scores, j)
    for lane in range(count):
        for j in range(shared, in_context + depths[lane], 4):
            places = _places(j, first, in_context, paths[lane], depths[lane])
            tiles.add_one(sums, lane, values, places, scores, j)


@njit(nogil=True, cache=True)
def _attend_head(query, planes, span, part, head, group, parents, out, window, scales, sinks, work, parts):  # type: ignore[no-untyped-def]
    """Attends for some of a span's rows over one K/V head.

    span: (row start, rows, context length). part: [first, end) of its rows. sinks: of every head, or empty.
    """
    start, rows, context = span
    paths, depths, lane_sinks, block = work
    queries, sums, _, inverse = block
    if context + rows <= window:  # the window hides nothing yet
        window = 0
    # Under a window rows differ in their first key, so a block holds heads of one row only.
    width = group if window > 0 else (part[1] - part[0]) * group
    for begin in range(part[0] * group, part[1] * group, width):
        for at in range(begin, begin + width, LANES):
            first, count = 0, min(LANES, begin + width - at)
            for lane in range(count):
                row, head_of_lane = (at + lane) // group, head * group + (at + lane) % group
                found = vector(query, start + row, head_of_lane, out.shape[2], out.dtype)
                tiles.spread(found[0], scales[0], parts, queries[lane])
                lane_sinks[lane] = sinks[head_of_lane] if len(sinks) else -np.inf
                depths[lane] = ancestors(parents, start, row, context, paths[lane])
                if window > 0:
                    first = max(0, context + depths[lane] - window)
                    depths[lane] -= max(0, first - context)
                    first = min(first, context)
            _attend_block(count, planes, context, first, paths, depths, block, scales[1], lane_sinks)
            for lane in range(count):
                item = at + lane
                tiles.deinterleave_output(
                    sums[lane], inverse[lane], parts, out[start + item // group, head * group + item % group]
                )


@functools.cache
def attend_loop(element: str) -> CFunc[Any]:
    """Returns the loop over all (span, K/V head, part of its rows), compiled for "uint16" (bfloat16) or "float32".

    It takes the address of a job (span_job.py) and writes the spans' rows of `out`. K and V must have the same dim.
    """
    dtype = np.dtype(element)
    parts = 4 // dtype.itemsize

    @cfunc(types.void(types.int64), nopython=True, cache=True)
    def loop(job_address):  # type: ignore[no-untyped-def]
        job = record_at(job_address, SPAN_JOB)
        spans, parents, query, key, value = arrays_of(job)
        dim, group, longest, num_heads = job.dim, job.group, job.longest, job.num_heads
        num_kv_heads = num_heads // group
        out = carray(as_pointer(job.out), (job.num_tokens, num_heads, dim), dtype)
        sinks = carray(as_pointer(job.sinks), num_heads if job.sinks != 0 else 0, np.float32)
        scales = (job.scale, job.softcap)
        size = tiles.padded(dim, parts)
        lanes = (np.zeros((LANES, size), np.float32), np.zeros((LANES, size), np.float32))
        block = (lanes[0], lanes[1], np.zeros((LANES, longest + 1 + WIDTH), np.float32), np.zeros(LANES, np.float32))
        paths, lane_sinks = np.zeros((LANES, job.most_rows), np.int64), np.zeros(LANES, np.float32)
        work = (paths, np.zeros(LANES, np.int64), lane_sinks, block)
        num_parts = (job.most_rows + job.part_rows - 1) // job.part_rows
        while True:
            unit = claim(job_address + NEXT_AT)
            if unit >= job.num_spans * num_kv_heads * num_parts:
                break
            s, head = unit // num_parts // num_kv_heads, unit // num_parts % num_kv_heads
            first_row = unit % num_parts * job.part_rows
            if first_row >= spans[s, 1]:
                continue
            planes, span = planes_of(job, s, dtype), (spans[s, 0], spans[s, 1], spans[s, 2])
            if job.stores != 0:
                store_heads(planes, (head, head + 1), span, key, value)
            own, part = (planes[0][head], planes[1][head]), (first_row, min(first_row + job.part_rows, span[1]))
            _attend_head(query, own, span, part, head, group, parents, out, job.window, scales, sinks, work, parts)

    compiled: CFunc[Any] = loop
    return compiled
