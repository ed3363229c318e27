"""Routes rows to experts and combines the experts' results.

A pair is a row and one of its experts. Pairs are sorted by expert, so each expert's rows are contiguous in memory. They
are cut into tiles: runs of at most ROW_CHUNK pairs of one expert. The results of a row's experts are added up in the
order of their weights, so a row's result does not depend on the other rows.

The groups are an int64 area. It has the number of tiles and, from GROUPS_START on, for num_pairs pairs: the row of each
pair; the place of each row's j-th pair; its weight, as float32; and the tiles (expert, first pair, number of pairs).
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from batchserve.native.addresses import claim
from batchserve.native.jit import njit
from batchserve.program.instructions import (
    BY_OUT,
    BY_X,
    BY_Y,
    COLUMNS,
    FACTORS,
    FEW_ROWS,
    FUNCTION,
    GROUPS,
    NEXT,
    OUT,
    ROW_CHUNK,
    SIZE,
    X_PRIVATE,
    Routing,
    X,
    Y,
)
from batchserve.program.pieces import claim_rows, floats_at, numbers_at, words_at

GROUPS_START = 8  # int64
GROUPS_OF_PAIR = 6  # int64 per pair: row, place, weight and a tile


@njit(nogil=True, cache=True)
def tiles_of(groups, num_pairs):  # type: ignore[no-untyped-def]
    """Returns the tiles [num_tiles, 3]: expert, first pair, number of pairs."""
    num_tiles = numbers_at(groups, 1)[0]
    return numbers_at(groups + 8 * (GROUPS_START + 3 * num_pairs), 3 * num_tiles).reshape((num_tiles, 3))


@njit(nogil=True, cache=True, error_model="numpy")
def _to_shares(x, count):  # type: ignore[no-untyped-def]
    """Replaces the first `count` numbers by their softmax."""
    most = x[0]
    for j in range(1, count):
        most = max(most, x[j])
    total = np.float32(0.0)
    for j in range(count):
        x[j] = np.exp(x[j] - most)
        total += x[j]
    for j in range(count):
        x[j] /= total


@njit(nogil=True, cache=True, error_model="numpy")
def _route(op, x, weights, experts):  # type: ignore[no-untyped-def]
    """Writes one row's k experts, highest score first, and their weights. Ties go to the first expert. Changes x."""
    count, k, kind = op[COLUMNS], op[GROUPS], op[FUNCTION]
    if kind & Routing.SOFTMAX_ALL:
        _to_shares(x, count)
    for j in range(k):
        best = -1
        for expert in range(count):
            is_taken = False
            for i in range(j):
                is_taken = is_taken or experts[i] == expert
            if not is_taken and (best < 0 or x[expert] > x[best]):
                best = expert
        experts[j], weights[j] = best, x[best]
    if kind & Routing.SOFTMAX_TOP_K:
        _to_shares(weights, k)
    factor = op.view(np.float32)[2 * FACTORS]
    if kind & Routing.NORMALIZE_TOP_K:
        total = np.float32(0.0)
        for j in range(k):
            total += weights[j]
        factor /= total
    for j in range(k):
        weights[j] *= factor


