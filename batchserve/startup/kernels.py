"""The kernels that every engine needs, and how long compiling them takes at a machine's first start.

Those of drafters are in draft/kernels.py, those of a model's attention where its steps are prepared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchserve.decoding_length import time_kernels
from batchserve.engine import commit
from batchserve.kv import row_moves
from batchserve.native import pool
from batchserve.native.compile_progress import Part, compile_parts
from batchserve.runner import row_layout
from batchserve.sampling import argmax_kernel, draw_kernel, sampled_walk, walk_kernel
from batchserve.scheduler import plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.startup.kv_memory import Progress

# Compile times in seconds, on one core of a server's processor.
COMMON_PARTS = (
    Part("row layout", 1.0, row_layout.compile_kernels),
    Part("plan", 0.8, plan.compile_kernels),
    Part("commit", 1.0, commit.compile_kernels),
    Part("pool", 0.5, pool.compile_kernels),
    Part("argmax", 0.6, argmax_kernel.compile_kernels),
    Part("step times", 4.5, time_kernels.compile_kernels),
)
CPU_PARTS = (
    *COMMON_PARTS,
    Part("row moves", 0.5, row_moves.compile_kernels),
    Part("greedy walk", 0.5, walk_kernel.compile_kernels),
)
SAMPLERS = (draw_kernel.__name__, sampled_walk.__name__)  # compiled when first needed, or after the first token
ATTENTION_S = 13.6


def compile_kernels(parts: Sequence[Part], say: Progress) -> None:
    """Compiles the parts, or loads them from the cache on disk."""
    say("preparing kernels (compiled at the first start)")
    compile_parts(parts, say)
