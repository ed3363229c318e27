"""Jobs for compiled attention: a step's spans, and a layer's q, k and v where the model has left them in memory.

The attention loop can also store K and V of new rows in their slabs. A thread that attends for all of a span's rows
over a K/V head stores that head first, so the thread's caches hold what it reads next. If several threads share a
span's rows, or another kernel takes some spans, everything is stored beforehand (`store_loop`).
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import carray, types

from batchserve.native.addresses import as_pointer, claim, offset, record_at
from batchserve.native.jit import cfunc, njit

if TYPE_CHECKING:
    from numba.core.ccallback import CFunc

STATES = (np.int64, (3,))  # the address of [num_tokens, heads, dim], and the bytes between tokens and between heads
SPAN_JOB = np.dtype(
    [
        # The step; the next three are addresses.
        ("num_tokens", np.int64),
        ("num_spans", np.int64),
        ("capacities", np.int64),  # int64 [num_spans]
        ("spans", np.int64),  # int64 [num_spans, 3]: row start, rows, context length
        ("parents", np.int64),  # int32 [num_tokens], counted inside the span
        ("longest", np.int64),  # the most keys of a row
        ("most_rows", np.int64),  # of a span
        # The layer; the next three are addresses.
        ("planes", np.int64),  # int64 [num_spans, 2]: of the K and V planes, [num_kv_heads, capacity, dim]
        ("out", np.int64),  # [num_tokens, num_heads, dim]
        ("sinks", np.int64),  # float32 [num_heads]; 0: none
        ("num_heads", np.int64),
        ("dim", np.int64),
        ("group", np.int64),  # query heads per K/V head
        ("window", np.int64),  # 0: none
        ("scale", np.float32),
        ("softcap", np.float32),  # 0: none
        ("query", *STATES),
        ("key", *STATES),
        ("value", *STATES),
        # Threads with the same job share it. A unit of work is at most part_rows of a span's rows over heads_at_once
        # K/V heads (1 except in matrix_kernel).
        ("part_rows", np.int64),
        ("heads_at_once", np.int64),
        ("stores", np.int64),  # whether the attention loop stores K and V first
        ("next", np.int64),  # the first unclaimed unit, initially 0
    ]
)
NEXT_AT = offset(SPAN_JOB, "next")


@njit(nogil=True, cache=True)
def begin_jobs(jobs, slabs, spans, parents, planes, capacities, shares):  # type: ignore[no-untyped-def]
    """Writes a step's spans into the jobs of a native program, SPAN_JOB [num_layers, 2].

    Of a layer's two jobs one stores K and V and one attends. Returns whether the latter stores K and V itself.
    slabs: SlabAllocator.slabs(). spans, parents: those of base.Spans. planes int64 [num_layers, num_spans or more, 2]
    and capacities [num_spans or more] are filled. shares: (fewest rows of a span in a unit; most parts of a span; units
    per thread to aim for; work that one thread does alone; threads; query heads per K/V head; K/V heads).
    """
    part_rows, max_parts, turns, alone, num_threads, group, num_kv_heads = shares
    longest = most_rows = work = 0
    for s in range(len(spans)):
        rows, keys = spans[s, 1], spans[s, 1] + spans[s, 2]
        longest, most_rows = max(longest, keys), max(most_rows, rows)
        work += (rows * group + 3) // 4 * num_kv_heads * keys
        own = carray(as_pointer(slabs[s, 0]), (planes.shape[0], 2), np.int64)
        capacities[s] = slabs[s, 1]
        for layer in range(planes.shape[0]):
            planes[layer, s, 0], planes[layer, s, 1] = own[layer, 0], own[layer, 1]
    part_rows = max(part_rows, (most_rows + max_parts - 1) // max_parts)
    heads_at_once = max(1, num_kv_heads * len(spans) // (turns * (num_threads if work > alone else 1)))
    stores = most_rows <= part_rows
    for layer in range(planes.shape[0]):
        for part in range(2):
            job = jobs[layer, part]
            job.num_tokens, job.num_spans = len(parents), len(spans)
            job.capacities, job.spans, job.parents = capacities.ctypes.data, spans.ctypes.data, parents.ctypes.data
            job.longest, job.most_rows = longest, most_rows
            job.planes = planes.ctypes.data + layer * planes.strides[0]
            job.part_rows, job.heads_at_once, job.stores, job.next = part_rows, heads_at_once, stores, 0
    return stores


@njit(nogil=True, cache=True)
def arrays_of(job):  # type: ignore[no-untyped-def]
    """Returns (spans, parents, q, k, v); `vector` takes the last three."""
    spans = carray(as_pointer(job.spans), (job.num_spans, 3), np.int64)
    parents = carray(as_pointer(job.parents), job.num_tokens, np.int32)
    query, key = (job.query[0], job.query[1], job.query[2]), (job.key[0], job.key[1], job.key[2])
    return spans, parents, query, key, (job.value[0], job.value[1], job.value[2])


@njit(nogil=True, cache=True)
def vector(states, token, head, dim, dtype):  # type: ignore[no-untyped-def]
    """Returns the q, k or v vector of a token and head, [1, dim]."""
    address, by_token, by_head = states
    return carray(as_pointer(address + token * by_token + head * by_head), (1, dim), dtype)


@njit(nogil=True, cache=True)
def planes_of(job, s, dtype):  # type: ignore[no-untyped-def]
    """Returns the K and V planes of span s, [num_kv_heads, capacity, dim]."""
    addresses = carray(as_pointer(job.planes), (job.num_spans, 2), np.int64)
    capacities = carray(as_pointer(job.capacities), job.num_spans, np.int64)
    shape = (job.num_heads // job.group, capacities[s], job.dim)
    return carray(as_pointer(addresses[s, 0]), shape, dtype), carray(as_pointer(addresses[s, 1]), shape, dtype)


@njit(nogil=True, cache=True)
def store_heads(planes, heads, span, key, value):  # type: ignore[no-untyped-def]
    """Copies a span's new K and V to the places after its context, for the K/V heads [first, end)."""
    keys, values = planes
    start, rows, context = span
    for head in range(heads[0], heads[1]):
        for i in range(rows):
            new_key = vector(key, start + i, head, keys.shape[2], keys.dtype)
            new_value = vector(value, start + i, head, values.shape[2], values.dtype)
            for j in range(keys.shape[2]):
                keys[head, context + i, j] = new_key[0, j]
                values[head, context + i, j] = new_value[0, j]


