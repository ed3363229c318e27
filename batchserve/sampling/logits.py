"""From one row of logits to the tokens that may be sampled and their processed logits."""

from __future__ import annotations

import numpy as np

from batchserve.sampling.draw_kernel import LOWEST_TEMPERATURE, block_tops, least_allowed


def allowed_tokens(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """(token_ids int64 [m], processed logits float64 [m]) after temperature, top_k and top_p, in this order.

    logits is float32 [vocab_size], temperature > 0. Ties at the edge of top_k or top_p all stay in, so the set is a
    function of the values alone and no sort order shows through.
    """
    processed = process(logits, temperature)
    least = least_allowed(logits, block_tops(logits), max(temperature, LOWEST_TEMPERATURE), top_k, top_p)
    token_ids = np.flatnonzero(processed >= least)
    return token_ids, processed[token_ids]


def process(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Processed logits, float64, of float32 ones."""
    return logits.astype(np.float64) / max(temperature, LOWEST_TEMPERATURE)
