"""A pytest plugin that stands in for instructions which this processor lacks: products of tiles and of pairs.

The emulation computes what the processor's manual says, element by element, in memory of its own: on one thread only.
It has to come before the first module of kernels, and NUMBA_CACHE_DIR must be nobody else's.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from batchserve.attention import matrix_code
from batchserve.native import vector_code
from batchserve.native.vector_code import Builder, Value, index

EMULATED = os.environ.get("EMULATED_KERNEL", "")
LINES = ir.VectorType(ir.IntType(32), 16)
FLOATS = ir.VectorType(ir.FloatType(), 16)
POINTER = ir.PointerType()
TILE_BYTES, LINE = 1024, 64
_tiles = np.zeros(8 * TILE_BYTES + LINE, np.uint8)
TILES_AT = -(-_tiles.ctypes.data // LINE) * LINE


def pairs_of(builder: Builder, words: Value) -> list[Value]:
    low = builder.shl(words, ir.Constant(LINES, [16] * 16))
    high = builder.and_(words, ir.Constant(LINES, [0xFFFF0000] * 16))
    return [builder.bitcast(low, FLOATS), builder.bitcast(high, FLOATS)]


def multiply_pairs(builder: Builder, sums: Value, one: Value, other: Value) -> Value:
    for a, b in zip(pairs_of(builder, one), pairs_of(builder, other), strict=True):
        sums = builder.fadd(sums, builder.fmul(a, b))
    return sums


def call(builder: Builder, name: str, *arguments: Value) -> None:
    def line(base: Value, number: Value, stride: Value) -> Value:
        return builder.inttoptr(builder.add(base, builder.mul(number, stride)), POINTER)

    def tile(register: Value) -> Value:
        return index(TILES_AT + register.constant * TILE_BYTES)

    if name in ("ldtilecfg", "tilerelease"):
        return
    with cgutils.for_range(builder, index(16)) as row:
        own = line(tile(arguments[0]), row.index, index(LINE))
        if name == "tilezero":
            builder.store(ir.Constant(LINES, [0] * 16), own, align=LINE)
        elif name in ("tileloadd64", "tilestored64"):
            other = line(builder.ptrtoint(arguments[1], ir.IntType(64)), row.index, arguments[2])
            source, target = (other, own) if name == "tileloadd64" else (own, other)
            builder.store(builder.load(source, align=1, typ=LINES), target, align=1)
        elif name == "tdpbf16ps":
            with cgutils.for_range(builder, index(16)) as k:
                word = line(tile(arguments[1]), row.index, index(LINE))
                word = builder.gep(word, [builder.mul(k.index, index(4))], source_etype=ir.IntType(8))
                first = builder.insert_element(
                    ir.Constant(LINES, ir.Undefined),
                    builder.load(word, align=4, typ=ir.IntType(32)),
                    ir.Constant(ir.IntType(32), 0),
                )
                spread = builder.shuffle_vector(first, first, ir.Constant(LINES, [0] * 16))
                weights = builder.load(line(tile(arguments[2]), k.index, index(LINE)), align=LINE, typ=LINES)
                sums = multiply_pairs(builder, builder.load(own, align=LINE, typ=FLOATS), spread, weights)
                builder.store(sums, own, align=LINE)
        else:
            raise ValueError(f"{name} has no emulation")


def install() -> None:
    real = vector_code.features()
    there = [*real, "+avx512bf16"] + (["+amx-bf16", "+amx-tile"] if EMULATED == "TILES" else [])

    def features() -> list[str]:
        return there

    stand_ins: dict[Any, dict[str, Any]] = {
        vector_code: {"features": features, "multiply_pairs": multiply_pairs},
        matrix_code: {"call": call, "can_use_amx": lambda: EMULATED == "TILES"},
    }
    for module, functions in stand_ins.items():
        for name, function in functions.items():
            setattr(module, name, function)


install()
