"""Log probabilities of the tokens of an answer, and of the likeliest tokens at their places."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from batchserve.native.jit import njit
from batchserve.sampling.draw_kernel import (
    BLOCK,
    LOWEST_TEMPERATURE,
    NEGLIGIBLE_NATS,
    block_tops,
    floor_of,
    least_allowed,
    mass,
)
from batchserve.types import TokenLogprobs

if TYPE_CHECKING:
    from batchserve.request import ResolvedSampling

WHOLE = 50.0  # nats below the greatest down to which `mass` adds up
NOT_ASKED = -1
RAW = np.array([0.0, 0.0, 1.0, NEGLIGIBLE_NATS])  # parameters that process nothing


class FoundLogprobs(NamedTuple):
    """Log probabilities that compiled code found, at the places of the tokens in `walked`.

    values float32 and ranks int64 [num_rows]: of the tokens. top_ids int64 and top_values float32 [num_rows, most]: of
    the likeliest ones, descending.
    """

    values: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_values: np.ndarray

    @classmethod
    def empty(cls, num_rows: int, most: int) -> FoundLogprobs:
        values, ranks = np.empty(num_rows, np.float32), np.empty(num_rows, np.int64)
        return cls(values, ranks, np.empty((num_rows, most), np.int64), np.empty((num_rows, most), np.float32))

    def tokens(self, start: int, count: int, num_tops: int) -> list[TokenLogprobs]:
        """Returns those of `count` tokens from a place on, each with the num_tops likeliest."""
        run = slice(start, start + count)
        ids, tops = self.top_ids[run, :num_tops].tolist(), self.top_values[run, :num_tops].tolist()
        each = zip(self.values[run].tolist(), self.ranks[run].tolist(), ids, tops, strict=True)
        return [TokenLogprobs(value, rank, tuple(zip(i, t, strict=True))) for value, rank, i, t in each]


@njit(cache=True, nogil=True)
def note_logprobs(row, param, token, num_tops, place, found):  # type: ignore[no-untyped-def]
    """Writes the log probabilities at a row to a place of FoundLogprobs.

    row: float32 [vocab_size] without NaN. param: temperature, top_k, top_p and floor (draw_kernel.floor_of), by which
    the row is processed; a temperature of 0 is 1, without a cut. num_tops: at most as many as there are tokens.
    """
    values, ranks, top_ids, top_values = found
    tops, temperature = block_tops(row), param[0] if param[0] > 0.0 else 1.0
    top = np.float64(tops.max()) / temperature
    least = top - WHOLE
    if param[0] > 0.0 and (param[1] > 0 or param[2] < 1.0 or param[3] < NEGLIGIBLE_NATS):
        least = least_allowed(row, tops, temperature, int(param[1]), param[2], param[3])
    norm = top + math.log(mass(row, tops, temperature, least))
    is_cut = least > top - WHOLE
    rank = 0
    for i in range(row.shape[0]):
        rank += row[i] >= row[token]
    ranks[place] = rank
    processed = np.float64(row[token]) / temperature
    values[place] = -np.inf if is_cut and processed < least else processed - norm
    ids, likeliest = top_ids[place], top_values[place]
    count = 0
    for block in range(tops.shape[0]):
        if num_tops == 0 or (count == num_tops and tops[block] <= likeliest[count - 1]):
            continue
        for i in range(block * BLOCK, min((block + 1) * BLOCK, row.shape[0])):
            if count == num_tops and row[i] <= likeliest[count - 1]:
                continue
            at = count if count < num_tops else count - 1
            while at > 0 and likeliest[at - 1] < row[i]:  # of equals the first token comes first
                likeliest[at], ids[at] = likeliest[at - 1], ids[at - 1]
                at -= 1
            likeliest[at], ids[at] = row[i], i
            count = min(count + 1, num_tops)
    for i in range(count):
        processed = np.float64(likeliest[i]) / temperature
        likeliest[i] = -np.inf if is_cut and processed < least else processed - norm


@njit(cache=True, nogil=True)
def note_tokens(logits, param, tokens, num_tops, found):  # type: ignore[no-untyped-def]
    """note_logprobs of the tokens int64 [num_rows] after these rows of logits. Rows with NaN have NaN."""
    for row in range(len(tokens)):
        num_nan = 0
        for i in range(logits.shape[1]):
            num_nan += logits[row, i] != logits[row, i]
        if num_nan == 0:
            note_logprobs(logits[row], param, tokens[row], num_tops, row, found)
        else:
            found[0][row], found[1][row] = np.nan, 1
            found[2][row, :], found[3][row, :] = 0, np.nan


def logprobs_by_definition(
    logits: np.ndarray, adjusted: np.ndarray, token: int, sampling: ResolvedSampling
) -> TokenLogprobs:
    """Returns what note_logprobs finds, by NumPy but for the cut. adjusted: the row that the token was chosen from."""
    row, scaled = logits, logits.astype(np.float64)
    if sampling.has_processed_logprobs:
        row, scaled = adjusted, adjusted.astype(np.float64)
        if sampling.temperature > 0.0:
            temperature = max(sampling.temperature, LOWEST_TEMPERATURE)
            scaled /= temperature
            limits = sampling.top_k, sampling.top_p, floor_of(sampling.min_p)
            if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
                scaled[scaled < least_allowed(row, block_tops(row), temperature, *limits)] = -np.inf
    values = scaled - scaled.max()
    values -= math.log(np.exp(values).sum())
    order = np.argsort(-row, kind="stable")[: sampling.logprobs or 0].tolist()
    tops = tuple((token_id, float(np.float32(values[token_id]))) for token_id in order)
    return TokenLogprobs(float(np.float32(values[token])), int((row >= row[token]).sum()), tops)
