"""Where every row of a step stands, in compiled code: one call for all requests."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np

from batchserve.native.jit import njit

SAMPLED, ALL = 1, 2


@njit(cache=True, nogil=True)
def lay_out(heads, pending_ids, starts, tree_ids, tree_parents, tree_verified, out):  # type: ignore[no-untyped-def]
    """Lay the rows of all requests behind each other: of each its pending tokens, a chain, and the tree behind them.

    heads int64 [num_requests, 3]: context length, pending rows, and the sum of SAMPLED, if something is sampled, and
    ALL, if the head runs on all pending rows, not only on the last one. The pending tokens are
    behind each other, too, and so are the trees: that of request i are the nodes from starts[i] to starts[i + 1], whose
    parents count inside of it (-1: the last pending row). `out` are the arrays of RaggedBatch that are filled, with as
    many input_ids, position_ids and logit_rows as there are rows with padding. Returns the number of logit rows, -1
    where a parent does not come before its node.
    """
    rows, is_chain, num_verified, input_ids, positions, parents, is_verified, logit_rows, first_logit = out
    row, pending, logit = 0, 0, 0
    for i in range(len(heads)):
        context, count, kind = heads[i]
        size = count + starts[i + 1] - starts[i]
        rows[i, 0], rows[i, 1], rows[i, 2] = row, size, context
        is_chain[i], num_verified[i] = size == count, 0
        for k in range(count):
            input_ids[row + k], positions[row + k] = pending_ids[pending + k], context + k
            parents[row + k], is_verified[row + k] = k - 1, True
        for k in range(count, size):
            node = starts[i] + k - count
            parent = count + tree_parents[node]
            if not 0 <= parent < k:
                return -1
            input_ids[row + k], positions[row + k] = tree_ids[node], positions[row + parent] + 1
            parents[row + k], is_verified[row + k] = parent, tree_verified[node]
            num_verified[i] += tree_verified[node]
        first_logit[i] = -1
        if kind & ALL:
            for k in range(count - 1 if kind & SAMPLED else count):
                logit_rows[logit] = row + k
                logit += 1
        if kind & SAMPLED:
            first_logit[i] = logit
            for k in range(count - 1, size):
                logit_rows[logit] = row + k
                logit += 1
        pending += count
        row += size
    input_ids[row:] = 0
    positions[row:] = 0
    logit_rows[logit:] = logit_rows[max(0, logit - 1)]
    return logit


def compile_kernels() -> None:
    """Compile lay_out, or load it from the cache on disk."""
    numbers, flags = np.zeros((5, 1), np.int64), np.zeros(1, np.bool_)
    rows, parents = np.zeros((1, 3), np.int64), np.zeros(1, np.int32)
    out = (rows, flags, *numbers[:3], parents, flags, *numbers[3:])
    none = np.zeros(0, np.int64)
    lay_out(np.array([[0, 1, 1]]), np.ones(1, np.int64), np.zeros(2, np.int64), none, none, flags[:0], out)
