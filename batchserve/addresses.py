"""Arrays and loops by their address, for compiled code that goes through the memory of many requests in one call.

Whoever writes an address down owns the array, and writes it anew when another one takes its place.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


class Team(NamedTuple):
    """Threads for compiled code that shares its work: `start` is the address of OpenMP's function that calls a loop on
    all of them (openmp.py), 0 where there is none.
    """

    start: int
    size: int


ONE_THREAD = Team(0, 1)


@intrinsic
def as_pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """An int64 address as a void pointer, for numba.carray."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@intrinsic
def claim(typing_context, address):  # type: ignore[no-untyped-def]
    """The number at an address, which is one more afterwards: no two threads get the same."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", number, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(address), codegen


@intrinsic
def run_loop(typing_context, start, size, loop, job):  # type: ignore[no-untyped-def]
    """Call the compiled loop(job), both by address, on a Team's threads; the loop has to share its work."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        start, size, loop, job = arguments
        number, pointer = ir.IntType(32), cgutils.voidptr_t
        one = ir.FunctionType(ir.VoidType(), [pointer])
        all_of_them = ir.FunctionType(ir.VoidType(), [pointer, pointer, number, number])
        has_threads = builder.icmp_signed("!=", start, ir.Constant(start.type, 0))
        with builder.if_else(has_threads) as (then, otherwise):
            with then:
                what = builder.inttoptr(loop, pointer), builder.inttoptr(job, pointer)
                flags = ir.Constant(number, 0)
                builder.call(
                    builder.inttoptr(start, all_of_them.as_pointer()), [*what, builder.trunc(size, number), flags]
                )
            with otherwise:
                builder.call(builder.inttoptr(loop, one.as_pointer()), [builder.inttoptr(job, pointer)])
        return context.get_dummy_value()

    integer = types.int64
    return types.void(integer, integer, integer, integer), codegen
