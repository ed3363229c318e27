"""Emits vector code for numba's compiler, in which this package's intrinsics are written (tiles.py, matrix_code.py).

A bfloat16 is the upper 16 bits of a float32. A 32-bit word holds two of them, so a vector of words widens to one
vector of the even elements and one of the odd elements.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

from batchserve.native.instruction_set import level_of

if TYPE_CHECKING:
    from numba import types

Value = Any  # ir.Value; llvmlite has no type annotations
Builder = Any


def features() -> list[str]:
    """Returns the features in numba's cache key, which it compiles for; available ones begin with "+"."""
    found: list[str] = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return found


def kernel_level() -> str:
    """Returns the instruction set of compiled kernels; "" if the processor is not x86-64."""
    return level_of(feature[1:] for feature in features() if feature.startswith("+"))


def _vector_width() -> int:
    """Returns the number of float32 in a vector register."""
    return 16 if "+avx512f" in features() else 8 if "+avx2" in features() else 4


WIDTH = _vector_width()
HAS_MANY_REGISTERS = WIDTH == 16 or platform.machine().lower() in ("aarch64", "arm64")  # 32, otherwise 16
ALIGN = 2  # bytes; no array is known to be aligned to more
WORD, FLOAT, INDEX = ir.IntType(32), ir.FloatType(), ir.IntType(64)
WORDS, FLOATS = ir.VectorType(WORD, WIDTH), ir.VectorType(FLOAT, WIDTH)
_ADDRESS = ir.PointerType()


class Array:
    """A C-contiguous two-dimensional array in vector code."""

    def __init__(self, context: Any, builder: Builder, kind: types.Array, value: Value) -> None:
        struct = context.make_array(kind)(context, builder, value)
        self._builder = builder
        self._size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
        self._data = builder.inttoptr(builder.ptrtoint(struct.data, INDEX), _ADDRESS)
        self.columns = cgutils.unpack_tuple(builder, struct.shape, 2)[1]
        self.parts = 4 // self._size  # elements per word
        self.row_bytes = builder.mul(self.columns, index(self._size))

    def at(self, row: Value, column: Value) -> Value:
        """Returns the address of an element."""
        builder = self._builder
        offset = builder.mul(builder.add(builder.mul(row, self.columns), column), index(self._size))
        return builder.gep(self._data, [offset], source_etype=ir.IntType(8))


def index(value: int) -> Value:
    return ir.Constant(INDEX, value)


def splat(value: float) -> Value:
    """Returns a vector in which every element is a constant."""
    return ir.Constant(FLOATS, [value] * WIDTH)


def load(builder: Builder, address: Value, kind: Value = FLOATS) -> Value:
    return builder.load(address, align=ALIGN, typ=kind)


def store(builder: Builder, value: Value, address: Value) -> None:
    builder.store(value, address, align=ALIGN)


def shuffle(builder: Builder, one: Value, other: Value, places: list[int]) -> Value:
    """Returns the elements of two vectors at `places`; the second vector's places start at WIDTH."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(WORD, len(places)), places))


def everywhere(builder: Builder, scalar: Value) -> Value:
    """Returns a vector in which every element is a runtime scalar."""
    kind = ir.VectorType(scalar.type, WIDTH)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(WORD, 0))
    return shuffle(builder, first, first, [0] * WIDTH)


def multiply_add(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """Returns a * b + c, rounded only once if the machine supports it."""
    kind = ir.FunctionType(FLOATS, [FLOATS, FLOATS, FLOATS])
    return builder.call(declared(builder, f"llvm.fmuladd.v{WIDTH}f32", kind), [a, b, c])


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat type, which llvmlite lacks."""

    null = "0.0"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def multiplies_pairs() -> bool:
    """True if the machine multiplies vectors of bfloat16 pairs."""
    return WIDTH == 16 and "+avx512bf16" in features()


def multiply_pairs(builder: Builder, sums: Value, one: Value, other: Value) -> Value:
    """Returns sums plus, for each word, both products of its bfloat16 elements."""
    halves = ir.VectorType(_BFloat(), 2 * WIDTH)
    kind = ir.FunctionType(FLOATS, [FLOATS, halves, halves])
    factors = [builder.bitcast(words, halves) for words in (one, other)]
    return builder.call(declared(builder, "llvm.x86.avx512bf16.dpbf16ps.512", kind), [sums, *factors])


