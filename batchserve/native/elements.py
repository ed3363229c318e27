"""Converts array elements to and from float32 in compiled code. A bfloat16 is represented by its bits, as uint16."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_HALF, _WORD, _FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()
_NAN = 0x7FC0


@intrinsic
def widen(typing_context, element):  # type: ignore[no-untyped-def]
    """Converts a float32 or bfloat16 element to float32."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if signature.args[0] == types.float32:
            return arguments[0]
        word = builder.shl(builder.zext(arguments[0], _WORD), ir.Constant(_WORD, 16))
        return builder.bitcast(word, _FLOAT)

    return types.float32(element), codegen


@intrinsic
def narrow(typing_context, number, like):  # type: ignore[no-untyped-def]
    """Converts a float32 to the type of `like`; rounds to the nearest bfloat16, ties to even."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if signature.args[1] == types.float32:
            return arguments[0]
        word = builder.bitcast(arguments[0], _WORD)
        is_odd = builder.and_(builder.lshr(word, ir.Constant(_WORD, 16)), ir.Constant(_WORD, 1))
        rounded = builder.add(builder.add(word, is_odd), ir.Constant(_WORD, 0x7FFF))
        upper = builder.trunc(builder.lshr(rounded, ir.Constant(_WORD, 16)), _HALF)
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.select(is_nan, ir.Constant(_HALF, _NAN), upper)

    return like(types.float32, like), codegen
