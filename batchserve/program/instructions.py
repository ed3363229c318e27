"""The format of a program for compiled code: a row of int64 numbers per instruction, and a few for the step.

An instruction's work is divided into pieces that threads claim (NEXT). Threads meet before an instruction that reads
what another thread may have written (MEETS). Addresses are in bytes. A value is equally spaced rows of elements.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np


class Op(IntEnum):
    """The kinds of instructions."""

    EMBED = 0  # rows of a table, by token id
    POSITION = 1  # rows of a table, by position
    PRODUCT = 2
    NORM = 3
    ROTATE = 4
    ATTEND = 5
    KEEP = 6  # selects the rows whose logits are needed
    ELEMENTWISE = 7
    ROUTE = 8  # chooses the experts of each row
    GROUP = 9  # sorts pairs of a row and an expert
    GATHER = 10  # copies the row of each pair
    COMBINE = 11  # adds up the pairs of each row
    TORCH = 12  # an operator that torch computes, between two native segments


class Norm(IntEnum):
    RMS = 0
    LAYER = 1
    COPY = 2  # no norm: converts bfloat16 to float32
    ROUND = 3  # no norm: converts float32 to bfloat16


class Kernel(IntEnum):
    """How a product is computed."""

    FLOATS = 0  # float32 weights and rows
    WIDENED = 1  # bfloat16 weights, float32 rows
    PAIRS = 2  # bfloat16 weights and rows, in vectors
    TILES = 3  # bfloat16 weights and rows, in tiles


class Function(IntEnum):
    """Elementwise functions, in float32."""

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4
    SIGMOID = 5
    TANH = 6
    QUICK_GELU = 7


class Routing(IntEnum):
    """Bits that say how expert scores become weights."""

    SOFTMAX_ALL = 1  # softmax over all experts, before the best are chosen
    SOFTMAX_TOP_K = 2  # softmax over the chosen experts
    NORMALIZE_TOP_K = 4
    GIVEN = 8  # expert weights and numbers have been computed before


class Binary(IntEnum):
    NONE = 0
    ADD = 1
    SUBTRACT = 2
    MULTIPLY = 3
    DIVIDE = 4


# Fields of an instruction. X and Y are read, OUT is written. BY_X, BY_Y and BY_OUT: bytes between rows.
(
    OP, NEEDS_BARRIER, NEXT, IS_KEPT,  # IS_KEPT: for the rows whose logits are needed, otherwise for all
    X, BY_X, X_PRIVATE,  # X_PRIVATE: bytes between the threads' own copies if there are few rows; 0: no copies
    Y, BY_Y,
    OUT, BY_OUT, OUT_PRIVATE, OUT_IS_BF16,  # OUT_IS_BF16: bfloat16, otherwise float32
    COLUMNS,
    WEIGHT, BY_BLOCK, IN_WORD, WEIGHT_2, BIAS, BIAS_2,
    FUNCTION, BINARY, ADDS,  # ADDS: the result is added to OUT
    FACTORS,  # two float32
    GROUPS, BY_GROUP,  # GROUPS of COLUMNS in each row; BY_GROUP: columns of X between groups
    TABLE, BY_TABLE, TABLE_2, ROTATED, IS_INTERLEAVED,
    LOOP, JOB,
    KERNEL, NUM_WORDS,  # NUM_WORDS: words of K that a product multiplies
    PER_ROW, BY_EXPERT,  # PER_ROW: pairs per row, if each pair has a row of its own; otherwise 0
    CODE,  # the address of the instruction's function (operations.py); 0: attention
    BEST, BY_BEST,  # BEST: each row's maximum, float32, in each panel of columns; BY_BEST: bytes between panels
    SIZE,
) = range(41)  # fmt: skip

# Fields of the step: the number of rows and of those whose logits are needed, the addresses of int64 arrays that
# describe them, and the threads' scratch memory, whose last LINE is spin_until's state. Numbers that threads change
# have a cache line each.
(NUM_ROWS, NUM_KEPT, IDS, POSITIONS, KEPT, INSTRUCTIONS, NUM_INSTRUCTIONS, NUM_THREADS, SCRATCH, BY_SCRATCH,
 SLEEP) = range(11)  # fmt: skip
THREAD, ARRIVED, GENERATION, SLEEPERS, STEP_SIZE = 16, 24, 32, 40, 48

LINE = 64  # bytes of a cache line
BLOCK = 16  # columns of a block of packed weights (packing.py)
FEW_ROWS = 16  # up to this many, each thread computes norms for itself, which is faster than waiting for others
ROW_CHUNK = 64  # rows of a product that one thread takes at once
K_CHUNK = 1024  # words of k: so much of the weights stays in a core's cache while ROW_CHUNK rows are computed


def two_floats(one: float, other: float = 0.0) -> int:
    """Packs two float32 into an int64."""
    return int(struct.unpack("<q", struct.pack("<ff", one, other))[0])


def assemble(instructions: list[dict[int, int]]) -> np.ndarray:
    """Returns int64 [num_instructions, SIZE] with each instruction's {field: number}; the other fields are 0."""
    rows = np.zeros((len(instructions), SIZE), np.int64)
    for row, fields in zip(rows, instructions, strict=True):
        for field, number in fields.items():
            row[field] = number
    return rows
