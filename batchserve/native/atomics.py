"""Lock-free access from compiled code to int64 numbers that several threads share, by address."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import ctypes
import functools
import platform

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_NUMBER = ir.IntType(64)
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def _changing(operation: str):  # type: ignore[no-untyped-def]
    def change(typing_context, address):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            number = builder.inttoptr(arguments[0], _NUMBER.as_pointer())
            return builder.atomic_rmw(operation, number, ir.Constant(_NUMBER, 1), "seq_cst")

        return types.int64(address), codegen

    return intrinsic(change)


# These increment and decrement the number at an address and return its old value. Later callers see all writes made
# before; sequentially consistent, like load_in_order.
add_one, take_one = _changing("add"), _changing("sub")


@intrinsic
def exchange(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Stores a value at an address and returns the old one; sequentially consistent, like load_in_order."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number = builder.inttoptr(arguments[0], _NUMBER.as_pointer())
        return builder.atomic_rmw("xchg", number, arguments[1], "seq_cst")

    return types.int64(address, types.int64), codegen


def _loading(ordering: str):  # type: ignore[no-untyped-def]
    def load(typing_context, address):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return builder.load_atomic(builder.inttoptr(arguments[0], _NUMBER.as_pointer()), ordering, 8, typ=_NUMBER)

        return types.int64(address), codegen

    return intrinsic(load)


load = _loading("acquire")
load_in_order = _loading("seq_cst")


@intrinsic
def store(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Stores a value at an address. A thread that loads the value also sees all writes made before it."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], _NUMBER.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typing_context):  # type: ignore[no-untyped-def]
    """Pauses briefly in a spin loop, which lets the core's other hardware thread run."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if _IS_X86:
            builder.call(
                builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), ir.FunctionType(ir.VoidType(), [])), []
            )
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call(typing_context, address):  # type: ignore[no-untyped-def]
    """Calls a function without arguments by its address."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.IntType(32), []).as_pointer())
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@functools.cache
def system_function(name: str) -> int:
    """Returns the address of a C library function, or 0 if there is no such function."""
    function = getattr(ctypes.CDLL(None), name, None)
    return 0 if function is None else int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def yield_address() -> int:
    """Returns the address of the system function that yields the core to another thread, or 0 if there is none."""
    return system_function("sched_yield")
