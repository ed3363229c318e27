"""From one row of logits to the tokens that may be sampled and their processed logits."""

from __future__ import annotations

import numpy as np

from batchserve.sampling.draw_kernel import at_least, block_tops, mass

# e^-30 of the top token's mass: all tokens below it together weigh less than fp32 can resolve, in any vocabulary.
NEGLIGIBLE_NATS = 30.0
# Dividing by less than this may overflow; two different float32 logits are worlds apart long before.
LOWEST_TEMPERATURE = 1e-200
SOME = (16, 128, 1024)  # a nucleus is looked for among so many of the greatest logits, then among more


def allowed_tokens(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """(token_ids int64 [m], processed logits float64 [m]) after temperature, top_k and top_p, in this order.

    logits is float32 [vocab_size], temperature > 0. Ties at the edge of top_k or top_p all stay in, so the set is a
    function of the values alone and no sort order shows through.
    """
    processed = process(logits, temperature)
    token_ids = np.flatnonzero(processed >= least_allowed(logits, temperature, top_k, top_p))
    return token_ids, processed[token_ids]


def process(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Processed logits, float64, of float32 ones."""
    return logits.astype(np.float64) / max(temperature, LOWEST_TEMPERATURE)


def least_allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> float:
    """The least processed logit that may be sampled; see allowed_tokens.

    The vocabulary is sorted whole only where a nucleus has thousands of tokens.
    """
    tops = block_tops(logits)
    least = float(process(tops.max(keepdims=True), temperature)[0]) - NEGLIGIBLE_NATS
    kept = logits
    if 0 < top_k < len(logits):
        kept = _likeliest(logits, tops, top_k)
        processed = process(kept, temperature)
        processed = processed[processed >= least]
        if top_k <= len(processed):
            least = float(np.partition(processed, len(processed) - top_k)[len(processed) - top_k])
    if top_p < 1.0:
        least = _nucleus_edge(kept, temperature, least, top_p)
    return least


def _likeliest(logits: np.ndarray, tops: np.ndarray, count: int) -> np.ndarray:
    """Logits among which are the `count` greatest, and all that equal the last of these."""
    # So many blocks have a logit that is as great as the greatest of the last of them.
    return logits if count > len(tops) else at_least(logits, tops, np.partition(tops, len(tops) - count)[-count])


def _nucleus_edge(logits: np.ndarray, temperature: float, least: float, top_p: float) -> float:
    """The least value in the smallest set of likeliest tokens whose probability reaches top_p.

    Of processed logits from `least` up.
    """
    tops = block_tops(logits)
    reached = top_p * mass(logits, tops, max(temperature, LOWEST_TEMPERATURE), least)
    for count in (*SOME, len(logits)):
        ordered = process(np.sort(_likeliest(logits, tops, count))[::-1], temperature)
        ordered = ordered[ordered >= least]
        cumulative = np.cumsum(np.exp(ordered - ordered[0]))
        last = int(np.searchsorted(cumulative, reached, side="left"))
        if last < len(ordered):
            return float(ordered[last])
    return float(ordered[-1])  # rounding