def for_each_chunk(
    builder: Builder, elements: Array, rows: list[Value], body: Callable[[Value, list[list[Value]]], None]
) -> None:
    """Calls body(number, float32 vectors of each row) for every WIDTH words of the rows; zeros pad the last words."""
    parts = elements.parts
    words = builder.udiv(elements.columns, index(parts))
    whole, rest = builder.udiv(words, index(WIDTH)), builder.urem(words, index(WIDTH))

    def fetched(number: Value, fetch: Callable[[Value], Value]) -> list[list[Value]]:
        column = builder.mul(number, index(WIDTH * parts))
        return [widened(builder, fetch(elements.at(row, column)), parts) for row in rows]

    with cgutils.for_range(builder, whole) as loop:
        body(loop.index, fetched(loop.index, lambda address: load(builder, address, WORDS)))
    with builder.if_then(builder.icmp_unsigned(">", rest, index(0)), likely=False):
        body(whole, fetched(whole, lambda address: _load_first(builder, address, rest)))


def horizontal_sums(builder: Builder, vectors: list[Value]) -> tuple[list[Value], list[list[int]]]:
    """Returns vectors of the element sums of the given vectors, and for each place, the number of the vector it sums.

    Each round adds the upper half of each group to its lower half, for two vectors at once. Every sum is added up in
    the same order, regardless of which vector shares its rounds.
    """
    owners = [[number] * WIDTH for number in range(len(vectors))]
    half = WIDTH // 2
    while half:
        is_lower = [place & half == 0 for place in range(WIDTH)]
        stay = [place if lower else WIDTH + place for place, lower in enumerate(is_lower)]
        cross = [place + half if lower else WIDTH + place - half for place, lower in enumerate(is_lower)]
        pairs = [(i, min(i + 1, len(vectors) - 1)) for i in range(0, len(vectors), 2)]
        owners = [[owners[a if lower else b][place] for place, lower in enumerate(is_lower)] for a, b in pairs]
        halves = [[shuffle(builder, vectors[a], vectors[b], places) for places in (stay, cross)] for a, b in pairs]
        vectors = [builder.fadd(*two) for two in halves]
        half //= 2
    return vectors, owners


def across(builder: Builder, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Reduces all elements with `combine` and returns a vector of the result."""
    half = WIDTH // 2
    while half:
        vector = combine(vector, shuffle(builder, vector, vector, [place ^ half for place in range(WIDTH)]))
        half //= 2
    return vector


def exp(builder: Builder, x: Value) -> Value:
    """Computes exp of numbers <= 0, to about 2 units in the last place; 0 below -87, where float32 becomes inexact.

    exp(x) = 2^n * exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2, by a Taylor polynomial of degree 7. Adding
    1.5 * 2^23 rounds a number to an integer, which is then in the lowest bits.
    """
    shift = splat(1.5 * 2**23)
    shifted = multiply_add(builder, x, splat(math.log2(math.e)), shift)
    n = builder.fsub(shifted, shift)
    r = multiply_add(builder, n, splat(-0.693359375), x)
    r = multiply_add(builder, n, splat(2.12194440e-4), r)
    p = splat(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        p = multiply_add(builder, p, r, splat(1 / divisor))
    exponent = builder.shl(builder.bitcast(shifted, WORDS), ir.Constant(WORDS, [23] * WIDTH))
    power = builder.bitcast(builder.add(exponent, ir.Constant(WORDS, [127 << 23] * WIDTH)), FLOATS)
    scaled = builder.fmul(p, power)  # not an addition to the exponent of p, which might turn a NaN into a number
    return builder.select(builder.fcmp_ordered("<", x, splat(-87.0)), splat(0.0), scaled)


def widened(builder: Builder, words: Value, parts: int) -> list[Value]:
    """Returns float32 vectors: the low and the high halves of words of two parts, otherwise the words themselves."""
    if parts == 1:
        return [builder.bitcast(words, FLOATS)]
    low = builder.shl(words, ir.Constant(WORDS, [16] * WIDTH))
    high = builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * WIDTH))
    return [builder.bitcast(low, FLOATS), builder.bitcast(high, FLOATS)]


def _load_first(builder: Builder, address: Value, count: Value) -> Value:
    """Loads the first `count` words at an address, then zeros; reads nothing beyond them."""
    numbers = ir.Constant(WORDS, list(range(WIDTH)))
    is_there = builder.icmp_unsigned("<", numbers, everywhere(builder, builder.trunc(count, WORD)))
    kind = ir.FunctionType(WORDS, [_ADDRESS, WORD, is_there.type, WORDS])
    masked = declared(builder, f"llvm.masked.load.v{WIDTH}i32.p0", kind)
    return builder.call(masked, [address, ir.Constant(WORD, ALIGN), is_there, ir.Constant(WORDS, [0] * WIDTH)])


def declared(builder: Builder, name: str, kind: ir.FunctionType) -> Value:
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
