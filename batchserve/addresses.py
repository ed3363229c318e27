"""Arrays by their address, for compiled code that goes through the memory of many requests in one call.

Whoever writes an address down owns the array, and writes it anew when another one takes its place.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


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
