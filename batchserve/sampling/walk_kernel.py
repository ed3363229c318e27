"""Compiled verify.walk_tree for all greedy requests of a step at once."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np
from numba import carray

from batchserve.native.addresses import as_pointer
from batchserve.native.jit import njit
from batchserve.sampling.sampler import NO_TOKEN


@njit(cache=True, nogil=True)
def walk_greedy(who, batch, tokens, recorded, drafts, walked):  # type: ignore[no-untyped-def]
    """Walks the trees of the requests at the places `who` in the batch, where every row's token is known.

    batch: rows of Spans, num_pending and first_logit of RaggedBatch; drafts: its (input_ids, parents, is_verified).
    tokens int64: the token after every logit row. If a request has a recorded text (Recordings.places), that gives the
    token at each position instead, as far as it reaches.

    Fills walked [3, num_rows], for each request from its first row on: the accepted rows (counted within the request);
    their tokens and the bonus token; and, only in the first row, the number of accepted rows.
    """
    spans, num_pending, first_logit = batch
    token_ids, parents, is_verified = drafts
    paths, emitted, lengths = walked[0], walked[1], walked[2]
    for i in who:
        start, size, row = spans[i, 0], spans[i, 1], num_pending[i] - 1
        logit, position = first_logit[i] - row, spans[i, 2] + num_pending[i]
        known = carray(as_pointer(recorded[i, 0]), recorded[i, 1], np.int64)
        token = known[position] if position < len(known) else tokens[logit + row]
        emitted[start], depth = token, 0
        # Parents come before their children, so one pass meets the nodes of the path in order.
        for node in range(row + 1, size):
            if parents[start + node] != row or token_ids[start + node] != token or not is_verified[start + node]:
                continue
            here = position + depth + 1
            after = known[here] if here < len(known) else tokens[logit + node]
            if after == NO_TOKEN:  # computed again in the next step, unless the answer ends before it
                break
            row, token = node, after
            paths[start + depth], emitted[start + depth + 1] = row, token
            depth += 1
        lengths[start] = depth


def compile_kernels() -> None:
    """Compiles walk_greedy, or loads it from the cache on disk."""
    numbers, flags, one = np.zeros((2, 1), np.int64), np.ones(1, np.bool_), np.ones(1, np.int64)
    drafts, recorded, who = (one, np.zeros(1, np.int32), flags), np.zeros((1, 2), np.int64), np.zeros(1, np.int64)
    batch, walked = (np.array([[0, 1, 0]]), one, numbers[0]), np.zeros((3, 1), np.int64)
    walk_greedy(who, batch, numbers[1], recorded, drafts, walked)
