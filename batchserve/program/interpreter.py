"""Runs a program: every thread of a step goes through all instructions and claims pieces of each."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from batchserve.native.addresses import as_pointer, call_loop, claim
from batchserve.native.jit import cfunc, njit
from batchserve.program.barrier import wait_for_all
from batchserve.program.instructions import (
    BY_SCRATCH,
    CODE,
    FEW_ROWS,
    IDS,
    INSTRUCTIONS,
    IS_KEPT,
    JOB,
    KEPT,
    LINE,
    LOOP,
    NEEDS_BARRIER,
    NEXT,
    NUM_INSTRUCTIONS,
    NUM_KEPT,
    NUM_ROWS,
    NUM_THREADS,
    PER_ROW,
    POSITIONS,
    SCRATCH,
    SIZE,
    STEP_SIZE,
    THREAD,
)

if TYPE_CHECKING:
    from numba.core.ccallback import CFunc


@functools.cache
def run_loop() -> CFunc[Any]:
    """Returns the compiled loop over a step's instructions. Each thread of a step calls it with the step's address."""

    @cfunc(types.void(types.CPointer(types.int64)), nopython=True, cache=True)
    def loop(step_address):  # type: ignore[no-untyped-def]
        step = carray(step_address, STEP_SIZE)
        thread = claim(step.ctypes.data + THREAD * 8)
        scratch = step[SCRATCH] + thread * step[BY_SCRATCH]
        spins = scratch + step[BY_SCRATCH] - LINE
        instructions = carray(as_pointer(step[INSTRUCTIONS]), (step[NUM_INSTRUCTIONS], SIZE), np.int64)
        meeting = 1 if step[NUM_ROWS] <= FEW_ROWS else 2
        for i in range(step[NUM_INSTRUCTIONS]):
            op = instructions[i]
            if op[NEEDS_BARRIER] & meeting:
                wait_for_all(step, spins)
            num_rows = step[NUM_KEPT] if op[IS_KEPT] != 0 else step[NUM_ROWS]
            if op[PER_ROW] > 0:
                num_rows *= op[PER_ROW]
            if op[CODE] != 0:
                call_operation(op[CODE], op.ctypes.data, step.ctypes.data, num_rows, thread, scratch)
            elif op[LOOP] != 0:
                call_loop(op[LOOP], op[JOB])

    compiled: CFunc[Any] = loop
    return compiled


@intrinsic
def call_operation(typing_context, code, op, step, num_rows, thread, scratch):  # type: ignore[no-untyped-def]
    """Calls the function of an instruction (operations.py) at the address `code`."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [number] * 5)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@njit(nogil=True, cache=True)
def begin_step(step, instructions, places, loops, num_rows, num_threads, ids, positions, kept):  # type: ignore[no-untyped-def]
    """Fills in a step and returns the number of positions that its tables need. places: the instructions that store K
    and V, and those that attend. loops: the addresses of the loops they call; 0: none.
    """
    step[NUM_ROWS], step[NUM_KEPT], step[NUM_THREADS] = num_rows, len(kept), num_threads
    step[IDS], step[POSITIONS], step[KEPT] = ids.ctypes.data, positions.ctypes.data, kept.ctypes.data
    for i in range(len(instructions)):
        instructions[i, NEXT] = 0
    for kind in range(2):
        for place in places[kind]:
            instructions[place, LOOP] = loops[kind]
    last = 0
    for i in range(num_rows):
        last = max(last, positions[i])
    return last + 1


def compile_kernels() -> None:
    """Compiles the loop and begin_step, or loads them from the cache on disk."""
    run_loop()
    step, rows, none = np.zeros(STEP_SIZE, np.int64), np.zeros((0, SIZE), np.int64), np.zeros(0, np.int64)
    begin_step(step, rows, (none, none), (0, 0), 0, 1, none, none, none)
