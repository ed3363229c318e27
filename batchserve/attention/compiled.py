"""The compiled attention of a CPU: which layers it serves, its loops, and their jobs in a native program's step.

The loops use matrix instructions (matrix_kernel.py) or vector instructions (path_kernel.py). They reduce keys in
position order, whatever else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from batchserve.attention import matrix_code, matrix_kernel, path_kernel, span_job
from batchserve.attention.span_job import begin_jobs, store_loop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numba.core.ccallback import CFunc

    from batchserve.attention.base import LayerShape, Spans
    from batchserve.kv.slab import SlabAllocator

ALONE = 1_000  # work that one thread finishes before a second one has started
# Rows of a span in one unit of work: more are no faster, and leave threads idle if heads are few. The matrix kernel
# fills a block with queries of one K/V head or several. Each thread should get TURNS units.
PART_ROWS, MAX_PARTS, PART_QUERIES, TURNS = 8, 16, 16, 8
ELEMENTS = {"float32": "float32", "bfloat16": "uint16"}  # the element type that compiled code uses for a dtype


def kernel_supports(layers: Sequence[LayerShape], dtype: str) -> bool:
    """Returns whether the compiled kernels can serve these layers."""
    if dtype not in ELEMENTS or any(shape.key_dim != shape.value_dim for shape in layers):
        return False
    return all(shape.key_dim * np.dtype(ELEMENTS[dtype]).itemsize % 4 == 0 for shape in layers)


def supports_amx(layers: Sequence[LayerShape], dtype: str) -> bool:
    """Returns whether the compiled kernels can use matrix instructions. On some processors only oneDNN can."""
    is_whole = all(shape.key_dim % matrix_code.PAIRS == 0 for shape in layers)
    return dtype == "bfloat16" and is_whole and matrix_code.can_use_amx()


def attend_loop(dtype: str, *, has_tiles: bool) -> CFunc[Any]:
    """Returns the compiled loop that attends over the spans of a job, and stores K and V first if the job says so."""
    return matrix_kernel.attend_loop() if has_tiles else path_kernel.attend_loop(ELEMENTS[dtype])


class CompiledAttention:
    """Writes a step's spans into the attention jobs of a native program. The allocator holds K and V.

    num_heads: query heads, the most of any layer.
    """

    def __init__(self, allocator: SlabAllocator, num_heads: int) -> None:
        self.allocator = allocator
        self._group = num_heads // allocator.min_kv_heads  # of the layer where it is largest
        self._has_tiles = supports_amx(allocator.layers, allocator.dtype)
        self._part_rows = max(1, PART_QUERIES // self._group) if self._has_tiles else PART_ROWS
        self._planes, self._capacities = np.empty((0, 0, 2), np.int64), np.empty(0, np.int64)

    def begin_jobs(self, spans: Spans, jobs: np.ndarray, num_threads: int) -> bool:
        """Calls span_job.begin_jobs for a step."""
        allocator = self.allocator
        if len(spans) > len(self._capacities):
            self._capacities = np.empty(2 * len(spans), np.int64)
            self._planes = np.empty((allocator.num_layers, 2 * len(spans), 2), np.int64)
        shares = (self._part_rows, MAX_PARTS, TURNS, ALONE, num_threads, self._group, allocator.num_kv_heads)
        arrays = (spans.rows, spans.parents, self._planes, self._capacities)
        return bool(begin_jobs(jobs, allocator.slabs(spans.request_ids), *arrays, shares))

    def loops(self) -> tuple[int, int]:
        """Returns the addresses of two compiled loops: the one that stores K and V, and the one that attends."""
        loops = store_loop(ELEMENTS[self.allocator.dtype]), attend_loop(self.allocator.dtype, has_tiles=self._has_tiles)
        return cast("int", loops[0].address), cast("int", loops[1].address)


def compile_kernels(layers: Sequence[LayerShape], dtype: str) -> None:
    """Compiles the loops for such layers, or loads them from the cache on disk."""
    span_job.compile_kernels(ELEMENTS[dtype])
    attend_loop(dtype, has_tiles=supports_amx(layers, dtype))