@functools.cache
def store_loop(element: str) -> CFunc[Any]:
    """Returns the compiled loop that only stores K and V of all spans. element: "uint16" (bfloat16) or "float32"."""
    dtype = np.dtype(element)

    @cfunc(types.void(types.int64), nopython=True, cache=True)
    def loop(job_address):  # type: ignore[no-untyped-def]
        job = record_at(job_address, SPAN_JOB)
        spans, _, _, key, value = arrays_of(job)
        num_kv_heads = job.num_heads // job.group
        while True:
            unit = claim(job_address + NEXT_AT)
            if unit >= job.num_spans * num_kv_heads:
                break
            s, head = unit // num_kv_heads, unit % num_kv_heads
            span = (spans[s, 0], spans[s, 1], spans[s, 2])
            store_heads(planes_of(job, s, dtype), (head, head + 1), span, key, value)

    compiled: CFunc[Any] = loop
    return compiled


def compile_kernels(element: str) -> None:
    """Compiles begin_jobs and store_loop, or loads them from the cache on disk. element: as store_loop takes it."""
    store_loop(element)
    jobs, numbers = np.zeros((0, 2), SPAN_JOB), np.zeros(0, np.int64)
    begin_jobs(
        jobs, numbers.reshape(0, 2), numbers.reshape(0, 3), np.zeros(0, np.int32), numbers.reshape(0, 0, 2), numbers,
        (1, 1, 1, 1, 1, 1, 1),
    )  # fmt: skip
