"""Operations on rows other than products. The result of a row does not depend on the other rows."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from batchserve.native.elements import narrow, widen
from batchserve.native.jit import njit
from batchserve.program.instructions import (
    BIAS,
    BINARY,
    BLOCK,
    BY_BLOCK,
    BY_GROUP,
    BY_OUT,
    BY_TABLE,
    BY_X,
    BY_Y,
    COLUMNS,
    FACTORS,
    FEW_ROWS,
    FUNCTION,
    GROUPS,
    IDS,
    IN_WORD,
    IS_INTERLEAVED,
    KEPT,
    OUT,
    OUT_IS_BF16,
    OUT_PRIVATE,
    POSITIONS,
    ROTATED,
    SIZE,
    STEP_SIZE,
    TABLE,
    TABLE_2,
    WEIGHT,
    X_PRIVATE,
    Binary,
    Norm,
    X,
    Y,
)
from batchserve.program.pieces import bf16_at, claim_rows, floats_at, numbers_at
from batchserve.program.product import activate

HALF = np.uint16(0)
# Vectorised sums: their order differs from the code's, but is the same for every row.
LANES = {"reassoc", "contract"}


@njit(nogil=True, cache=True)
def _copy(source, target):  # type: ignore[no-untyped-def]
    """Copies in a loop, as Numba takes seconds to compile a slice assignment."""
    for j in range(target.shape[0]):
        target[j] = source[j]


@njit(nogil=True, cache=True)
def _store(source, address, is_bf16):  # type: ignore[no-untyped-def]
    """Stores float32 at an address, rounded to bfloat16 if is_bf16."""
    if is_bf16:
        halves = bf16_at(address, source.shape[0])
        for j in range(source.shape[0]):
            halves[j] = narrow(source[j], HALF)
    else:
        _copy(source, floats_at(address, source.shape[0]))


@njit(nogil=True, cache=True)
def _look_up(op, row, number):  # type: ignore[no-untyped-def]
    """OUT's row = factor * a row of a table, which is packed words (WEIGHT) or rows (TABLE)."""
    count, in_word = op[COLUMNS], op[IN_WORD]
    factor = op.view(np.float32)[2 * FACTORS]
    out = floats_at(op[OUT] + row * op[BY_OUT], count)
    if op[WEIGHT] != 0:
        words = op[WEIGHT] + number // BLOCK * op[BY_BLOCK] + number % BLOCK * 4
        if in_word == 2:
            for j in range(count):
                out[j] = widen(bf16_at(words + j // 2 * 4 * BLOCK + j % 2 * 2, 1)[0]) * factor
        else:
            for j in range(count):
                out[j] = floats_at(words + j * 4 * BLOCK, 1)[0] * factor
    elif in_word == 2:
        halves = bf16_at(op[TABLE] + number * op[BY_TABLE], count)
        for j in range(count):
            out[j] = widen(halves[j]) * factor
    else:
        floats = floats_at(op[TABLE] + number * op[BY_TABLE], count)
        for j in range(count):
            out[j] = floats[j] * factor


def embed(op_at, step_at, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """OUT = rows of a table, by token id."""
    _look_up_all(numbers_at(op_at, SIZE), numbers_at(step_at, STEP_SIZE)[IDS], num_rows)


def position(op_at, step_at, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """OUT = rows of a table, by position."""
    _look_up_all(numbers_at(op_at, SIZE), numbers_at(step_at, STEP_SIZE)[POSITIONS], num_rows)


@njit(nogil=True, cache=True)
def _look_up_all(op, address, num_rows):  # type: ignore[no-untyped-def]
    """Looks up the rows that this thread claims. address: that of int64 [num_rows], the numbers of table rows."""
    numbers = numbers_at(address, num_rows)
    while True:
        first, end = claim_rows(op, num_rows)
        if first >= num_rows:
            break
        for row in range(first, end):
            _look_up(op, row, numbers[row])


def keep(op_at, step_at, num_kept, thread, scratch):  # type: ignore[no-untyped-def]
    """OUT = the rows of X whose logits are needed."""
    op, kept = numbers_at(op_at, SIZE), numbers_at(numbers_at(step_at, STEP_SIZE)[KEPT], num_kept)
    count = op[COLUMNS]
    while True:
        first, end = claim_rows(op, num_kept)
        if first >= num_kept:
            break
        for row in range(first, end):
            _copy(floats_at(op[X] + kept[row] * op[BY_X], count), floats_at(op[OUT] + row * op[BY_OUT], count))


@njit(nogil=True, cache=True, fastmath=LANES)
def _sum(x):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for j in range(x.shape[0]):
        total += x[j]
    return total


@njit(nogil=True, cache=True, fastmath=LANES)
def _sum_of_squares(x, mean):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for j in range(x.shape[0]):
        total += (x[j] - mean) * (x[j] - mean)
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _normalise(op, x_at, out_at):  # type: ignore[no-untyped-def]
    """Normalises a row in groups of COLUMNS, or converts it from or to bfloat16."""
    if op[FUNCTION] == Norm.COPY:
        widened, copied = bf16_at(x_at, op[COLUMNS]), floats_at(out_at, op[COLUMNS])
        for j in range(op[COLUMNS]):
            copied[j] = widen(widened[j])
        return
    if op[FUNCTION] == Norm.ROUND:
        _store(floats_at(x_at, op[COLUMNS]), out_at, True)
        return
    count, epsilon = op[COLUMNS], op.view(np.float32)[2 * FACTORS]
    weight, bias = floats_at(op[WEIGHT], count), floats_at(op[BIAS], count)
    for group in range(op[GROUPS]):
        x = floats_at(x_at + 4 * group * count, count)
        mean = _sum(x) / np.float32(count) if op[FUNCTION] == Norm.LAYER else np.float32(0.0)
        scale = np.float32(1.0) / np.sqrt(_sum_of_squares(x, mean) / np.float32(count) + epsilon)
        if op[OUT_IS_BF16] != 0:
            halves = bf16_at(out_at + 2 * group * count, count)
            for j in range(count):
                halves[j] = narrow((x[j] - mean) * scale * weight[j] + bias[j], HALF)
        else:
            out = floats_at(out_at + 4 * group * count, count)
            for j in range(count):
                out[j] = (x[j] - mean) * scale * weight[j] + bias[j]


def normalise(op_at, step_at, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """Normalises rows. If there are few, each thread computes its own copy, so that no thread has to wait."""
    op = numbers_at(op_at, SIZE)
    if op[OUT_PRIVATE] != 0 and num_rows <= FEW_ROWS:
        x, own = op[X] + thread * op[X_PRIVATE], op[OUT] + thread * op[OUT_PRIVATE]
        for row in range(num_rows):
            _normalise(op, x + row * op[BY_X], own + row * op[BY_OUT])
        return
    while True:
        first, end = claim_rows(op, num_rows)
        if first >= num_rows:
            break
        for row in range(first, end):
            _normalise(op, op[X] + row * op[BY_X], op[OUT] + row * op[BY_OUT])


@njit(nogil=True, cache=True)
def _rotate(x, cosine, sine, half, is_interleaved, rotated):  # type: ignore[no-untyped-def]
    for j in range(half):
        one, other = (2 * j, 2 * j + 1) if is_interleaved else (j, j + half)
        rotated[one] = x[one] * cosine[j] - x[other] * sine[j]
        rotated[other] = x[other] * cosine[j] + x[one] * sine[j]


def rotate(op_at, step_at, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """OUT = X, with the first ROTATED columns of each group rotated by the row's position."""
    op, step = numbers_at(op_at, SIZE), numbers_at(step_at, STEP_SIZE)
    positions = numbers_at(step[POSITIONS], num_rows)
    count, half = op[COLUMNS], op[ROTATED] // 2
    room = floats_at(scratch, count)
    while True:
        first, end = claim_rows(op, num_rows)
        if first >= num_rows:
            break
        for row in range(first, end):
            at = positions[row] * op[BY_TABLE]
            cosine, sine = floats_at(op[TABLE] + at, half), floats_at(op[TABLE_2] + at, half)
            for group in range(op[GROUPS]):
                x = floats_at(op[X] + row * op[BY_X] + 4 * group * op[BY_GROUP], count)
                _copy(x, room)
                if half > 0:
                    _rotate(x, cosine, sine, half, op[IS_INTERLEAVED] != 0, room)
                is_bf16 = op[OUT_IS_BF16] != 0
                _store(room, op[OUT] + row * op[BY_OUT] + (2 if is_bf16 else 4) * group * count, is_bf16)


@njit(nogil=True, cache=True, error_model="numpy")
def _combine(binary, out, other):  # type: ignore[no-untyped-def]
    for j in range(out.shape[0]):
        if binary == Binary.ADD:
            out[j] += other[j]
        elif binary == Binary.SUBTRACT:
            out[j] -= other[j]
        elif binary == Binary.MULTIPLY:
            out[j] *= other[j]
        elif binary == Binary.DIVIDE:
            out[j] /= other[j]


def elementwise(op_at, step_at, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """OUT = function(X) combined with Y's row, or with a number if there is no Y."""
    op = numbers_at(op_at, SIZE)
    count = op[COLUMNS]
    number = op.view(np.float32)[2 * FACTORS]
    room = floats_at(scratch, count)
    while True:
        first, end = claim_rows(op, num_rows)
        if first >= num_rows:
            break
        for row in range(first, end):
            _copy(floats_at(op[X] + row * op[BY_X], count), room)
            activate(op[FUNCTION], scratch, count)
            if op[Y] != 0:
                _combine(op[BINARY], room, floats_at(op[Y] + row * op[BY_Y], count))
            elif op[BINARY] == Binary.ADD:
                for j in range(count):
                    room[j] += number
            elif op[BINARY] == Binary.MULTIPLY:
                for j in range(count):
                    room[j] *= number
            _store(room, op[OUT] + row * op[BY_OUT], op[OUT_IS_BF16] != 0)
