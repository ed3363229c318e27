"""Checks whether rounding alone could have made the plain path choose a token: the default level's lossless rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from batchserve.sampling.logits import allowed_tokens
from batchserve.sampling.noise import gumbel, stream_key

if TYPE_CHECKING:
    from batchserve.request import ResolvedSampling

# The most that rounding may move one logit: absolute in fp32, and relative to the largest logit in 16-bit types, whose
# spacing grows with the value (bfloat16 keeps 8 bits, float16 11; a few roundings add up over the layers).
FP32_BOUND = 1e-4
RELATIVE_BOUND = {"bfloat16": 2.0**-5, "float16": 2.0**-8}
MASKED = 1e4  # a logit this far below the largest is the model's mask for a forbidden token, and adds no rounding error
NUCLEUS_SLACK = 0.02  # how far rounding may move a cumulative probability


def rounding_bound(dtype: str, logits: np.ndarray) -> float:
    """Returns the stated bound on the gap of two logits that rounding may close; the least if they are not finite."""
    if dtype == "float32":
        return FP32_BOUND
    largest = np.abs(logits[logits >= logits.max() - MASKED]).max(initial=1.0)
    return RELATIVE_BOUND[dtype] * float(largest if np.isfinite(largest) else 1.0)


def is_near_tie(logits: np.ndarray, token_id: int, position: int, sampling: ResolvedSampling, bound: float) -> bool:
    """True if `token_id` wins at `position`, or loses by at most `bound`, in the plain path's float32 logits [vocab].

    When sampling, scores are perturbed logits, and `bound` is divided by the temperature as they are. A token within
    the bound of the edge of top_k or top_p may or may not be in the set.
    """
    if sampling.temperature == 0.0:
        return bool(logits.max() - logits[token_id] <= bound)
    slack = bound / sampling.temperature
    scaled = logits.astype(np.float64) / sampling.temperature
    # Without top_k and top_p the set has no edge that rounding could move a token across.
    has_nucleus = sampling.top_p < 1.0
    surely = _kept(logits, sampling, sampling.top_p * (1 - NUCLEUS_SLACK) if has_nucleus else 1.0)
    if has_nucleus or sampling.top_k > 0:
        surely = surely[scaled[surely] >= scaled[surely].min() + slack]
    maybe_edge = scaled[_kept(logits, sampling, min(1.0, sampling.top_p * (1 + NUCLEUS_SLACK)))].min() - slack
    if scaled[token_id] < maybe_edge:
        return False
    key = stream_key(sampling.seed, position)
    score = scaled[token_id] + gumbel(key, np.array([token_id]))[0]
    if len(surely) == 0:
        return True
    return bool(score >= (scaled[surely] + gumbel(key, surely)).max() - slack)


def _kept(logits: np.ndarray, sampling: ResolvedSampling, top_p: float) -> np.ndarray:
    return allowed_tokens(logits, sampling.temperature, sampling.top_k, top_p, sampling.min_p)[0]
