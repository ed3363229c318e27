"""The compiled part of the step times: what a step takes by the table, and how steps correct it."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import math

import numpy as np

from batchserve.native.jit import njit

FAST_RATE = 0.2  # of the host's time, and of the factor where a forward is far off: followed within some five steps
# A forward further off than this says nothing of the shape. Nor does it move the factor further than one that is just
# so far off: it may be a pause. A machine that is half as fast for good is followed within some fifteen steps.
OUTLIER = math.log(1.3)
# Variances of logarithms (a Kalman filter; Kalman, 1960): of a forward around its prediction, of the factor's change
# from step to step, of the factor before anything was seen, of the shape, and of its change.
NOISE, FACTOR_CHANGE, FACTOR_FIRST = 0.06**2, 0.03**2, 0.3**2
SHAPE_FIRST, SHAPE_CHANGE = 0.08**2, 0.0003**2
SHAPE_REACH = 4.0  # doublings of rows over which what is wrong with the shape is alike
MAX_CORRECTION = math.log(4.0)
MAX_RISE = 0.1  # of a forward: by so much more than itself the host's time is believed to have grown at once, at most
# Of a table's slopes: seconds for one more request, row through the head, K/V entry read, pair of row and entry; the
# log of the factor; and seconds of the host, which no rows make more.
REQUEST, LOGIT_ROW, CONTEXT, ATTENDED, LOG_FACTOR, HOST = range(6)
NUM_SLOPES = 6


@njit(cache=True, nogil=True)
def _segment(knots, rows):  # type: ignore[no-untyped-def]
    """The two knots that a number of rows lies between, or the last two where it is beyond them."""
    last = len(knots) - 1
    high = min(1, last)
    while high < last and knots[high] < rows:
        high += 1
    return max(0, high - 1), high


@njit(cache=True, nogil=True)
def seconds_at(table, load, more_rows, more_attended):  # type: ignore[no-untyped-def]
    """Seconds of a step that has so many more sampled rows and attended pairs.

    table: StepTimeModel.arrays; load: a StepLoad, as a plain tuple.
    """
    knots, seconds, shape, slopes = table
    num_rows, num_logit_rows, num_requests, context, attended = load
    rows = num_rows + more_rows
    low, high = _segment(knots, rows)
    if low == high:
        share, rise, bend = rows / knots[0] - 1.0, seconds[0], 0.0
    else:
        share = (rows - knots[low]) / (knots[high] - knots[low])
        rise, bend = seconds[high] - seconds[low], shape[high] - shape[low]
    share = max(0.0, share)
    base = max(seconds[low] + share * rise - slopes[LOGIT_ROW] * (num_rows - num_logit_rows), seconds[0])
    fixed = slopes[REQUEST] * max(0.0, num_requests - 1.0) + slopes[CONTEXT] * context
    total = base + fixed + slopes[ATTENDED] * (attended + more_attended)
    return total * math.exp(slopes[LOG_FACTOR] + shape[low] + min(1.0, share) * bend) + slopes[HOST]


def first_covariance(knots: np.ndarray) -> np.ndarray:
    """Of the logarithms of the shape at the knots and, behind them, of the factor: before anything was seen.

    Float64 [len(knots) + 1, len(knots) + 1].
    """
    apart = np.abs(np.log2(knots)[:, None] - np.log2(knots)[None, :])
    covariance = np.zeros((len(knots) + 1, len(knots) + 1))
    covariance[:-1, :-1] = SHAPE_FIRST * np.exp(-apart / SHAPE_REACH)
    covariance[-1, -1] = FACTOR_FIRST
    return covariance


@njit(cache=True, nogil=True)
def learn_step(table, covariance, load, without, decoding, forward_s, host_s, what):  # type: ignore[no-untyped-def]
    """Move the factor, the shape and the host's time towards a step; see StepTimeModel.

    what: the number of steps that it stands for, and whether it is far from those before: such a one is no outlier.
    Returns what it, `without` and `decoding` were predicted to take before.
    """
    (knots, _, shape, slopes), (num_steps, is_apart) = table, what
    predicted_s = seconds_at(table, load, 0.0, 0.0)
    known = predicted_s, seconds_at(table, without, 0.0, 0.0), seconds_at(table, decoding, 0.0, 0.0)
    if not (0.0 < forward_s < math.inf and abs(host_s) < math.inf):
        return known
    error = math.log(forward_s / (predicted_s - slopes[HOST]))
    max_rise_s = MAX_RISE * (known[2] - slopes[HOST])  # of decoding: a long prompt's step may start many requests
    if abs(error) > OUTLIER and not is_apart:
        for _ in range(num_steps):
            moved = FAST_RATE * max(-OUTLIER, min(OUTLIER, error))
            slopes[LOG_FACTOR] += moved
            error -= moved
        return known
    for _ in range(num_steps):
        slopes[HOST] += FAST_RATE * min(max(0.0, host_s) - slopes[HOST], slopes[HOST] + max_rise_s)
    error = max(-OUTLIER, min(OUTLIER, error))
    _share_error(knots, shape, slopes, covariance, load[0], error, num_steps)
    return known


@njit(cache=True, nogil=True)
def _share_error(knots, shape, slopes, covariance, num_rows, error, num_steps):  # type: ignore[no-untyped-def]
    """Divide a forward's error between the factor and the shape, each by how little it is known."""
    count = len(knots)
    low, high = _segment(knots, num_rows)
    share = 1.0
    if low < high:
        share = min(1.0, max(0.0, (num_rows - knots[low]) / (knots[high] - knots[low])))
    covariance[count, count] += FACTOR_CHANGE * num_steps
    known_with = np.empty(count + 1)  # the covariance of each with what was seen
    for i in range(count + 1):
        if i < count:
            covariance[i, i] += SHAPE_CHANGE * num_steps
        known_with[i] = covariance[i, count] + (1.0 - share) * covariance[i, low] + share * covariance[i, high]
    variance = known_with[count] + (1.0 - share) * known_with[low] + share * known_with[high] + NOISE / num_steps
    for i in range(count):
        change = error * known_with[i] / variance
        shape[i] = max(-MAX_CORRECTION, min(MAX_CORRECTION, shape[i] + change))
    slopes[LOG_FACTOR] += error * known_with[count] / variance
    for i in range(count + 1):
        for j in range(count + 1):
            covariance[i, j] -= known_with[i] * known_with[j] / variance


