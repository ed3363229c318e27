"""Finds the winner of one row's draw without the noise of most tokens, and the cuts of top_k and top_p without sorting.

Noise is two logarithms of 32 hash bits. A token far below a known one can only win with a draw near the top, and its
bits alone nearly always rule that out. Hashing a vocabulary takes a tenth of the time of computing its noise.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import math

import numpy as np

from batchserve.native.jit import njit
from batchserve.sampling.noise import GOLDEN, HIGHEST_NOISE

# e^-30 of the top token's mass: all tokens below it together weigh less than fp32 can resolve, in any vocabulary.
NEGLIGIBLE_NATS = 30.0
# Dividing by less than this may overflow. Two different float32 logits are far apart long before that.
LOWEST_TEMPERATURE = 1e-200
BLOCK = 64  # logits per block; block_tops keeps the greatest of each
MIN_SORTED, MAX_SORTED = 16, 128  # how many of the greatest logits to search for a nucleus first
BINS = 4096  # of logits, if that search fails
SLACK = 4.0  # draws of 2^32 allowed for the rounding of an exponential
MAX_NOISE = HIGHEST_NOISE + 0.001  # a token this far below the best score loses, whatever its draw is
LOG2_E, LN_2_HIGH, LN_2_LOW = math.log2(math.e), 6.93147180369123816490e-01, 1.90821492927058770002e-10
TAYLOR = tuple(1.0 / math.factorial(n) for n in range(14))
_GOLDEN = np.uint64(GOLDEN)


def floor_of(min_p: float) -> float:
    """Returns how far below the greatest processed logit a token of min_p times its probability lies, at most
    NEGLIGIBLE_NATS.
    """
    return min(NEGLIGIBLE_NATS, -math.log(min_p)) if min_p > 0.0 else NEGLIGIBLE_NATS


@njit(cache=True, nogil=True, inline="always")
def mix(x):  # type: ignore[no-untyped-def]
    """Compiled version of noise.mix; x: uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def stream_key(seed, position):  # type: ignore[no-untyped-def]
    """Compiled version of noise.stream_key for sample 0; seed: uint64."""
    key = mix(seed + _GOLDEN)
    key = mix(key + np.uint64(position) * _GOLDEN)
    return mix(key + _GOLDEN)


@njit(cache=True, nogil=True)
def _draw(first, key, draws):  # type: ignore[no-untyped-def]
    """Fills draws with the 32 bits from which noise.gumbel computes each token's noise, from token `first` on."""
    for i in range(draws.shape[0]):
        draws[i] = mix((first + np.uint64(i + 1)) * _GOLDEN + key) >> np.uint64(32)


@njit(cache=True, nogil=True)
def _greatest(block):  # type: ignore[no-untyped-def]
    most = np.float32(-np.inf)
    for i in range(block.shape[0]):
        most = max(most, block[i])
    return most


