"""Drafting for sampled requests: the sampler's noise is a pure function, so a drafter can compute it in advance.

A sampled token is the one with the largest log p + g. A blended probability q can mean two things. If the model itself
is undecided, q stands for p, and the noise decides. If it is the drafter that does not know what the model does, the
noise says nothing. So a token's probability is a mixture of both cases, whose weight is learned in bins of temperature.
None of this changes a request's answer: drafts never do.

`work` is a mixture_kernels.SCRATCH. `noise` is a tuple (its weight's bin, -1 for greedy requests; seed, uint64;
absolute position of the next token).
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from batchserve.native.jit import njit
from batchserve.sampling.draw_kernel import mix
from batchserve.sampling.noise import GOLDEN

TEMPERATURE_BINS = (0.3, 0.7, 1.2, float("inf"))  # upper bounds
NUM_NOISE_BINS = len(TEMPERATURE_BINS)


def noise_bin_of(temperature: float, num_weights: int) -> int:
    """Returns the index of a temperature's noise weight, among the last NUM_NOISE_BINS of num_weights; -1 if greedy."""
    if temperature <= 0.0:
        return -1
    return num_weights - NUM_NOISE_BINS + next(i for i, end in enumerate(TEMPERATURE_BINS) if temperature < end)


@njit(cache=True, nogil=True)
def gumbel(key, token):  # type: ignore[no-untyped-def]
    """Compiled version of sampling.noise.gumbel for one token."""
    x = mix((np.uint64(token) + np.uint64(1)) * np.uint64(GOLDEN) + key)
    return -np.log(-np.log((np.float64(x >> np.uint64(32)) + 0.5) * 2.0**-32))


@njit(cache=True, nogil=True)
def _is_named(work, key):  # type: ignore[no-untyped-def]
    """Returns (sum of p * exp(g) over the named tokens, probability that the winner is one of them).

    The largest log p + g of all other tokens is Gumbel-distributed around the log of the probability left for them.
    """
    total, best, known = 0.0, 1e-30, 0.0
    for i in range(work.size):
        lifted = work.probs[i] * np.exp(gumbel(key, work.tokens[i]))
        known += work.probs[i]
        total += lifted
        best = max(best, lifted)
    return total, np.exp(-max(0.0, 1.0 - known) / best)


@njit(cache=True, nogil=True)
def tilt(work, key, trust):  # type: ignore[no-untyped-def]
    """Turns probabilities of being likely into those of winning, if the noise decides with probability `trust`."""
    total, is_named = _is_named(work, key)
    if total <= 0.0:
        return
    for i in range(work.size):
        winning = is_named * work.probs[i] * np.exp(gumbel(key, work.tokens[i])) / total
        work.probs[i] = (1.0 - trust) * work.probs[i] + trust * winning


@njit(cache=True, nogil=True)
def merit_of_noise(work, key, trust, target):  # type: ignore[no-untyped-def]
    """Returns the noise's part of the actual token's probability, or -1 if no expert named the token."""
    for i in range(work.size):
        prob = work.probs[i]
        if work.tokens[i] == target and prob > 0.0:
            total, is_named = _is_named(work, key)
            winning = trust * is_named * prob * np.exp(gumbel(key, target)) / total
            return winning / (winning + (1.0 - trust) * prob)
    return -1.0
