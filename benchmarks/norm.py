"""What the compiled RMS norm (runner/norm_kernel.py) is worth: forwards with it and with torch's, in turn.

python -m benchmarks.norm [--pairs 200]
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest import mock

from benchmarks.common import spread, write_results

import torch  # isort: skip
import torch.nn.functional as F  # isort: skip

from batchserve.request import GREEDY
from batchserve.runner.packed import FusedRMSNorm
from batchserve.runner.ragged_batch import RaggedBatch, RequestRows, build_batch
from benchmarks.adaptive.workloads import Lab, lab

CONTEXT = 200
CASES = {"1 plain row": (1, 1), "16 plain rows": (16, 1), "4 requests of 16 rows": (4, 16), "a prompt of 512": (1, 512)}


def torchs_norm(norm: FusedRMSNorm, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (len(norm.weight),), norm.weight.to(x.dtype), norm.eps)


def batch_of(bench: Lab, requests: int, rows: int) -> RaggedBatch:
    allocator, parts = bench.engine.core.runner.backend.allocator, []
    for i in range(requests):
        name = f"{requests}-{rows}-{i}"
        if not allocator.reserve(name, CONTEXT + rows):
            raise RuntimeError(f"no K/V memory for {CONTEXT + rows} tokens")
        allocator.touch(name)
        allocator.commit(name, range(CONTEXT))
        allocator.reserve(name, rows)
        parts.append(RequestRows(name, CONTEXT, [5] * rows, list(range(-1, rows - 1)), 1, GREEDY))
    return build_batch(parts)


def forward_s(bench: Lab, batch: RaggedBatch) -> float:
    began_s = time.perf_counter()
    bench.engine.core.runner.forward(batch)
    return time.perf_counter() - began_s


def measure(bench: Lab, batch: RaggedBatch, pairs: int) -> dict[str, Any]:
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(pairs + 5):
        mine = forward_s(bench, batch)
        with mock.patch.object(FusedRMSNorm, "forward", torchs_norm):
            other = forward_s(bench, batch)
        if number >= 5:
            ours.append(mine)
            theirs.append(other)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "with_ms": spread([1e3 * s for s in ours]),
        "torchs_ms": spread([1e3 * s for s in theirs]),
        "ratio": spread(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    args = parser.parse_args()
    models: dict[str, Any] = {}
    for model in ("bundled", "90m"):
        with lab(model) as bench:
            cells = {name: measure(bench, batch_of(bench, *case), args.pairs) for name, case in CASES.items()}
            models[model] = {"threads": bench.engine.core.runner.num_threads, "cases": cells}
            for name, cell in cells.items():
                print(model, name, {part: round(cell[part]["median"], 3) for part in cell}, flush=True)
    write_results("norm", {"models": models})


if __name__ == "__main__":
    main()
