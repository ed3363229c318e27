"""Compiled parts of SlotAllocator and of the description of a step for the device: one call for all requests."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np

from batchserve.native.jit import njit

DUMMY_SLOT = 0  # belongs to no request: padding rows write to it
WORD_BITS = 32
# Columns of `books`, which has a row per request: the slots promised when it began, the slots that it owns, how many of
# these are committed, and how many leading ones the device has.
PROMISED, OWNED, COMMITTED, UPLOADED = range(4)
NUM_FREE, NUM_OWNED = range(2)  # fields of `numbers`


@njit(cache=True, nogil=True)
def reserve_rows(books, table, free, request_refs, numbers, rows, counts):  # type: ignore[no-untyped-def]
    """Gives the requests at `rows`, each listed once, slots for counts[i] tokens after their committed ones.

    If there are too few free slots, or too few columns in the table, nothing changes. Returns the number of missing
    slots, or -1 for missing columns.
    """
    wanted = 0
    for i in range(len(rows)):
        book = books[rows[i]]
        if book[COMMITTED] + counts[i] > table.shape[1]:
            return -1
        wanted += max(0, book[COMMITTED] + counts[i] - book[OWNED])
    if wanted > numbers[NUM_FREE]:
        return wanted - numbers[NUM_FREE]
    for i in range(len(rows)):
        book = books[rows[i]]
        for place in range(book[OWNED], book[COMMITTED] + counts[i]):
            numbers[NUM_FREE] -= 1
            slot = free[numbers[NUM_FREE]]
            table[rows[i], place], request_refs[slot] = slot, 1
        book[OWNED] = max(book[OWNED], book[COMMITTED] + counts[i])
    numbers[NUM_OWNED] += wanted
    return 0


@njit(cache=True, nogil=True)
def commit_rows(books, table, free, request_refs, numbers, rows, starts, kept):  # type: ignore[no-untyped-def]
    """Keeps, for the request at rows[i], the rows kept[starts[i]] to kept[starts[i + 1] - 1] of its step.

    The other slots are freed, except for promised ones. Returns the first request whose rows do not ascend or were not
    all reserved, in which case nothing changes, or else the number of requests.
    """
    for i in range(len(rows)):
        book, last = books[rows[i]], -1
        for j in range(starts[i], starts[i + 1]):
            if not last < kept[j] < book[OWNED] - book[COMMITTED]:
                return i
            last = kept[j]
    for i in range(len(rows)):
        book, slots, own = books[rows[i]], table[rows[i]], kept[starts[i] : starts[i + 1]]
        start, count, moved = book[COMMITTED], len(own), 0
        while moved < count and own[moved] == moved:
            moved += 1
        if moved < count:
            step = slots[start : book[OWNED]].copy()
            last, j = start + count, 0
            for row in range(len(step)):
                if j < count and own[j] == row:
                    slots[start + j] = step[row]
                    j += 1
                else:
                    slots[last] = step[row]
                    last += 1
            book[UPLOADED] = min(book[UPLOADED], start + moved)
        book[COMMITTED] = start + count
        left = max(book[COMMITTED], book[PROMISED])
        for place in range(book[OWNED] - 1, left - 1, -1):
            request_refs[slots[place]] = 0
            free[numbers[NUM_FREE]] = slots[place]
            numbers[NUM_FREE] += 1
            numbers[NUM_OWNED] -= 1
        book[OWNED] = min(book[OWNED], left)
        book[UPLOADED] = min(book[UPLOADED], book[OWNED])
    return len(rows)


@njit(cache=True, nogil=True)
def count_changes(books, rows):  # type: ignore[no-untyped-def]
    """Returns how many table entries of the requests at `rows` the device lacks."""
    count = 0
    for row in rows:
        count += books[row, OWNED] - books[row, UPLOADED]
    return count


@njit(cache=True, nogil=True)
def take_changes(books, table, rows, places, slots):  # type: ignore[no-untyped-def]
    """Writes the entries that the device lacks to places and slots [count_changes], and marks them as uploaded."""
    count = 0
    for row in rows:
        for place in range(books[row, UPLOADED], books[row, OWNED]):
            places[count], slots[count] = row * table.shape[1] + place, table[row, place]
            count += 1
        books[row, UPLOADED] = books[row, OWNED]
    return count


@njit(cache=True, nogil=True)
def fill_ancestors(parents, qo_indptr, bits):  # type: ignore[no-untyped-def]
    """Fills TreeMetadata.ancestors, as uint32, for the rows of all requests. True if every request is a chain."""
    is_causal = True
    for i in range(len(qo_indptr) - 1):
        start = qo_indptr[i]
        for row in range(start, qo_indptr[i + 1]):
            k, parent = row - start, parents[row]
            if parent < 0:
                bits[row] = 0
            else:
                bits[row] = bits[start + parent]
            bits[row, k // WORD_BITS] |= np.uint32(1 << (k % WORD_BITS))
            is_causal = is_causal and parent == k - 1
    return is_causal


@njit(cache=True, nogil=True)
def describe_rows(spans, parents, positions, rows, table, out):  # type: ignore[no-untyped-def]
    """Fills `out`, the arrays of paged.step_arrays, with a step and its padding. True if every request is a chain.

    spans, parents and positions are those of attention.base.Spans. rows: each request's row in the table.
    """
    slot_mapping, qo_indptr, kv_indptr, table_offsets, positions_out, ancestors = out
    count, num_rows = len(spans), len(positions)
    qo_indptr[0] = kv_indptr[0] = 0
    for i in range(count):
        start, size, context = spans[i]
        qo_indptr[i + 1], kv_indptr[i + 1] = start + size, kv_indptr[i] + context + size
        table_offsets[i] = rows[i] * table.shape[1] - kv_indptr[i]
        for k in range(size):
            slot_mapping[start + k], positions_out[start + k] = table[rows[i], context + k], positions[start + k]
    is_causal = fill_ancestors(parents, qo_indptr[: count + 1], ancestors)
    qo_indptr[count + 1 :] = qo_indptr[count]
    kv_indptr[count + 1 :] = kv_indptr[count]
    table_offsets[count:] = 0
    slot_mapping[num_rows:] = DUMMY_SLOT
    positions_out[num_rows:] = 0
    ancestors[num_rows:] = 0
    return is_causal


def compile_kernels() -> None:
    """Compiles every kernel, or loads it from the cache on disk."""
    books, table = np.zeros((1, 4), np.int64), np.zeros((1, 2), np.int32)
    slots = np.zeros(3, np.int32)
    numbers, rows, one = np.array([2, 0]), np.zeros(1, np.int64), np.ones(1, np.int64)
    reserve_rows(books, table, slots, slots.copy(), numbers, rows, one)
    commit_rows(books, table, slots, slots.copy(), numbers, rows, np.array([0, 1]), rows)
    count_changes(books, rows)
    take_changes(books, table, rows, np.zeros(2, np.int64), np.zeros(2, np.int32))
    indptr, ancestors = np.zeros(2, np.int32), np.zeros((1, 1), np.uint32)
    out = (one.copy(), indptr, indptr.copy(), one.copy(), indptr[:1].copy(), ancestors)
    describe_rows(np.array([[0, 1, 0]]), np.full(1, -1, np.int32), one - 1, rows, table, out)
