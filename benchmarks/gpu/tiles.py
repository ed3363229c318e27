"""Which tiles and splits of our Triton kernel are fastest: what attention/triton.py's constants were chosen by.

    python benchmarks/gpu/tiles.py --seconds 60 --out FILE

One layer's attention of trees behind 1,024 tokens, its K/V not in the caches of the device. Tiles are compiled first,
in processes side by side. FILE has, by step, microseconds by tile and programs a multiprocessor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import cycle, product
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks" / "gpu")]

import torch  # noqa: E402

from batchserve.attention import triton  # noqa: E402
from batchserve.attention.base import LayerShape  # noqa: E402
from batchserve.attention.triton import Tile, TritonTreeKernel  # noqa: E402
from benchmarks.gpu.cases import Case, compare, make_step, reference  # noqa: E402
from benchmarks.gpu.kit import Kit, kernel_ms  # noqa: E402
from benchmarks.gpu.small_q import several  # noqa: E402

CONTEXT, LONGEST, HEAD_DIM = 1024, 5120, 128
KV_HEADS = (8, 32)  # of 32 heads: as Llama-3-8B has, and Llama-2-7B
STEPS = ((16, 1), (16, 4), (1, 1), (1, 16), (4, 16), (16, 16), (1, 64))  # requests, and rows of each
PROGRAMS = (4, 2, 8, 16, 32)  # a multiprocessor
# block_m, block_n, warps, stages
TILES = [
    Tile(*tile)
    for tile in (
        *((16, 16, 1, 6), (16, 32, 1, 4), (16, 32, 2, 4), (16, 32, 2, 5), (16, 32, 4, 5), (16, 64, 2, 3)),
        *((16, 64, 4, 3), (16, 64, 4, 4), (16, 64, 8, 3), (16, 128, 4, 2), (16, 128, 8, 3), (32, 32, 2, 4)),
        *((32, 32, 4, 5), (32, 64, 4, 3), (32, 64, 4, 4), (32, 128, 4, 2), (64, 32, 4, 5), (64, 64, 4, 3)),
        *((64, 64, 8, 3), (64, 128, 8, 2)),
    )
]
DTYPE = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="begin nothing new behind them (default: 60)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compile", type=int, nargs=2, metavar=("N", "OF"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    kit = Kit(is_dry=False, scratch=Path(tempfile.gettempdir()))
    if args.compile:
        _compile(kit, *args.compile)
        return
    end_s = time.monotonic() + args.seconds
    count = max(1, (os.cpu_count() or 1) - 1)
    command = [sys.executable, __file__, "--out", str(args.out), "--compile"]
    for process in [subprocess.Popen([*command, str(i), str(count)]) for i in range(count)]:
        process.wait()
    found: dict[str, dict[str, float]] = {}
    for kv_heads, (requests, rows) in product(KV_HEADS, STEPS):
        name = f"{kv_heads} K/V heads, {requests} requests of {rows} rows"
        found[name] = measure(kit, _case(kv_heads, requests, rows), end_s)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, sorted(found[name].items(), key=lambda each: each[1])[:4], flush=True)


def measure(kit: Kit, case: Case, end_s: float) -> dict[str, float]:
    """Microseconds of a layer; raises RuntimeError where a tile's answer is wrong."""
    step, found = make_step(case, kit.device, DTYPE), {}
    caches, exact = several(step, 2 * step.key_cache.nbytes), reference(step, case.params)
    for tile, programs in product(TILES, PROGRAMS):
        if time.monotonic() > end_s:
            break
        if tile.block_m > 16 and tile.block_m > max(case.rows) * case.heads // case.kv_heads:
            continue  # most of it would be empty
        with mock.patch.object(triton, "PROGRAMS_PER_SM", programs):
            kernel, layers = _kernel(case, tile), cycle(caches)
            kernel.plan(step.metadata)
            out = kernel.run(step.query, *caches[0], step.metadata, case.params)
            if not compare(out, exact, DTYPE)["is_right"]:
                raise RuntimeError(f"{case}, {tile}: wrong")

            def attend() -> torch.Tensor:
                return kernel.run(step.query, *next(layers), step.metadata, case.params)  # noqa: B023

            found[f"{_name(tile)}, {programs} programs"] = round(kernel_ms(kit, attend, len(caches)) * 1e3, 2)
    return found


def _compile(kit: Kit, number: int, count: int) -> None:
    """Every count-th tile, into Triton's cache on disk."""
    for kv_heads, tile in [*product(KV_HEADS, TILES)][number::count]:
        case = _case(kv_heads, 16, 16)
        step = make_step(case, kit.device, DTYPE)
        for num_splits in (1, 4):
            kernel = _kernel(case, tile, num_splits)
            kernel.run(step.query, step.key_cache, step.value_cache, step.metadata, case.params)
    kit.sync()


def _case(kv_heads: int, requests: int, rows: int) -> Case:
    return Case("tiles", (CONTEXT,) * requests, (rows,) * requests, kv_heads=kv_heads, head_dim=HEAD_DIM)


def _kernel(case: Case, tile: Tile, num_splits: int | None = None) -> TritonTreeKernel:
    shape = LayerShape(case.kv_heads, HEAD_DIM, HEAD_DIM)
    return TritonTreeKernel([shape], DTYPE, LONGEST, tile=tile, num_splits=num_splits)


def _name(tile: Tile) -> str:
    return f"{tile.block_m} x {tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages"


if __name__ == "__main__":
    main()
