"""Compiled verify.walk_tree for requests that are sampled or change logits. Each runs on whatever thread is free.

Only the rows that a walk reaches are drawn, so the rows of a request are sequential, but requests run in parallel.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import carray, types

from batchserve.native.addresses import as_pointer, claim, offset, record_at
from batchserve.native.jit import cfunc, njit
from batchserve.row_adjustments import ADJUSTMENTS
from batchserve.sampling.adjust_kernel import adjust, make_room
from batchserve.sampling.draw_kernel import (
    BLOCK,
    LOWEST_TEMPERATURE,
    block_tops,
    draw_allowed,
    floor_of,
    stream_key,
)
from batchserve.sampling.logprobs import NOT_ASKED, RAW, FoundLogprobs, note_logprobs
from batchserve.sampling.sampler import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.request import ResolvedSampling
    from batchserve.row_adjustments import RowAdjustments

# Columns of a request's parameters. FLOOR: draw_kernel.floor_of.
# NUM_LOGPROBS: how many of the likeliest tokens' log
# probabilities are noted, NOT_ASKED: none of any; IS_PROCESSED: as note_logprobs processes them.
TEMPERATURE, TOP_K, TOP_P, FLOOR, NUM_LOGPROBS, IS_PROCESSED, NUM_PARAMS = range(7)
WALK_JOB = np.dtype(  # of walk_loop
    [
        ("num_walks", np.int64),
        ("num_rows", np.int64),
        ("num_requests", np.int64),
        ("num_inputs", np.int64),
        ("logits", np.int64),  # the address of float32 [num_logits, vocab_size]
        ("num_logits", np.int64),
        ("vocab_size", np.int64),
        # Addresses: of the requests' places int64 [num_walks], of parameters float64 [num_walks, NUM_PARAMS], of seeds
        # uint64 [num_walks], and of the addresses of ADJUSTMENTS int64 [num_walks] (0: none); then of the arrays of
        # Rows; then of what is found, int64 [3, num_rows].
        ("places", np.int64),
        ("params", np.int64),
        ("seeds", np.int64),
        ("adjustments", np.int64),
        ("spans", np.int64),
        ("num_pending", np.int64),
        ("first_logit", np.int64),
        ("token_ids", np.int64),
        ("parents", np.int64),
        ("is_verified", np.int64),
        ("recorded", np.int64),
        ("walked", np.int64),
        ("values", np.int64),  # the addresses of the arrays of FoundLogprobs, whose rows have max_logprobs tokens
        ("ranks", np.int64),
        ("top_ids", np.int64),
        ("top_values", np.int64),
        ("max_logprobs", np.int64),
        ("next", np.int64),  # the first walk that no thread has begun, initially 0
    ]
)
NEXT_AT = offset(WALK_JOB, "next")


class Rows(NamedTuple):
    """The rows of a step, and the data of their requests; see RaggedBatch.

    spans int64 [num_requests, 3], num_pending and first_logit int64 [num_requests]. token_ids int64, parents int32 and
    is_verified bool are of all rows. recorded int64 [num_requests, 2]: Recordings.places.
    """

    spans: np.ndarray
    num_pending: np.ndarray
    first_logit: np.ndarray
    token_ids: np.ndarray
    parents: np.ndarray
    is_verified: np.ndarray
    recorded: np.ndarray


@njit(cache=True, nogil=True)
def _token_after(row, position, place, param, seed, adjustments, room):  # type: ignore[no-untyped-def]
    """Returns the token at `position`, after a row of logits float32 [vocab_size]. adjustments: an address, or 0.

    place: of the row in the tree.
    """
    if adjustments != 0:
        return _choose(adjust(row, adjustments, position, place, room), position, param, seed)
    return _choose(row, position, param, seed)


@njit(cache=True, nogil=True)
def _note(row, token, param, room, place, found):  # type: ignore[no-untyped-def]
    """Notes the log probabilities of a token that _token_after has returned, if they are asked for."""
    if param[NUM_LOGPROBS] == NOT_ASKED or token == NO_TOKEN:
        return
    if param[IS_PROCESSED] != 0.0:
        adjusted = room[0] if room[0].shape[0] > 0 else row
        note_logprobs(adjusted, param, token, int(param[NUM_LOGPROBS]), place, found)
    else:
        note_logprobs(row, RAW, token, int(param[NUM_LOGPROBS]), place, found)


@njit(cache=True, nogil=True)
def _choose(row, position, param, seed):  # type: ignore[no-untyped-def]
    """Compiled version of sampler.sample_row, and of argmax at temperature 0; row: float32 [vocab_size]."""
    num_nan = 0
    for i in range(row.shape[0]):
        num_nan += row[i] != row[i]
    if num_nan:
        return NO_TOKEN
    tops = block_tops(row)
    if not np.isfinite(tops.max()):
        return NO_TOKEN
    if param[TEMPERATURE] == 0.0:
        block = tops.argmax()
        place = block * BLOCK
        while row[place] != tops[block]:
            place += 1
        return place
    key = stream_key(seed, position)
    return draw_allowed(row, tops, param[TEMPERATURE], int(param[TOP_K]), param[TOP_P], param[FLOOR], key)


@njit(cache=True, nogil=True)
def _walk(i, rows, logits, param, seed, adjustments, walked, found):  # type: ignore[no-untyped-def]
    """Walks the tree of one request; see walk_kernel.walk_greedy. Writes its path to the history of its adjustments."""
    spans, num_pending, first_logit, token_ids, parents, is_verified, recorded = rows
    root = num_pending[i] - 1
    start, size, at, depth = spans[i, 0], spans[i, 1], root, 0
    first, position = first_logit[i] - at, spans[i, 2] + num_pending[i]
    known = carray(as_pointer(recorded[i, 0]), recorded[i, 1], np.int64)
    room = make_room(adjustments, logits.shape[1], position + size)
    drawn = _token_after(logits[first + at], position, 0, param, seed, adjustments, room)
    token = known[position] if position < len(known) else drawn
    walked[1, start] = token
    _note(logits[first + at], token, param, room, start, found)
    for node in range(at + 1, size):
        if parents[start + node] != at or token_ids[start + node] != token or not is_verified[start + node]:
            continue
        here = position + depth + 1
        if adjustments != 0:
            carray(as_pointer(record_at(adjustments, ADJUSTMENTS).history), here, np.int64)[here - 1] = token
        drawn = _token_after(logits[first + node], here, node - root, param, seed, adjustments, room)
        after = known[here] if here < len(known) else drawn
        if after == NO_TOKEN:
            break
        at, token = node, after
        walked[0, start + depth], walked[1, start + depth + 1] = at, token
        depth += 1
        _note(logits[first + at], token, param, room, start + depth, found)
    walked[2, start] = depth


@functools.cache
def walk_loop() -> Any:
    """Returns the compiled loop over the requests of a job. Threads that are given the same job share it."""

    @cfunc(types.void(types.int64), nopython=True, cache=True)
    def loop(job_address):  # type: ignore[no-untyped-def]
        job = record_at(job_address, WALK_JOB)
        count, num_rows, num_requests = job.num_walks, job.num_rows, job.num_requests
        places = carray(as_pointer(job.places), count, np.int64)
        params = carray(as_pointer(job.params), (count, NUM_PARAMS), np.float64)
        seeds = carray(as_pointer(job.seeds), count, np.uint64)
        adjustments = carray(as_pointer(job.adjustments), count, np.int64)
        rows = (
            carray(as_pointer(job.spans), (num_requests, 3), np.int64),
            carray(as_pointer(job.num_pending), num_requests, np.int64),
            carray(as_pointer(job.first_logit), num_requests, np.int64),
            carray(as_pointer(job.token_ids), job.num_inputs, np.int64),
            carray(as_pointer(job.parents), num_rows, np.int32),
            carray(as_pointer(job.is_verified), num_rows, np.bool_),
            carray(as_pointer(job.recorded), (num_requests, 2), np.int64),
        )
        walked = carray(as_pointer(job.walked), (3, num_rows), np.int64)
        logits = carray(as_pointer(job.logits), (job.num_logits, job.vocab_size), np.float32)
        found = (
            carray(as_pointer(job.values), num_rows, np.float32),
            carray(as_pointer(job.ranks), num_rows, np.int64),
            carray(as_pointer(job.top_ids), (num_rows, job.max_logprobs), np.int64),
            carray(as_pointer(job.top_values), (num_rows, job.max_logprobs), np.float32),
        )
        while True:
            w = claim(job_address + NEXT_AT)
            if w >= count:
                break
            _walk(places[w], rows, logits, params[w], seeds[w], adjustments[w], walked, found)

    return loop


NO_LOGPROBS = FoundLogprobs.empty(0, 0)
NO_ADDRESSES = [array.ctypes.data for array in NO_LOGPROBS]


class SampledWalks:
    """The walks of one step. `address` is that of a job for walk_loop, whose arrays live as long as this object.

    logprobs: what the walks find, at the places of `walked`.
    """

    def __init__(
        self,
        places: Sequence[int],
        samplings: Sequence[ResolvedSampling],
        rows: Rows,
        logits: np.ndarray,
        walked: np.ndarray,
        adjustments: Mapping[int, RowAdjustments],
    ) -> None:
        """places: the requests' places in the batch. logits: float32, in one piece. walked: see walk_greedy.

        adjustments: by place, of those that change logits.
        """
        each = [
            (
                s.temperature and max(s.temperature, LOWEST_TEMPERATURE),
                s.top_k,
                s.top_p,
                floor_of(s.min_p),
                NOT_ASKED if s.logprobs is None else s.logprobs,
                s.has_processed_logprobs,
            )
            for s in samplings
        ]
        asked = [s.logprobs for s in samplings if s.logprobs is not None]
        self.logprobs = FoundLogprobs.empty(walked.shape[1], max(asked)) if asked else NO_LOGPROBS
        # In one piece: to ask an array for its address takes a microsecond.
        count = len(places)
        own = np.empty((3 + NUM_PARAMS, count), np.int64)
        own[0], own[1].view(np.uint64)[:] = places, [s.seed for s in samplings]
        own[2] = [adjustments[i].address if i in adjustments else 0 for i in places]
        own[3:].reshape(count, NUM_PARAMS).view(np.float64)[:] = each
        self._arrays = (*rows, walked, own, logits)
        sizes = count, walked.shape[1], len(rows.spans), len(rows.token_ids)
        *addresses, first, logits_at = [array.ctypes.data for array in self._arrays]
        found = [array.ctypes.data for array in self.logprobs] if asked else NO_ADDRESSES
        places_at, seeds_at, adjusted_at, params_at = range(first, first + 4 * 8 * count, 8 * count)
        own_at, most = (places_at, params_at, seeds_at, adjusted_at), self.logprobs.top_ids.shape[1]
        self._job = np.array((*sizes, logits_at, *logits.shape, *own_at, *addresses, *found, most, 0), WALK_JOB)
        self.address = self._job.ctypes.data


def compile_kernels() -> None:
    """Compiles walk_loop, or loads it from the cache on disk."""
    walk_loop()
