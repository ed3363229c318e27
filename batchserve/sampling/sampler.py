"""Samples the token that follows a row: argmax of (processed logit + g), with g keyed by position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from batchserve.sampling.argmax_kernel import best_tokens
from batchserve.sampling.draw_kernel import LOWEST_TEMPERATURE, block_tops, draw_allowed, floor_of
from batchserve.sampling.logprobs import logprobs_by_definition
from batchserve.sampling.noise import gumbel, stream_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchserve.request import ResolvedSampling
    from batchserve.row_adjustments import RowAdjustments
    from batchserve.types import TokenLogprobs

    FindBest = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    SampleRow = Callable[[np.ndarray, int, ResolvedSampling], int]

NO_TOKEN = -1  # the result of a row whose greatest logit is NaN or infinite


class RowSampler:
    """Samples rows of one step's logits on demand, so sampled requests pay only for the rows that a walk reaches.

    logits float32 [num_rows, vocab_size]. find_best: argmax_kernel.best_tokens, or a faster source of the same results
    for these logits. sample: sample_row, or sample_by_definition. A row's outcome depends on nothing but its logits,
    the sampling parameters and the position.
    """

    def __init__(self, logits: np.ndarray, find_best: FindBest = best_tokens, sample: SampleRow | None = None) -> None:
        self._logits, self._best_tokens = logits, find_best
        self._sample = sample or sample_row
        self._argmax = np.zeros(0, np.int64)
        self._greedy = self._argmax  # NO_TOKEN where the greatest logit is not finite

    def token_at(self, row: int, position: int, sampling: ResolvedSampling) -> int:
        """Returns the token at absolute `position`, given the row before it; NO_TOKEN if the logits have overflowed."""
        if sampling.temperature == 0.0:
            return int(self.greedy()[row])
        return self._sample(self._logits[row], position, sampling)

    def adjusted_token_at(
        self,
        row: int,
        position: int,
        sampling: ResolvedSampling,
        adjustments: RowAdjustments | None,
        path: Sequence[int],
        logprobs: list[TokenLogprobs],
    ) -> int:
        """Returns token_at's token for a request that changes logits or asks for logprobs, which are added to those
        given. path: draft tokens up to the row.
        """
        logits = self._logits[row]
        adjusted = logits if adjustments is None else adjustments.adjusted(logits, path)
        if sampling.temperature == 0.0:
            best = int(adjusted.argmax())
            token = best if np.isfinite(adjusted[best]) else NO_TOKEN
        else:
            token = self._sample(adjusted, position, sampling)
        if sampling.logprobs is not None and token != NO_TOKEN:
            logprobs.append(logprobs_by_definition(logits, adjusted, token, sampling))
        return token

    def greedy(self) -> np.ndarray:
        """Returns int64 [num_rows]: token_at's token of every row at temperature 0."""
        if not len(self._greedy):
            self._find_best()
        return self._greedy

    def argmax(self) -> np.ndarray:
        """Returns int64 [num_rows]: the likeliest token of every row, whatever the sampling."""
        if not len(self._argmax):
            self._find_best()
        return self._argmax

    def _find_best(self) -> None:
        best, is_finite = self._best_tokens(self._logits)
        self._argmax, self._greedy = best, best if is_finite.all() else np.where(is_finite, best, NO_TOKEN)


def sample_by_definition(logits: np.ndarray, position: int, sampling: ResolvedSampling) -> int:
    """Returns sample_row's token, by NumPy alone: for the time until that is compiled. It is many times slower."""
    if not np.isfinite(logits.max()):
        return NO_TOKEN
    scaled = logits.astype(np.float64) / max(sampling.temperature, LOWEST_TEMPERATURE)
    least = scaled.max() - floor_of(sampling.min_p)
    if 0 < sampling.top_k < len(scaled):
        least = max(least, np.partition(scaled, -sampling.top_k)[-sampling.top_k])
    if sampling.top_p < 1.0:
        ordered = np.sort(scaled[scaled >= least])[::-1]
        cumulative = np.cumsum(np.exp(ordered - ordered[0]))
        least = max(least, ordered[np.searchsorted(cumulative, sampling.top_p * cumulative[-1])])
    token_ids = np.flatnonzero(scaled >= least)
    scores = scaled[token_ids] + gumbel(stream_key(sampling.seed, position), token_ids)
    return int(token_ids[scores.argmax()])


def sample_row(logits: np.ndarray, position: int, sampling: ResolvedSampling) -> int:
    """Makes one Gumbel-max draw from float32 logits [vocab_size] at temperature > 0.

    Logits that overflowed (a NaN, or an infinity at the top) have no distribution and give NO_TOKEN.
    """
    if not np.isfinite(logits.max()):
        return NO_TOKEN
    tops, key = block_tops(logits), np.uint64(stream_key(sampling.seed, position))
    temperature = max(sampling.temperature, LOWEST_TEMPERATURE)
    limits = sampling.top_k, sampling.top_p, floor_of(sampling.min_p)
    return int(draw_allowed(logits, tops, temperature, *limits, key))
