"""A program as compiled code reads it: one row of int64 numbers for each instruction, and a few for the step.

An instruction's work is divided into pieces that its threads claim (NEXT). They meet before an instruction that reads
what another thread may have written (MEETS). Addresses are bytes; a value is rows of elements, some bytes apart.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np


class Op(IntEnum):
    """The kinds of instructions."""

    EMBED = 0  # rows of a table, by token id
    POSITION = 1  # rows of a table, by position, added to what is there
    PRODUCT = 2
    NORM = 3
    ROTATE = 4
    ATTEND = 5
    KEEP = 6  # the rows whose logits are asked for
    ELEMENTWISE = 7
    ROUTE = 8  # which experts a row goes to
    GROUP = 9  # the order of pairs of rows and experts
    GATHER = 10  # the rows of pairs
    COMBINE = 11  # pairs, added up row by row
    TORCH = 12  # an operator that torch computes, between the segments of a list


class Norm(IntEnum):
    RMS = 0
    LAYER = 1
    COPY = 2  # none: from bfloat16 to float32
    ROUND = 3  # none: from float32 to bfloat16


class Kernel(IntEnum):
    """How a product multiplies."""

    FLOATS = 0  # weights and rows of float32
    WIDENED = 1  # weights of bfloat16, rows of float32
    PAIRS = 2  # both of bfloat16, in vectors
    TILES = 3  # both of bfloat16, in tiles


class Function(IntEnum):
    """Functions of one element, in float32."""

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4
    SIGMOID = 5
    TANH = 6
    QUICK_GELU = 7


class Routing(IntEnum):
    """How scores of experts become weights, as bits."""

    SHARES_OF_ALL = 1  # a softmax before the strongest are chosen
    SHARES_OF_CHOSEN = 2  # a softmax of these
    ADDS_UP_TO_ONE = 4
    GIVEN = 8  # weights and numbers of experts that have been computed before


class Binary(IntEnum):
    NONE = 0
    ADD = 1
    SUBTRACT = 2
    MULTIPLY = 3
    DIVIDE = 4


# Fields of an instruction. X and Y are read, OUT is written. BY_X, BY_Y and BY_OUT: bytes from row to row.
(
    OP, MEETS, NEXT, IS_KEPT,  # IS_KEPT: of the rows whose logits are asked for, otherwise of all
    X, BY_X, X_PRIVATE,  # X_PRIVATE: bytes between the threads' own copies where there are few rows; 0: none
    Y, BY_Y,
    OUT, BY_OUT, OUT_PRIVATE, OUT_IS_HALF,  # bfloat16, otherwise float32
    COLUMNS,
    WEIGHT, BY_BLOCK, IN_WORD, WEIGHT_2, BIAS, BIAS_2,
    FUNCTION, BINARY, ADDS,  # ADDS: the result is added to OUT
    FACTORS,  # two float32
    GROUPS, BY_GROUP,  # of COLUMNS each, in a row; columns of X from one to the next
    TABLE, BY_TABLE, TABLE_2, ROTATED, IS_INTERLEAVED,
    LOOP, JOB,
    KERNEL, NUM_WORDS,  # of K that a product multiplies
    PER_ROW, BY_EXPERT,  # PER_ROW: pairs of a row with experts, for what has a row for each pair; otherwise 0
    BEST, BY_BEST,  # of the columns that a thread takes at once each row's greatest, float32; bytes to the next ones
    SIZE,
) = range(40)  # fmt: skip

# The step: how many rows, and how many whose logits are asked for; where the int64 arrays are that describe them; and
# where each thread has room to work in. Numbers that threads change have a cache line each.
(NUM_ROWS, NUM_KEPT, IDS, POSITIONS, KEPT, INSTRUCTIONS, NUM_INSTRUCTIONS, NUM_THREADS, SCRATCH, BY_SCRATCH,
 YIELD) = range(11)  # fmt: skip
THREAD, ARRIVED, GENERATION, STEP_SIZE = 16, 24, 32, 40

FEW_ROWS = 16  # up to so many, each thread computes a norm for itself: it takes less than waiting for the others
ROW_CHUNK = 64  # rows of a product that one thread takes at once
K_CHUNK = 1024  # words of k, so that a piece of the weights stays in a core's cache for all of these rows


def two_floats(one: float, other: float = 0.0) -> int:
    """Two float32 in the place of an int64."""
    return int(struct.unpack("<q", struct.pack("<ff", one, other))[0])


def assemble(instructions: list[dict[int, int]]) -> np.ndarray:
    """int64 [num_instructions, SIZE] of {field: number}; the others are 0."""
    rows = np.zeros((len(instructions), SIZE), np.int64)
    for row, fields in zip(rows, instructions, strict=True):
        for field, number in fields.items():
            row[field] = number
    return rows
