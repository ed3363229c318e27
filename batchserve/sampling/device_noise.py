"""The sampler's noise (noise.py) as tensor operations: the same 64-bit hash on any device, for many rows at once."""

from __future__ import annotations

import torch

from batchserve.sampling import noise

# Sums and products of int64 tensors wrap around, so the hash needs no other type; these are noise.py's constants with
# the same bits. That holds for torch's and Triton's kernels. In Inductor's C++ kernels (compiled for a CPU) overflow is
# undefined, and a loop over the tokens was seen to never end: compile this for GPUs only, or with -fwrapv.
GOLDEN = noise.GOLDEN - (1 << 64)
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND_FACTOR = 0x94D049BB133111EB - (1 << 64)
HALF = 1 << 31


def mix(x: torch.Tensor) -> torch.Tensor:
    """Applies noise.mix to every element of an int64 tensor."""
    x = (x ^ _shifted(x, 30)) * FIRST_FACTOR
    x = (x ^ _shifted(x, 27)) * SECOND_FACTOR
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts right and fills with zeros: >> alone would copy the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def stream_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns noise.stream_key of every (seed, position), for the request's first sample; all int64."""
    return mix(mix(mix(seeds + GOLDEN) + positions * GOLDEN) + GOLDEN)


def draws(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns draws, int64 in [0, 2^32), of these tokens under these keys, which are broadcast against each other."""
    return _shifted(mix((token_ids + 1) * GOLDEN + keys), 32)


def gumbel(draw: torch.Tensor) -> torch.Tensor:
    """Returns float64 noise of these draws, equal to noise.gumbel up to the rounding of two logarithms."""
    return -torch.log(-torch.log((draw.double() + 0.5) * 2.0**-32))


def gumbel_fp32(draw: torch.Tensor) -> torch.Tensor:
    """Returns the same noise in float32, within 1e-4 of it.

    A uniform near 1, where the noise is highest, would be rounded to 1. So from 1/2 on, its distance to 1 is used.
    """
    is_high = draw >= HALF
    distance = (torch.where(is_high, (1 << 32) - 1 - draw, draw).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.where(is_high, torch.log1p(-distance), torch.log(distance)))
