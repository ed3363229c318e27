"""Compile our kernels for linears of few rows into Triton's cache on disk, side by side with others of this program.

    python -m benchmarks.gpu.products NUMBER OF

Else each first engine would compile them one behind the other.
"""

from __future__ import annotations

import contextlib
import sys

import torch

from batchserve.gpu.linears import ROW_COUNTS, Shape, multiply, variants
from batchserve.kernel_overlap import can_overlap

# A kernel is compiled for what its sizes can be divided by, not for the sizes: 11008 is no multiple of all blocks.
OUT_FEATURES, IN_FEATURES = 256, (4096, 11008)


@torch.inference_mode()
def main(number: int, count: int) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    overlaps = can_overlap(device)
    wanted = [
        (in_features, rows, variant)
        for in_features in IN_FEATURES
        for rows in ROW_COUNTS
        for variant in variants(Shape(OUT_FEATURES, in_features, dtype), rows, overlaps=overlaps)
        if variant.by_vectors or in_features == IN_FEATURES[0]
    ]
    for in_features, rows, variant in wanted[number::count]:
        x, weight, residual = (
            torch.ones(*shape, dtype=dtype, device=device)
            for shape in ((rows, in_features), (OUT_FEATURES, in_features), (rows, OUT_FEATURES))
        )
        with contextlib.suppress(Exception):  # what needs more memory than this GPU has is no variant of its engines
            for added in (None, residual):
                multiply(variant, x, weight, None, added, overlaps=overlaps)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