@njit(cache=True, nogil=True)
def block_tops(logits):  # type: ignore[no-untyped-def]
    """Returns float32 [ceil(vocab_size / BLOCK)]: the greatest of each block of float32 logits without NaN."""
    tops = np.empty(-(-logits.shape[0] // BLOCK), np.float32)
    for b in range(tops.shape[0]):
        tops[b] = _greatest(logits[b * BLOCK : (b + 1) * BLOCK])
    return tops


@njit(cache=True, nogil=True)
def _greatest_but(values, number):  # type: ignore[no-untyped-def]
    """Returns the greatest of all but `number` of the values, which are reordered (Hoare's find; CACM 4, 1961, no. 65).

    In compiled code, np.partition takes ten times as long to begin with.
    """
    place, first, last = values.shape[0] - 1 - number, 0, values.shape[0] - 1
    while first < last:
        pivot, i, j = values[place], first, last
        while i <= j:
            while values[i] < pivot:
                i += 1
            while pivot < values[j]:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i, j = i + 1, j - 1
        if j < place:
            first = i
        if place < i:
            last = j
    return values[place]


@njit(cache=True, nogil=True)
def _likeliest(logits, tops, number):  # type: ignore[no-untyped-def]
    """Returns float32 logits that include the `number` greatest and all that equal the last of these."""
    if number > tops.shape[0]:
        return logits
    # The `number` greatest tops are logits, too, so the `number` greatest logits are all `least` or more.
    least = _greatest_but(tops.copy(), number - 1)
    found = np.empty(256, np.float32)
    count = 0
    for b in range(tops.shape[0]):
        if tops[b] < least:
            continue
        block = logits[b * BLOCK : (b + 1) * BLOCK]
        if count + BLOCK > found.shape[0]:
            found = np.concatenate((found, found))
        for i in range(block.shape[0]):
            if block[i] >= least:
                found[count] = block[i]
                count += 1
    return found[:count]


@njit(cache=True, nogil=True)
def _weigh(block, temperature, top, least, parts, powers):  # type: ignore[no-untyped-def]
    """Fills parts and powers, float64 and the bits of float64, whose products are the terms of `mass`.

    exp(x) is 2^n exp(r), with the integer n that leaves r within half a log 2 of zero. For r, a Taylor series is as
    exact as float64. Unlike math.exp, it is computed for many values at once.
    """
    for i in range(block.shape[0]):
        processed = np.float64(block[i]) / temperature
        x = max(processed - top, -50.0)
        whole = math.floor(x * LOG2_E + 0.5)
        r = (x - whole * LN_2_HIGH) - whole * LN_2_LOW
        series = TAYLOR[11] + r * (TAYLOR[12] + r * TAYLOR[13])
        series = TAYLOR[8] + r * (TAYLOR[9] + r * (TAYLOR[10] + r * series))
        series = TAYLOR[5] + r * (TAYLOR[6] + r * (TAYLOR[7] + r * series))
        series = TAYLOR[2] + r * (TAYLOR[3] + r * (TAYLOR[4] + r * series))
        series = TAYLOR[0] + r * (TAYLOR[1] + r * series)
        parts[i] = series if processed >= least else 0.0
        powers[i] = (np.int64(whole) + 1023) << 52


@njit(cache=True, nogil=True)
def mass(logits, tops, temperature, least):  # type: ignore[no-untyped-def]
    """Returns the sum of exp(p - max p) over all p = logit / temperature from `least` (at least max p - 50) up."""
    top, sums = np.float64(tops.max()) / temperature, np.zeros(BLOCK)
    parts, powers = np.empty(BLOCK), np.empty(BLOCK, np.int64)
    factors = powers.view(np.float64)
    for b in range(tops.shape[0]):
        if np.float64(tops[b]) / temperature < least:
            continue
        block = logits[b * BLOCK : (b + 1) * BLOCK]
        _weigh(block, temperature, top, least, parts, powers)
        for i in range(block.shape[0]):
            sums[i] += parts[i] * factors[i]
    return sums.sum()


@njit(cache=True, nogil=True)
def _processed(logits, temperature, least):  # type: ignore[no-untyped-def]
    """Returns the processed logits (float64) that are `least` or more."""
    found = np.empty(logits.shape[0])
    count = 0
    for i in range(logits.shape[0]):
        processed = np.float64(logits[i]) / temperature
        if processed >= least:
            found[count] = processed
            count += 1
    return found[:count]


@njit(cache=True, nogil=True)
def least_of_top_k(logits, tops, temperature, least, top_k):  # type: ignore[no-untyped-def]
    """Returns the top_k-th greatest processed logit, if that many are `least` or more; else `least`."""
    found = _processed(_likeliest(logits, tops, top_k), temperature, least)
    if top_k > found.shape[0]:
        return least
    return _greatest_but(found, top_k - 1)


@njit(cache=True, nogil=True)
def _weigh_all(logits, tops, temperature, least, values, masses):  # type: ignore[no-untyped-def]
    """Fills values and masses with the processed logits from `least` up and their `mass` terms; returns how many."""
    top, count = np.float64(tops.max()) / temperature, 0
    parts, powers = np.empty(BLOCK), np.empty(BLOCK, np.int64)
    factors = powers.view(np.float64)
    for b in range(tops.shape[0]):
        if np.float64(tops[b]) / temperature < least:
            continue
        block = logits[b * BLOCK : (b + 1) * BLOCK]
        _weigh(block, temperature, top, least, parts, powers)
        for i in range(block.shape[0]):
            values[count], masses[count] = np.float64(block[i]) / temperature, parts[i] * factors[i]
            count += parts[i] > 0.0
    return count


@njit(cache=True, nogil=True)
def _least_that_reaches(values, masses, reached):  # type: ignore[no-untyped-def]
    """Returns the greatest value whose mass and those of all values above it sum to `reached`, or the least value if
    rounding prevents that. Only values close to it are sorted: all values are put into bins first.
    """
    top, lowest = values.max(), values.min()
    per_nat, sums = BINS / max(top - lowest, 1e-12), np.zeros(BINS + 1)
    for i in range(values.shape[0]):
        sums[int((top - values[i]) * per_nat)] += masses[i]
    bin_, total = 0, 0.0
    while bin_ < BINS and total + sums[bin_] < reached:
        total += sums[bin_]
        bin_ += 1
    close, count = np.empty(values.shape[0]), 0
    for i in range(values.shape[0]):
        close[count] = values[i]
        count += int((top - values[i]) * per_nat) == bin_
    ordered = np.sort(close[:count])
    for i in range(count - 1, -1, -1):
        total += math.exp(ordered[i] - top)
        if total >= reached:
            return ordered[i]
    return ordered[0] if count > 0 else lowest


@njit(cache=True, nogil=True)
def least_of_nucleus(logits, tops, temperature, least, top_p):  # type: ignore[no-untyped-def]
    """Returns the least processed logit of the nucleus: of the logits from `least` up, the smallest set of the greatest
    ones whose mass is top_p of the total. Searches among ever more of the greatest, then among all.
    """
    reached, top = top_p * mass(logits, tops, temperature, least), np.float64(tops.max()) / temperature
    number = MIN_SORTED
    # For more than there are blocks, _likeliest would return all logits.
    while number <= min(MAX_SORTED, tops.shape[0]):
        ordered, total = np.sort(_processed(_likeliest(logits, tops, number), temperature, least)), 0.0
        for i in range(ordered.shape[0] - 1, -1, -1):
            total += math.exp(ordered[i] - top)
            if total >= reached:
                return ordered[i]
        number *= 8
    values, masses = np.empty(logits.shape[0]), np.empty(logits.shape[0])
    count = _weigh_all(logits, tops, temperature, least, values, masses)
    return _least_that_reaches(values[:count], masses[:count], reached)


@njit(cache=True, nogil=True)
def draw_token(logits, tops, temperature, least, key):  # type: ignore[no-untyped-def]
    """Returns the token with the largest processed logit + noise, of those whose processed logit is `least` or more.

    logits: float32 [vocab_size], whose greatest is finite. tops: block_tops. key: noise.stream_key. Ties: the first.
    """
    likeliest, draws = tops.argmax(), np.empty(BLOCK, np.uint64)
    best, winner = -np.inf, -1
    for turn in range(-1, tops.shape[0]):
        b = likeliest if turn < 0 else turn
        highest = np.float64(tops[b]) / temperature
        if turn == likeliest or highest < least or highest < best - MAX_NOISE:
            continue
        # Noise is g or more with probability 1 - exp(-exp(-g)) < exp(-g), so only this part of all draws may win.
        fewest = 2.0**32 * (1.0 - math.exp(min(0.0, highest - best))) - SLACK
        block = logits[b * BLOCK : (b + 1) * BLOCK]
        _draw(np.uint64(b * BLOCK), key, draws[: block.shape[0]])
        bound = np.uint64(max(0.0, fewest))
        for i in range(block.shape[0]):
            if draws[i] < bound:
                continue
            processed = np.float64(block[i]) / temperature
            if processed < least:
                continue
            score = processed - math.log(-math.log((np.float64(draws[i]) + 0.5) * 2.0**-32))
            if score > best or (score == best and b * BLOCK + i < winner):
                best, winner = score, b * BLOCK + i
    return winner


@njit(cache=True, nogil=True)
def least_allowed(logits, tops, temperature, top_k, top_p, floor):  # type: ignore[no-untyped-def]
    """Returns the least processed logit that may be sampled; see logits.allowed_tokens. tops: block_tops."""
    least = np.float64(tops.max()) / temperature - floor
    if 0 < top_k < logits.shape[0]:
        least = least_of_top_k(logits, tops, temperature, least, top_k)
    if top_p < 1.0:
        least = least_of_nucleus(logits, tops, temperature, least, top_p)
    return least


@njit(cache=True, nogil=True)
def draw_allowed(logits, tops, temperature, top_k, top_p, floor, key):  # type: ignore[no-untyped-def]
    """Returns draw_token's token among those that top_k, top_p (0 and 1 turn them off) and floor_of(min_p) allow."""
    # Noise is bounded: even without top_k and top_p, no token below NEGLIGIBLE_NATS could win, so none need be cut.
    is_cut = top_k > 0 or top_p < 1.0 or floor < NEGLIGIBLE_NATS
    least = least_allowed(logits, tops, temperature, top_k, top_p, floor) if is_cut else -np.inf
    return draw_token(logits, tops, temperature, least, key)


def compile_kernels() -> None:
    """Compiles every kernel, or loads it from the cache on disk."""
    logits = np.zeros(1, np.float32)
    tops = block_tops(logits)
    least_allowed(logits, tops, 1.0, 1, 0.5, 1.0)
    draw_allowed(logits, tops, 1.0, 1, 0.5, 1.0, np.uint64(stream_key(np.uint64(0), 0)))  # Python gets an int