@njit(cache=True, nogil=True)
def _seconds_beside(table, what, rows, num_drafts):  # type: ignore[no-untyped-def]
    """Of a step with so many rows of one more prompt, and drafts; see fitting_rows."""
    decoding, taken, _, prompt_context = what
    num_decoding, context = decoding[0], decoding[3]
    most, is_any = num_decoding + num_drafts, min(1.0, rows)
    num_requests = num_decoding + taken[2] + is_any
    attended = context * most // num_decoding + taken[4] + rows * prompt_context
    # The head runs on the last of a prompt's rows at most.
    load = (most + taken[0] + rows, most, num_requests, context + taken[3] + is_any * prompt_context, attended)
    return seconds_at(table, load, 0.0, 0.0)


@njit(cache=True, nogil=True)
def fitting_rows(table, what, sizes, bounds):  # type: ignore[no-untyped-def]
    """The most rows that one more prompt may have in a step; see prompt_room.py.

    what: the loads, as plain tuples, of decoding requests and of the prompts that have rows already; draft rows to
    be expected; K/V entries behind the prompt. sizes: the least number of rows, which is returned where none fits, what
    is added to it, the most. bounds: how many times as long as without prompts the step may become, and the seconds
    that it may take without drafts.
    """
    least, step, most = sizes
    decoding, _, num_drafts, _ = what
    nobody = (0.0, 0.0, 0.0, 0.0, 0.0)
    longest_s = bounds[0] * _seconds_beside(table, (decoding, nobody, num_drafts, 0.0), 0.0, num_drafts)
    # Seconds never fall with rows: bisect for the first size that does not fit.
    low, high = 0, (most - least) // step + 1
    while low < high:
        middle = (low + high) // 2
        rows = float(least + middle * step)
        is_short = _seconds_beside(table, what, rows, 0.0) <= bounds[1]
        if is_short and _seconds_beside(table, what, rows, num_drafts) <= longest_s:
            low = middle + 1
        else:
            high = middle
    return least + max(0, low - 1) * step


def compile_kernels() -> None:
    """Compile every kernel, or load it from the cache on disk."""
    table, load = (np.array([1.0, 2.0]), np.ones(2), np.zeros(2), np.zeros(NUM_SLOPES)), (1, 1, 1, 0, 0)
    learn_step(table, first_covariance(table[0]), load, load, load, seconds_at(table, load, 0.0, 0.0), 0.0, (1, False))
    fitting_rows(table, (load, load, 0, 0), (1, 1, 2), (1.0, 1.0))
