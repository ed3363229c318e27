"""Activation functions in vector code, over float32 arrays."""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from batchserve.native import vector_code as code
from batchserve.native.vector_code import FLOATS, WIDTH, WORDS, Builder, Value, index, splat
from batchserve.program.instructions import Function

_POINTER = ir.PointerType()


def _magnitude(builder: Builder, x: Value) -> Value:
    bits = builder.and_(builder.bitcast(x, WORDS), ir.Constant(WORDS, [0x7FFFFFFF] * WIDTH))
    return builder.bitcast(bits, FLOATS)


def _with_sign_of(builder: Builder, x: Value, sign: Value) -> Value:
    bits = builder.and_(builder.bitcast(sign, WORDS), ir.Constant(WORDS, [0x80000000] * WIDTH))
    return builder.bitcast(builder.or_(builder.bitcast(x, WORDS), bits), FLOATS)


def _decay(builder: Builder, x: Value, rate: float) -> Value:
    """Returns exp(-rate * |x|)."""
    return code.exp(builder, builder.fmul(_magnitude(builder, x), splat(-rate)))


def sigmoid(builder: Builder, x: Value, rate: float = 1.0) -> Value:
    """Returns 1 / (1 + exp(-rate * x)), computed with the exponential of a non-positive number."""
    decay = _decay(builder, x, rate)
    below = builder.fcmp_ordered("<", x, splat(0.0))
    return builder.fdiv(builder.select(below, decay, splat(1.0)), builder.fadd(decay, splat(1.0)))


def silu(builder: Builder, x: Value) -> Value:
    return builder.fmul(x, sigmoid(builder, x))


def tanh(builder: Builder, x: Value) -> Value:
    """Computes tanh from the exponential, or from its series near 0, where the exponential would cancel."""
    decay = _decay(builder, x, 2.0)
    far = builder.fdiv(builder.fsub(splat(1.0), decay), builder.fadd(splat(1.0), decay))
    square = builder.fmul(x, x)
    series = splat(62 / 2835)
    for coefficient in (-17 / 315, 2 / 15, -1 / 3, 1.0):
        series = code.multiply_add(builder, series, square, splat(coefficient))
    near = builder.fcmp_ordered("<", square, splat(0.01))
    return builder.select(near, builder.fmul(x, series), _with_sign_of(builder, far, x))


def erf(builder: Builder, x: Value) -> Value:
    """Computes erf to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    size = _magnitude(builder, x)
    t = builder.fdiv(splat(1.0), code.multiply_add(builder, size, splat(0.3275911), splat(1.0)))
    series = splat(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = code.multiply_add(builder, series, t, splat(coefficient))
    decay = code.exp(builder, builder.fneg(builder.fmul(x, x)))
    far = builder.fsub(splat(1.0), builder.fmul(builder.fmul(series, t), decay))
    return _with_sign_of(builder, far, x)


def gelu(builder: Builder, x: Value) -> Value:
    one_more = builder.fadd(erf(builder, builder.fmul(x, splat(math.sqrt(0.5)))), splat(1.0))
    return builder.fmul(builder.fmul(x, splat(0.5)), one_more)


def gelu_tanh(builder: Builder, x: Value) -> Value:
    cube = builder.fmul(builder.fmul(x, x), x)
    inner = builder.fmul(code.multiply_add(builder, cube, splat(0.044715), x), splat(math.sqrt(2 / math.pi)))
    return builder.fmul(builder.fmul(x, splat(0.5)), builder.fadd(tanh(builder, inner), splat(1.0)))


def relu(builder: Builder, x: Value) -> Value:
    return builder.select(builder.fcmp_ordered("<", x, splat(0.0)), splat(0.0), x)


def quick_gelu(builder: Builder, x: Value) -> Value:
    return builder.fmul(x, sigmoid(builder, x, 1.702))


FUNCTIONS: dict[Function, Callable[[Builder, Value], Value]] = {
    Function.SILU: silu,
    Function.GELU: gelu,
    Function.GELU_TANH: gelu_tanh,
    Function.RELU: relu,
    Function.SIGMOID: sigmoid,
    Function.TANH: tanh,
    Function.QUICK_GELU: quick_gelu,
}


@functools.cache
def apply(function: Function) -> Any:
    """Returns an intrinsic that applies a function in place to `count` float32, rounded up to a multiple of WIDTH."""

    @intrinsic
    def applied(typing_context, address, count):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            address, count = arguments
            chunks = builder.udiv(builder.add(count, index(WIDTH - 1)), index(WIDTH))
            with cgutils.for_range(builder, chunks) as loop:
                at = builder.inttoptr(builder.add(address, builder.mul(loop.index, index(4 * WIDTH))), _POINTER)
                x = builder.load(at, typ=FLOATS, align=4)
                builder.store(FUNCTIONS[function](builder, x), at, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return applied
