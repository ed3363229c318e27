"""Passes arrays and loops by address, so that one call of compiled code can process the memory of many requests.

The code that stores an address owns the array and updates the address when it replaces the array.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from batchserve.native.jit import njit


@intrinsic
def as_pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """Converts an int64 address to a void pointer, for numba.carray."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@njit(nogil=True, inline="always")
def record_at(address, dtype):  # type: ignore[no-untyped-def]
    """Returns the record of a structured dtype at an address."""
    return carray(as_pointer(address), 1, dtype)[0]


def offset(dtype: np.dtype, field: str) -> int:
    """Returns where a field begins in a record, in bytes."""
    assert dtype.fields is not None
    return dtype.fields[field][1]


@intrinsic
def claim(typing_context, address):  # type: ignore[no-untyped-def]
    """Atomically increments the number at an address and returns its old value: no two threads get the same one."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", number, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(address), codegen


@intrinsic
def call_loop(typing_context, loop, job):  # type: ignore[no-untyped-def]
    """Calls the compiled loop(job); loop and job are addresses."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = cgutils.voidptr_t
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [pointer]).as_pointer())
        builder.call(function, [builder.inttoptr(arguments[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def run_loop(typing_context, team, loop, job):  # type: ignore[no-untyped-def]
    """Calls the compiled loop(job), both addresses, on all threads of a pool.Team; the loop has to divide its work."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        members, loop, job = arguments
        start, size, pool = (builder.extract_value(members, place) for place in range(3))
        number, pointer = ir.IntType(64), cgutils.voidptr_t
        one = ir.FunctionType(ir.VoidType(), [pointer])
        all_of_them = ir.FunctionType(ir.VoidType(), [number] * 4)
        has_threads = builder.icmp_signed("!=", start, ir.Constant(start.type, 0))
        with builder.if_else(has_threads) as (then, otherwise):
            with then:
                builder.call(builder.inttoptr(start, all_of_them.as_pointer()), [loop, job, size, pool])
            with otherwise:
                builder.call(builder.inttoptr(loop, one.as_pointer()), [builder.inttoptr(job, pointer)])
        return context.get_dummy_value()

    return types.void(types.UniTuple(types.int64, 3), types.int64, types.int64), codegen
