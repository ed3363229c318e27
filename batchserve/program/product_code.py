"""The inner loop of a product in vector code: some rows times some column blocks, over a run of k.

Every output is summed in one chain in the order of k, whatever other rows and columns are computed with it, so its bits
do not depend on the number of rows. bfloat16 weights are either widened to float32, which is exact, or multiplied in
pairs, if the processor supports that and the rows are bfloat16 as well.
"""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from batchserve.native import vector_code as code
from batchserve.native.vector_code import FLOAT, FLOATS, WIDTH, WORD, WORDS, Builder, Value, index
from batchserve.program.instructions import BLOCK, Kernel

PARTS = BLOCK // WIDTH  # vectors per block
# Sums use 24 of 32 vector registers, or 8 of 16, and leave the others to weights.
ROWS_AT_ONCE, BLOCKS_AT_ONCE = (8, 3) if WIDTH == 16 else (4, 1)
AHEAD = 2048  # bytes by which each column block is prefetched ahead
_POINTER = ir.PointerType()
_BYTE = ir.IntType(8)


def _at(builder: Builder, base: Value, offset: Value) -> Value:
    return builder.gep(base, [offset], source_etype=_BYTE)


def prefetch(builder: Builder, address: Value) -> None:
    """Prefetches the cache line of an address."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, number, number, number])
    constants = [ir.Constant(number, value) for value in (0, 3, 1)]  # for reading, into all caches, data
    builder.call(code.declared(builder, "llvm.prefetch.p0", kind), [address, *constants])


@functools.cache
def multiply(num_rows: int, num_blocks: int, kernel: Kernel) -> Any:
    """Returns an intrinsic: sums += x times weights, over num_words words of k.

    x: the address of rows, by_row bytes apart; bfloat16 for PAIRS, otherwise float32. weights: the address of the
    first block's words, by_block bytes apart. sums: the address of float32 rows of num_blocks * BLOCK columns, by_sum
    bytes apart. All are int64.
    """

    in_word = 1 if kernel == Kernel.FLOATS else 2

    @intrinsic
    def multiplied(typing_context, x, by_row, weights, by_block, num_words, sums, by_sum):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            x, by_row, weights, by_block, num_words, sums, by_sum = arguments
            vectors = [(row, block, part) for row in range(num_rows) for block in range(num_blocks)
                       for part in range(PARTS)]  # fmt: skip
            totals = {each: cgutils.alloca_once(builder, FLOATS) for each in vectors}

            def place(row: int, block: int, part: int) -> Value:
                offset = builder.mul(by_sum, index(row))
                return builder.inttoptr(
                    builder.add(builder.add(sums, offset), index(4 * (block * BLOCK + part * WIDTH))), _POINTER
                )

            for each, total in totals.items():
                builder.store(builder.load(place(*each), typ=FLOATS, align=4), total)
            rows = [builder.inttoptr(builder.add(x, builder.mul(by_row, index(row))), _POINTER)
                    for row in range(num_rows)]  # fmt: skip
            blocks = [builder.inttoptr(builder.add(weights, builder.mul(by_block, index(block))), _POINTER)
                      for block in range(num_blocks)]  # fmt: skip
            with cgutils.for_range(builder, num_words) as loop:
                at_weight = builder.mul(loop.index, index(4 * BLOCK))
                at_x = builder.mul(loop.index, index(4 if kernel == Kernel.PAIRS else 4 * in_word))
                factors: dict[tuple[int, int], list[Value]] = {}
                for block in range(num_blocks):
                    line = _at(builder, blocks[block], at_weight)
                    prefetch(builder, _at(builder, line, index(AHEAD)))
                    for part in range(PARTS):
                        words = builder.load(_at(builder, line, index(4 * WIDTH * part)), typ=WORDS, align=4 * WIDTH)
                        is_paired = kernel == Kernel.PAIRS
                        factors[block, part] = [words] if is_paired else code.widened(builder, words, in_word)
                for k in range(len(factors[0, 0])):
                    for row in range(num_rows):
                        element = _at(builder, rows[row], builder.add(at_x, index(4 * k)))
                        for (block, part), vectors in factors.items():
                            total, factor = totals[row, block, part], vectors[k]
                            so_far = builder.load(total, typ=FLOATS)
                            if kernel == Kernel.PAIRS:
                                one = code.everywhere(builder, builder.load(element, typ=WORD, align=2))
                                summed = code.multiply_pairs(builder, so_far, one, factor)
                            else:
                                one = code.everywhere(builder, builder.load(element, typ=FLOAT, align=4))
                                summed = code.multiply_add(builder, one, factor, so_far)
                            builder.store(summed, total)
            for each, total in totals.items():
                builder.store(builder.load(total, typ=FLOATS), place(*each), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return multiplied
