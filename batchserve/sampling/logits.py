"""Selects the tokens of one row of logits that may be sampled, with their processed logits."""

from __future__ import annotations

import numpy as np

from batchserve.sampling.draw_kernel import LOWEST_TEMPERATURE, block_tops, floor_of, least_allowed


def allowed_tokens(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (token_ids int64 [m], processed logits float64 [m]) after temperature, min_p, top_k and top_p, in this
    order.

    logits is float32 [vocab_size], temperature > 0. All ties at the edge of top_k or top_p are kept, so the set depends
    on the values alone and not on a sort order.
    """
    processed = process(logits, temperature)
    limits = top_k, top_p, floor_of(min_p)
    least = least_allowed(logits, block_tops(logits), max(temperature, LOWEST_TEMPERATURE), *limits)
    token_ids = np.flatnonzero(processed >= least)
    return token_ids, processed[token_ids]


def process(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Returns the processed logits (float64) of float32 logits: they are divided by the temperature."""
    return logits.astype(np.float64) / max(temperature, LOWEST_TEMPERATURE)
