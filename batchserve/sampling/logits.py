"""From one row of logits to the tokens that may be sampled and their processed logits."""

from __future__ import annotations

import numpy as np

# e^-30 of the top token's mass: all tokens below it together weigh less than fp32 can resolve, in any vocabulary.
NEGLIGIBLE_NATS = 30.0
# Dividing by less than this may overflow; two different float32 logits are worlds apart long before.
LOWEST_TEMPERATURE = 1e-200


def allowed_tokens(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """(token_ids int64 [m], processed logits float64 [m]) after temperature, top_k and top_p, in this order.

    logits is float32 [vocab_size], temperature > 0. Ties at the edge of top_k or top_p all stay in, so the set is a
    function of the values alone and no sort order shows through. The vocabulary is never sorted whole.
    """
    scaled = logits.astype(np.float64) / max(temperature, LOWEST_TEMPERATURE)
    token_ids = np.flatnonzero(scaled >= scaled.max() - NEGLIGIBLE_NATS)
    kept = scaled[token_ids]
    if 0 < top_k < len(kept):
        edge = np.partition(kept, len(kept) - top_k)[len(kept) - top_k]
        chosen = kept >= edge
        token_ids, kept = token_ids[chosen], kept[chosen]
    if top_p < 1.0:
        chosen = kept >= _nucleus_edge(kept, top_p)
        token_ids, kept = token_ids[chosen], kept[chosen]
    return token_ids, kept


def _nucleus_edge(values: np.ndarray, top_p: float) -> float:
    """The smallest value in the smallest set of likeliest tokens whose probability reaches top_p."""
    ordered = np.sort(values)[::-1]
    probs = np.exp(ordered - ordered[0])
    cumulative = np.cumsum(probs)
    last = int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left"))
    return float(ordered[min(last, len(ordered) - 1)])
