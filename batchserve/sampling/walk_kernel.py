"""verify.walk_tree for all requests of a step at once, where every row's token is known."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np
from numba import carray, njit

from batchserve.addresses import as_pointer
from batchserve.sampling.sampler import NO_TOKEN


@njit(cache=True, nogil=True)
def walk_trees(spans, num_pending, first_logit, tokens, recorded, drafts, walked):  # type: ignore[no-untyped-def]
    """Walk every tree; where first_logit is negative there is none.

    spans, num_pending and first_logit are those of RaggedBatch (spans: its rows), drafts its (input_ids, parents,
    is_verified). tokens int64: behind every logit row; but where a request has a recorded text (Recordings.places),
    that says what is at each position, as far as it reaches.

    Fills walked [3, num_rows], request behind request: the accepted rows (counted inside of the request); their tokens
    and the one behind them; and of each request the number of accepted rows.
    """
    paths, emitted, lengths = walked[0], walked[1], walked[2]
    token_ids, parents, is_verified = drafts
    num_paths, num_emitted = 0, 0
    for i in range(len(spans)):
        lengths[i] = 0
        if first_logit[i] < 0:
            continue
        start, size, row = spans[i, 0], spans[i, 1], num_pending[i] - 1
        logit, position = first_logit[i] - row, spans[i, 2] + num_pending[i]
        known = carray(as_pointer(recorded[i, 0]), recorded[i, 1], np.int64)
        token = known[position] if position < len(known) else tokens[logit + row]
        emitted[num_emitted] = token
        num_emitted += 1
        # Parents come before their children, so one pass meets the nodes of the path in order.
        for node in range(row + 1, size):
            if parents[start + node] != row or token_ids[start + node] != token or not is_verified[start + node]:
                continue
            depth = lengths[i] + 1
            after = known[position + depth] if position + depth < len(known) else tokens[logit + node]
            if after == NO_TOKEN:  # found again in the next step, unless the answer has ended before it
                break
            row, token, lengths[i] = node, after, depth
            paths[num_paths], emitted[num_emitted] = row, token
            num_paths += 1
            num_emitted += 1


def compile_kernels() -> None:
    """Compile walk_trees, or load it from the cache on disk."""
    numbers, flags, one = np.zeros((5, 1), np.int64), np.ones(1, np.bool_), np.ones(1, np.int64)
    drafts, recorded = (one, np.zeros(1, np.int32), flags), np.zeros((1, 2), np.int64)
    walk_trees(np.array([[0, 1, 0]]), one, numbers[0], numbers[1], recorded, drafts, numbers[2:])
