"""Gumbel noise keyed by (seed, position, sample index, token). It is a pure function, so nothing else can change it."""

from __future__ import annotations

import numpy as np

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
# Draws have 32 bits, so the noise is bounded: -log(-log(u)) for u in [2^-33, 1 - 2^-33].
LOWEST_NOISE = -3.1300
HIGHEST_NOISE = 22.8739


def mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele et al., OOPSLA 2014): a bijection of 64-bit words."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def stream_key(seed: int, position: int, sample_index: int = 0) -> int:
    """Returns the 64-bit key of a draw, by absolute position (0 is the prompt's first token) and sample index."""
    key = mix((seed + GOLDEN) & MASK64)
    key = mix((key + position * GOLDEN) & MASK64)
    return mix((key + (sample_index + 1) * GOLDEN) & MASK64)


def gumbel(key: int, token_ids: np.ndarray) -> np.ndarray:
    """Returns the float64 noise of these tokens under the key, in [LOWEST_NOISE, HIGHEST_NOISE]."""
    x = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    uniform = ((x >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    noise: np.ndarray = -np.log(-np.log(uniform))
    return noise
