"""Describes the sampled rows of a step to the device, in one compiled call."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np
from numba import carray

from batchserve.native.addresses import as_pointer
from batchserve.native.jit import njit

# Columns of a row: its parent among the rows with logits (a root's is itself), its draft token, its forced token, the
# position of the token that is sampled from it, and its request.
PARENT, DRAFT_TOKEN, FORCED_TOKEN, POSITION, REQUEST = range(5)
ROW_COLUMNS = 5
# Draft tokens of rows that no walk may enter. No row's own token is ever one of them.
NOT_A_CHILD, UNVERIFIED = -3, -4
NOT_FORCED = -1


@njit(cache=True, nogil=True)
def describe_rows(spans, num_pending, first_logit, drafts, positions, recorded, nobody, columns):  # type: ignore[no-untyped-def]
    """Fills columns int64 [ROW_COLUMNS, num_rows] with the rows that have logits, followed by padding.

    spans, num_pending, first_logit and positions are those of RaggedBatch (spans: its rows), and drafts is its
    (input_ids, parents, is_verified). recorded: Recordings.places. nobody: the request index of padding rows.
    """
    token_ids, parents, is_verified = drafts
    end = 0
    num_rows = columns.shape[1]
    for row in range(num_rows):  # rows of a prompt are in no tree: the parent of each is another row
        columns[PARENT, row], columns[DRAFT_TOKEN, row] = (row + 1) % num_rows, NOT_A_CHILD
        columns[FORCED_TOKEN, row], columns[POSITION, row], columns[REQUEST, row] = NOT_FORCED, 0, nobody
    for i in range(len(spans)):
        if first_logit[i] < 0:
            continue
        start, size, root = spans[i, 0], spans[i, 1], num_pending[i] - 1
        first = first_logit[i] - root
        known = carray(as_pointer(recorded[i, 0]), recorded[i, 1], np.int64)
        for k in range(root, size):
            row, position, is_child = first + k, positions[start + k] + 1, k > root
            may_be_walked = is_verified[start + k]
            columns[PARENT, row] = first + parents[start + k] if is_child else row
            columns[DRAFT_TOKEN, row] = NOT_A_CHILD
            if is_child:
                columns[DRAFT_TOKEN, row] = token_ids[start + k] if may_be_walked else UNVERIFIED
            columns[FORCED_TOKEN, row] = NOT_FORCED
            if may_be_walked and position < len(known):
                columns[FORCED_TOKEN, row] = known[position]
            columns[POSITION, row], columns[REQUEST, row] = position, i
        end = first + size
    for row in range(end, columns.shape[1]):
        columns[PARENT, row], columns[DRAFT_TOKEN, row], columns[FORCED_TOKEN, row] = row, NOT_A_CHILD, NOT_FORCED
        columns[POSITION, row], columns[REQUEST, row] = 0, nobody


def compile_kernels() -> None:
    """Compiles describe_rows, or loads it from the cache on disk."""
    one, flag = np.ones(1, np.int64), np.ones(1, np.bool_)
    drafts = (one, np.zeros(1, np.int32), flag)
    columns = np.zeros((ROW_COLUMNS, 1), np.int64)
    describe_rows(np.array([[0, 1, 0]]), one, one - 1, drafts, one, np.zeros((1, 2), np.int64), 1, columns)
