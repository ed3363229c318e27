"""The compiled function of each kind of instruction. A program's rows have their addresses.

Each is compiled by itself when a program first has such an instruction, so that a first start compiles no more than its
model needs, and can compile several at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import cast

from numba import types

from batchserve.native.jit import cfunc
from batchserve.program import expert_operations, product, row_operations
from batchserve.program.instructions import Kernel, Op

# Takes the addresses of an instruction and of the step, the number of rows, the thread and its scratch memory.
SIGNATURE = types.void(*[types.int64] * 5)
FUNCTIONS = {
    Op.EMBED: row_operations.embed,
    Op.POSITION: row_operations.position,
    Op.NORM: row_operations.normalise,
    Op.ROTATE: row_operations.rotate,
    Op.KEEP: row_operations.keep,
    Op.ELEMENTWISE: row_operations.elementwise,
    Op.ROUTE: expert_operations.route,
    Op.GROUP: expert_operations.group,
    Op.GATHER: expert_operations.gather,
    Op.COMBINE: expert_operations.combine,
}


@functools.cache
def operation(op: Op, kernel: Kernel = Kernel.FLOATS) -> int:
    """Returns the address of the compiled function of a kind of instruction. kernel: that of a product."""
    of_product = product.multiply_floats if kernel == Kernel.FLOATS else product.multiply_halves
    function = of_product if op == Op.PRODUCT else FUNCTIONS[op]
    # As in NumPy, a division by zero gives an infinity.
    return cast("int", cfunc(SIGNATURE, nopython=True, cache=True, error_model="numpy")(function).address)


def compile_operations(needed: Iterable[tuple[int, int]]) -> None:
    """Compiles the functions of these (op, kernel), or loads them from the cache on disk."""
    for op, kernel in needed:
        operation(Op(op), Kernel(kernel) if op == Op.PRODUCT else Kernel.FLOATS)
