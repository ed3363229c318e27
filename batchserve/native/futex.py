"""Lets threads in compiled code sleep until a number changes: with a futex on Linux, with short naps elsewhere.

A pipe would also work, but Linux tends to wake its reader on the writer's core, which the writer keeps busy here.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import platform
import sys

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from batchserve.native.atomics import system_function
from batchserve.native.jit import njit

# The number of the futex system call; 0: there is none. It compares 32 bits: the lower half of our int64 numbers.
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # both private to the threads of one process
EVERY = 0x7FFFFFFF  # sleepers
NAP_US = 200
_NUMBER = ir.IntType(64)


@intrinsic
def _call_syscall(typing_context, function, number, address, operation, value):  # type: ignore[no-untyped-def]
    """Calls the C library's syscall, at address `function`, for the futex at `address`, without a timeout."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        nothing = ir.Constant(_NUMBER, 0)
        kind = ir.FunctionType(_NUMBER, [_NUMBER] * 7)
        what = [*arguments[1:], nothing, nothing, nothing]
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), what)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def _call_usleep(typing_context, function, microseconds):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
        duration = builder.trunc(arguments[1], ir.IntType(32))
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [duration])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@njit(nogil=True, cache=True)
def sleep_while(address, value, function):  # type: ignore[no-untyped-def]
    """Sleeps while the number at an address is `value`; may return early. function: sleep_function()."""
    if FUTEX:
        _call_syscall(function, FUTEX, address, FUTEX_WAIT, value)
    else:
        _call_usleep(function, NAP_US)


@njit(nogil=True, cache=True)
def wake(address, function):  # type: ignore[no-untyped-def]
    """Wakes the threads that sleep on the number at an address. Call it after changing the number."""
    if FUTEX:
        _call_syscall(function, FUTEX, address, FUTEX_WAKE, EVERY)


def sleep_function() -> int:
    """Returns the address of the C library function that sleep_while and wake call."""
    return system_function("syscall" if FUTEX else "usleep")
