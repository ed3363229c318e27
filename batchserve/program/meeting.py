"""The barrier of a step's threads."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import ctypes
import functools
import platform

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from batchserve.native import njit
from batchserve.program.instructions import ARRIVED, GENERATION, NUM_THREADS, YIELD

SPINS = 4000  # tens of microseconds or more; a thread that waits longer lets others have the core
_NUMBER = ir.IntType(64)
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


@intrinsic
def _arrive(typing_context, address):  # type: ignore[no-untyped-def]
    """The number at an address, which is one more afterwards. Whoever comes later sees what was written before."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number = builder.inttoptr(arguments[0], _NUMBER.as_pointer())
        return builder.atomic_rmw("add", number, ir.Constant(_NUMBER, 1), "acq_rel")

    return types.int64(address), codegen


@intrinsic
def _load(typing_context, address):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.load_atomic(builder.inttoptr(arguments[0], _NUMBER.as_pointer()), "acquire", 8, typ=_NUMBER)

    return types.int64(address), codegen


@intrinsic
def _store(typing_context, address, value):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], _NUMBER.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _pause(typing_context):  # type: ignore[no-untyped-def]
    """A moment in which the core's other thread may run."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if _IS_X86:
            builder.call(
                builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), ir.FunctionType(ir.VoidType(), [])), []
            )
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _call(typing_context, address):  # type: ignore[no-untyped-def]
    """Call a function without arguments."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.IntType(32), []).as_pointer())
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(nogil=True, cache=True)
def meet(step):  # type: ignore[no-untyped-def]
    """Returns once all threads of the step have come here; each then sees what the others wrote before."""
    num_threads = step[NUM_THREADS]
    if num_threads == 1:
        return
    at = step.ctypes.data
    generation = _load(at + GENERATION * 8)
    if _arrive(at + ARRIVED * 8) == num_threads - 1:
        _store(at + ARRIVED * 8, 0)
        _store(at + GENERATION * 8, generation + 1)
        return
    spins = 0
    while _load(at + GENERATION * 8) == generation:
        spins += 1
        if spins < SPINS:
            _pause()
        elif step[YIELD] != 0:
            _call(step[YIELD])


@functools.cache
def yield_address() -> int:
    """The address of the system's function that lets another thread have the core; 0 where there is none."""
    function = getattr(ctypes.CDLL(None), "sched_yield", None)
    return 0 if function is None else int(ctypes.cast(function, ctypes.c_void_p).value or 0)