def route(op_at, step_at, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """OUT = each row's k weights, float32, and k experts, int32. They are computed from X, the scores of all experts,
    or copied: the experts from X and the weights from Y.
    """
    op = numbers_at(op_at, SIZE)
    count, k = op[COLUMNS], op[GROUPS]
    room = floats_at(scratch, count)
    while True:
        first, end = claim_rows(op, num_rows)
        if first >= num_rows:
            break
        for row in range(first, end):
            scores = floats_at(op[X] + row * op[BY_X], count)
            out = op[OUT] + row * op[BY_OUT]
            weights, experts = floats_at(out, k), words_at(out + 4 * k, k)
            if op[FUNCTION] == Routing.GIVEN:
                given = floats_at(op[Y] + row * op[BY_Y], k)
                for j in range(k):
                    # NaN or a number out of range goes to expert 0, with the weight as given.
                    is_there = scores[j] >= np.float32(0.0) and scores[j] < np.float32(count)
                    experts[j] = np.int32(scores[j]) if is_there else np.int32(0)
                    weights[j] = given[j]
                continue
            for j in range(count):
                room[j] = scores[j]
            _route(op, room, weights, experts)


def group(op_at, step_at, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """OUT = the groups of X's routes. One thread computes them, faster than a barrier. scratch: an int64 per expert."""
    op = numbers_at(op_at, SIZE)
    if claim(op.ctypes.data + NEXT * 8) != 0:
        return
    k, num_experts = op[GROUPS], op[COLUMNS]
    num_pairs, area = num_rows * k, op[OUT] + 8 * GROUPS_START
    rows, places = numbers_at(area, num_pairs), numbers_at(area + 8 * num_pairs, num_pairs)
    weights = numbers_at(area + 16 * num_pairs, num_pairs).view(np.float32)
    first = numbers_at(scratch, num_experts)
    for expert in range(num_experts):
        first[expert] = 0
    for row in range(num_rows):
        experts = words_at(op[X] + row * op[BY_X] + 4 * k, k)
        for j in range(k):
            first[experts[j]] += 1
    start = num_tiles = 0
    tiles = numbers_at(area + 24 * num_pairs, 3 * num_pairs).reshape((num_pairs, 3))
    for expert in range(num_experts):
        count, first[expert] = first[expert], start
        for piece in range(0, count, ROW_CHUNK):
            tiles[num_tiles, 0], tiles[num_tiles, 1] = expert, start + piece
            tiles[num_tiles, 2] = min(ROW_CHUNK, count - piece)
            num_tiles += 1
        start += count
    numbers_at(op[OUT], 1)[0] = num_tiles
    for row in range(num_rows):
        at = op[X] + row * op[BY_X]
        shares, experts = floats_at(at, k), words_at(at + 4 * k, k)
        for j in range(k):
            place = first[experts[j]]
            first[experts[j]] += 1
            rows[place], places[row * k + j], weights[2 * (row * k + j)] = row, place, shares[j]


def gather(op_at, step_at, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """OUT = the row of each pair, in the order of the pairs. COLUMNS counts 32-bit words; num_rows is the step's."""
    op = numbers_at(op_at, SIZE)
    num_pairs, count = num_rows * op[GROUPS], op[COLUMNS]
    rows = numbers_at(op[Y] + 8 * GROUPS_START, num_pairs)
    x = op[X] + (thread * op[X_PRIVATE] if num_rows <= FEW_ROWS else 0)
    while True:
        first, end = claim_rows(op, num_pairs)
        if first >= num_pairs:
            break
        for pair in range(first, end):
            source = words_at(x + rows[pair] * op[BY_X], count)
            target = words_at(op[OUT] + pair * op[BY_OUT], count)
            for j in range(count):
                target[j] = source[j]


def combine(op_at, step_at, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """OUT = for each row, the sum of its pairs in X times their weights."""
    op = numbers_at(op_at, SIZE)
    k, count = op[GROUPS], op[COLUMNS]
    num_pairs, area = num_rows * k, op[Y] + 8 * GROUPS_START
    places, weights = numbers_at(area + 8 * num_pairs, num_pairs), numbers_at(area + 16 * num_pairs, num_pairs)
    shares = weights.view(np.float32)
    while True:
        first, end = claim_rows(op, num_rows)
        if first >= num_rows:
            break
        for row in range(first, end):
            out = floats_at(op[OUT] + row * op[BY_OUT], count)
            for j in range(k):
                share = shares[2 * (row * k + j)]
                x = floats_at(op[X] + places[row * k + j] * op[BY_X], count)
                if j == 0:
                    for i in range(count):
                        out[i] = share * x[i]
                else:
                    for i in range(count):
                        out[i] += share * x[i]
