"""Compiled part of the mixture drafter that handles all requests of a step in one call.

The forward pass between two steps empties the CPU caches, so a call's fixed cost (arguments, allocations, code that has
to be fetched again) is paid once per step, not once per request. Trees are grown on several threads if there are any:
growing a tree only reads the data that requests share.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, types

from batchserve.draft.mixture_growth import grow, root_visits
from batchserve.draft.mixture_kernels import (
    NODE,
    NUM_COMMON,
    OCCURRENCE,
    OWN,
    ROOM,
    SCOPE,
    SCRATCH,
    count_common,
    initial_weights,
    make_common,
    read_recent,
)
from batchserve.draft.mixture_learning import accept_tokens
from batchserve.draft.mixture_noise import noise_bin_of
from batchserve.draft.mixture_reading import follow_chains, open_chains
from batchserve.draft.text_index import FILLED, MIN_CAPACITY, NUM_ORDERS, TextIndex, source_at
from batchserve.native.addresses import as_pointer, claim, offset, record_at, run_loop
from batchserve.native.jit import cfunc, njit
from batchserve.native.pool import ONE_THREAD

REQUEST = np.dtype(  # own, scope and root are addresses: of TextIndex.address, a scope_addresses and a NODE
    [
        ("own", np.int64),
        ("scope", np.int64),
        ("root", np.int64),  # what the last draft found at the text's end
        ("is_root_known", np.int64),  # whether that is still the end
        ("num_output", np.int64),
        ("next_position", np.int64),
        ("noise_bin", np.int64),
        ("seed", np.uint64),
    ],
    align=True,
)
NUM_WEIGHTS = len(initial_weights())
GROW_JOB = np.dtype(  # of grow_loop
    [
        ("num_requests", np.int64),
        ("at_once", np.int64),  # requests that a thread takes at once
        ("table_size", np.int64),
        ("num_threads", np.int64),  # that there is work memory for
        ("max_nodes", np.int64),  # of a tree
        ("num_links", np.int64),
        ("branch_length", np.int64),
        # Addresses of arrays; see grow_all.
        ("table", np.int64),
        ("slots", np.int64),
        ("sizes", np.int64),
        ("least", np.int64),
        ("nodes", np.int64),
        ("scratches", np.int64),
        ("starts", np.int64),
        ("counts", np.int64),
        ("links", np.int64),
        ("probs", np.int64),
        ("next", np.int64),  # the first piece of at_once requests that no thread has begun, initially 0
        ("next_thread", np.int64),  # the first work memory that no thread has, initially 0
    ]
)
NEXT_AT, NEXT_THREAD_AT = offset(GROW_JOB, "next"), offset(GROW_JOB, "next_thread")


def scope_addresses(
    index: TextIndex, common: tuple[np.ndarray, ...], weights: np.ndarray, seen: np.ndarray
) -> tuple[int, ...]:
    """Returns the addresses of a scope's arrays; as int64 [6], this is what REQUEST's `scope` points to."""
    return tuple(array.ctypes.data for array in (index.address, *common, weights, seen))


@njit(cache=True, nogil=True)
def begin_request(table, slot, own, card, root, found, position, noise_bin, seed):  # type: ignore[no-untyped-def]
    """Fills a row of the table for a request that uses these arrays and whose answer begins at `position`.

    found: ROOM OCCURRENCEs for the root.
    """
    request = table[slot]
    root[0].at[OWN] = found.ctypes.data
    request.own, request.scope, request.root = own.ctypes.data, card.ctypes.data, root.ctypes.data
    request.is_root_known, request.num_output, request.next_position = 0, 0, position
    request.noise_bin, request.seed = noise_bin, seed


@njit(cache=True, nogil=True, inline="always")
def _open(request):  # type: ignore[no-untyped-def]
    """Returns (own source, the scope's source, common, weights, seen, root) of a row of the table."""
    card = carray(as_pointer(request.scope), 6, np.int64)
    common = (
        carray(as_pointer(card[1]), NUM_COMMON, np.int64),
        carray(as_pointer(card[2]), NUM_COMMON, np.int64),
        carray(as_pointer(card[3]), 2, np.int64),
    )
    weights = carray(as_pointer(card[4]), NUM_WEIGHTS, np.float64)
    seen = carray(as_pointer(card[5]), NUM_WEIGHTS, np.int64)
    root = carray(as_pointer(request.root), 1, NODE)
    return source_at(request.own), source_at(card[0]), common, weights, seen, root


@njit(cache=True, nogil=True)
def _read_ahead(table, slots, sizes, scratch):  # type: ignore[no-untyped-def]
    """Prefetches what will be looked up for the ends of the requests' texts."""
    chains, recent = np.empty((2 * NUM_ORDERS * len(slots), 4), np.int64), scratch[0].recent
    count = 0
    for i in range(len(slots)):
        request = table[slots[i]]
        if sizes[i, 0] > 0 and sizes[i, 1] > 0:
            own, scope, _, _, _, _ = _open(request)
            read_recent(own, request.num_output, recent)
            visits = root_visits(sizes[i, 0])
            count = open_chains(own, recent[OWN], visits, chains, count)
            count = open_chains(scope, recent[SCOPE], visits, chains, count)
    scratch[0].read = follow_chains(chains, count)


@njit(cache=True, nogil=True)
def _grow_some(table, slots, bounds, branch_length, work, starts, counts, links, probs):  # type: ignore[no-untyped-def]
    """Grows some requests' trees: counts[i] nodes from starts[i] on. `work` belongs to the calling thread."""
    (sizes, least), (nodes, scratch) = bounds, work
    _read_ahead(table, slots, sizes, scratch)
    for i in range(len(slots)):
        request = table[slots[i]]
        most, depth, start = sizes[i, 0], min(sizes[i, 1], branch_length), starts[i]
        counts[i] = 0
        if most > 0 and depth > 0:
            own, scope, common, weights, _, root = _open(request)
            noise = (request.noise_bin, request.seed, request.next_position)
            mine, my_probs = links[:, start : start + most], probs[start : start + most]
            wanted = (most, depth, least[i])
            counts[i] = grow(
                own, scope, common, request.num_output, noise, wanted, weights, root, nodes, scratch, mine, my_probs
            )
            request.is_root_known = 1


@functools.cache
def grow_loop() -> Any:
    """Returns the compiled loop over a step's requests. Threads that are given the same job share it: each takes its
    own work memory, and then repeatedly the next requests that no thread has begun. A thread for which there is no work
    memory does nothing.
    """

    @cfunc(types.void(types.int64), nopython=True, cache=True)
    def loop(job_address):  # type: ignore[no-untyped-def]
        job = record_at(job_address, GROW_JOB)
        count, num_threads, at_once = job.num_requests, job.num_threads, job.at_once
        table = carray(as_pointer(job.table), job.table_size, REQUEST)
        slots = carray(as_pointer(job.slots), count, np.int64)
        sizes = carray(as_pointer(job.sizes), (count, 3), np.int64)
        least = carray(as_pointer(job.least), count, np.float64)
        nodes = carray(as_pointer(job.nodes), (num_threads, job.max_nodes), NODE)
        scratches = carray(as_pointer(job.scratches), num_threads, SCRATCH)
        starts = carray(as_pointer(job.starts), count, np.int64)
        counts = carray(as_pointer(job.counts), count, np.int64)
        links = carray(as_pointer(job.links), (3, job.num_links), np.int64)
        probs = carray(as_pointer(job.probs), job.num_links, np.float64)
        me = claim(job_address + NEXT_THREAD_AT)
        if me >= num_threads:
            return
        work = (nodes[me], scratches[me : me + 1])
        while True:
            first = claim(job_address + NEXT_AT) * at_once
            if first >= count:
                break
            some = slice(first, min(first + at_once, count))
            bounds = (sizes[some], least[some])
            _grow_some(table, slots[some], bounds, job.branch_length, work, starts[some], counts[some], links, probs)

    return loop


@njit(cache=True, nogil=True)
def grow_all(table, slots, bounds, branch_length, work, memory, trees, loop, team):  # type: ignore[no-untyped-def]
    """Grows the trees of the requests at `slots` of the table, and stores their nodes one tree after another.

    See mixture_growth.grow. bounds: those of DraftQueries and its min_probs. work: every thread's nodes [num_threads,
    most nodes of a tree] and scratch [num_threads]. memory: GROW_JOB [1] and counts [num_requests]. trees, which are
    filled: starts [num_requests + 1], with 0 at first, links [3, most nodes of all trees] and probs. loop: grow_loop's
    address. team: (start, size, pool) of a Team, which may have more threads than there is work memory for.
    """
    (sizes, least), (nodes, scratches), (jobs, counts), (starts, links, probs) = bounds, work, memory, trees
    num_threads = len(scratches)
    for i in range(len(slots)):
        starts[i + 1] = starts[i] + max(0, sizes[i, 0])
    job = jobs[0]
    job.num_requests, job.num_threads, job.table_size = len(slots), num_threads, len(table)
    # Prefetching is faster for many requests at once, but threads should finish at the same time.
    job.at_once = len(slots) if num_threads == 1 else max(1, len(slots) // (2 * num_threads))
    job.max_nodes, job.num_links, job.branch_length = nodes.shape[1], links.shape[1], branch_length
    job.table, job.slots, job.sizes, job.least = (
        table.ctypes.data,
        slots.ctypes.data,
        sizes.ctypes.data,
        least.ctypes.data,
    )
    job.nodes, job.scratches, job.starts = nodes.ctypes.data, scratches.ctypes.data, starts.ctypes.data
    job.counts, job.links, job.probs = counts.ctypes.data, links.ctypes.data, probs.ctypes.data
    job.next, job.next_thread = 0, 0
    run_loop(team, loop, jobs.ctypes.data)
    end = 0
    for i in range(len(slots)):
        begin = starts[i]
        for k in range(counts[i]):
            for j in range(3):
                links[j, end + k] = links[j, begin + k]
            probs[end + k] = probs[begin + k]
        starts[i] = end
        end += counts[i]
    starts[len(slots)] = end


@njit(cache=True, nogil=True)
def accept_all(table, slots, starts, token_ids, max_learned, first, nodes, scratch):  # type: ignore[no-untyped-def]
    """Learns the tokens starts[i] to starts[i + 1] of the requests at `slots`, from request `first` on.

    Returns the first request whose text has no room for its tokens, or the number of requests if there is none; see
    mixture_learning.accept_tokens.
    """
    for i in range(first, len(slots)):
        request = table[slots[i]]
        tokens = token_ids[starts[i] : starts[i + 1]]
        own, scope, _, weights, seen, root = _open(request)
        if own[3][FILLED] + len(tokens) > len(own[0]):
            return i
        noise = (request.noise_bin, request.seed, request.next_position)
        is_root_known = request.is_root_known != 0
        what = (own, scope, tokens, request.num_output, noise, weights, seen, root, is_root_known)
        accept_tokens(*what, nodes, scratch, max_learned)
        if len(tokens):
            request.is_root_known = 0
        request.num_output += len(tokens)
        request.next_position += len(tokens)
    return len(slots)


def compile_kernels() -> None:
    """Compiles everything that a drafter calls, or loads it from the cache on disk."""
    tokens = np.array([1, 2, 1, 2, 1], np.int32)
    index, common, weights = TextIndex(8), make_common(), initial_weights()
    seen = np.zeros(NUM_WEIGHTS, np.int64)  # kept alive here: compiled code only knows its address
    index.append(tokens)
    TextIndex(4 * MIN_CAPACITY).reserve(MIN_CAPACITY + 1)  # compiles split_buckets, which only a growing text calls
    count_common(common, tokens)
    root, nodes, scratch = np.zeros(1, NODE), np.zeros((1, 2), NODE), np.zeros(1, SCRATCH)
    found, room = np.zeros(ROOM, OCCURRENCE), np.zeros(2 * ROOM, OCCURRENCE)
    scratch["room"] = room.ctypes.data
    card = np.array(scope_addresses(index, common, weights, seen))
    table, slots, starts = np.zeros(1, REQUEST), np.zeros(1, np.int64), np.array([0, 1])
    noise_bin, seed = noise_bin_of(1.0, NUM_WEIGHTS), np.uint64(0)
    begin_request(table, 0, index.address, card, root, found, 5, noise_bin, seed)
    accept_all(table, slots, starts, tokens[:1], 1, 0, nodes[0], scratch)
    bounds, trees = (np.array([[2, 2, 2]]), np.zeros(1)), (starts, np.zeros((3, 2), np.int64), np.zeros(2))
    memory = np.zeros(1, GROW_JOB), np.zeros(1, np.int64)
    grow_all(table, slots, bounds, 2, (nodes, scratch), memory, trees, grow_loop().address, tuple(ONE_THREAD))
