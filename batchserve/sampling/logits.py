"""From one row of logits to the tokens that may be sampled and their processed logits."""

from __future__ import annotations

import numpy as np

from batchserve.sampling.draw_kernel import LOWEST_TEMPERATURE, block_tops, least_kept


def allowed_tokens(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """(token_ids int64 [m], processed logits float64 [m]) after temperature, top_k and top_p, in this order.

    logits is float32 [vocab_size], temperature > 0. Ties at the edge of top_k or top_p all stay in, so the set is a
    function of the values alone and no sort order shows through.
    """
    processed = process(logits, temperature)
    token_ids = np.flatnonzero(processed >= least_allowed(logits, block_tops(logits), temperature, top_k, top_p))
    return token_ids, processed[token_ids]


def process(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Processed logits, float64, of float32 ones."""
    return logits.astype(np.float64) / max(temperature, LOWEST_TEMPERATURE)


def least_allowed(logits: np.ndarray, tops: np.ndarray, temperature: float, top_k: int, top_p: float) -> float:
    """The least processed logit that may be sampled; see allowed_tokens. tops: draw_kernel.block_tops.

    Much of the vocabulary is sorted only where a nucleus has hundreds of tokens.
    """
    temperature = max(temperature, LOWEST_TEMPERATURE)
    least = float(least_kept(logits, tops, temperature, top_k, top_p))
    if not np.isnan(least):
        return least
    before = float(least_kept(logits, tops, temperature, top_k, 1.0))
    return _nucleus_edge(process(logits, temperature), before, top_p)


def _nucleus_edge(processed: np.ndarray, least: float, top_p: float) -> float:
    """As draw_kernel.least_of_nucleus, by sorting everything."""
    ordered = np.sort(processed[processed >= least])[::-1]
    cumulative = np.cumsum(np.exp(ordered - ordered[0]))
    last = int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left"))
    return float(ordered[min(last, len(ordered) - 1)])
