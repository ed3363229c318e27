"""Where compiled kernels beat SDPA over slabs: microseconds a layer, for the choice in attention/cpu.py.

python -m benchmarks.attention [--runs 50] [--name attention_amx] [--dtype float32] [--head-dim 128] [--window 128]

"kernel" works in vectors (path_kernel.py), "matrices" in whole ones (matrix_kernel.py), where the processor has them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmarks.common import spread, write_results

import numpy as np  # isort: skip
import torch  # isort: skip

from batchserve.attention import cpu
from batchserve.attention.base import AttentionParams, LayerShape, Span, Spans
from batchserve.attention.compiled import supports_amx
from batchserve.attention.cpu import CpuBackend
from batchserve.attention.tiles import LANES
from batchserve.kv.slab import SlabAllocator

# (requests, rows each, context), (heads, K/V heads)
CASES = [
    *((1, 1, 256), (4, 1, 256), (16, 1, 128), (16, 1, 256), (16, 1, 1024), (1, 1, 4096), (16, 2, 256), (16, 3, 256)),
    *((1, 5, 256), (16, 5, 256), (1, 9, 256), (4, 4, 1024), (1, 17, 256), (1, 17, 1024), (4, 17, 1024)),
    *((1, 64, 2048), (1, 256, 0), (16, 5, 1024), (1, 512, 512)),
]
HEADS = {"bundled": (4, 2), "90m": (12, 4), "430m": (16, 16), "llama-3-8b": (32, 8), "gpt-oss-20b": (64, 8)}
WITH_SINKS = ("gpt-oss-20b",)  # which SDPA has not: there the reference's arithmetic stands in for it
MAX_DRAFTS = 64  # rows: up to this many form a binary tree; more are a prompt


def contender(
    dtype: torch.dtype,
    dim: int,
    heads: tuple[int, int],
    case: tuple[int, int, int],
    kind: str,
    has_sinks: bool,
    window: int,
) -> Callable[[], Any]:
    """One layer's attend() of one step, masks cached as between the layers of a step. window: 0 is none."""
    requests, rows, context = case
    num_heads, num_kv_heads = heads
    allocator = SlabAllocator(
        [LayerShape(num_kv_heads, dim, dim)], str(dtype).removeprefix("torch."), requests * (context + rows + 64)
    )
    has_kernel = kind != "sdpa"
    with mock.patch.object(cpu, "supports_amx", return_value=kind == "matrices"):
        backend = CpuBackend(allocator, num_heads, has_kernel=has_kernel, has_sinks=has_kernel)  # all spans, if any
    spans = []
    is_chain = rows == 1 or rows > MAX_DRAFTS
    behind = np.arange(-1, rows - 1, dtype=np.int32)
    parents = behind if is_chain else behind // 2
    positions = context + (np.arange(rows) if is_chain else np.log2(np.arange(1, rows + 1)).astype(np.int64))
    for i in range(requests):
        allocator.reserve(str(i), context + rows)
        for plane in allocator.planes(str(i), 0):
            torch.from_numpy(plane).view(dtype).normal_()
        allocator.commit(str(i), range(context))
        spans.append(Span(str(i), i * rows, context, parents, positions, is_chain=is_chain))
    backend.begin(Spans.of(spans))
    query = torch.randn(1, requests * rows, num_heads, dim).to(dtype).transpose(1, 2)
    key, value = (torch.randn(1, requests * rows, num_kv_heads, dim).to(dtype).transpose(1, 2) for _ in range(2))
    params = AttentionParams(dim**-0.5, window or None, sinks=torch.randn(num_heads) if has_sinks else None)
    return lambda: backend.attend(0, query, key, value, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--name", default="attention", help="of the file with the results (default: attention)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=64)
    parser.add_argument("--window", type=int, default=0, help="keys of a sliding window (default: none)")
    args = parser.parse_args()
    if args.window < 0:
        parser.error(f"argument --window: {args.window}: must be at least 0")
    dtype = getattr(torch, args.dtype)
    kinds = ["sdpa", "kernel"]
    if supports_amx([LayerShape(1, args.head_dim, args.head_dim)], args.dtype):
        kinds.append("matrices")
    rows = []
    for name, heads in HEADS.items():
        for case in CASES:
            what = dtype, args.head_dim, heads, case
            calls = {kind: contender(*what, kind, name in WITH_SINKS, args.window) for kind in kinds}
            times: dict[str, list[float]] = {kind: [] for kind in calls}
            for number in range(args.runs + 3):
                for kind, call in calls.items():
                    start = time.perf_counter()
                    call()
                    if number >= 3:
                        times[kind].append((time.perf_counter() - start) * 1e6)
            requests, count, context = case
            row: dict[str, Any] = {
                "shape": name,
                "requests": requests,
                "rows_each": count,
                "context": context,
                "work_each": -(-count * heads[0] // heads[1] // LANES) * heads[1] * (context + count),
                **{f"{kind}_us": spread(times[kind]) for kind in kinds},
            }
            rows.append(row)
            found = ", ".join(f"{kind} {row[f'{kind}_us']['median']:7.0f} us" for kind in kinds)
            print(
                f"{name:8} {requests:3} x {count:3} rows, context {context:5}, work each {row['work_each']:7}: {found}",
                flush=True,
            )
    write_results(args.name, {"dtype": args.dtype, "window": args.window, "head_dim": args.head_dim, "cases": rows})


if __name__ == "__main__":
    main()
