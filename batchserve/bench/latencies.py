"""Latencies of streams and their percentiles, as every measuring command counts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that at least `percent` of the values do not exceed (nearest rank); nan if empty."""
    if not values:
        return math.nan
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]


def inter_token_latencies_s(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Returns one value per token after the first delta. arrivals: (time, number of tokens) of every delta.

    A delta of n tokens that arrives g after the previous delta counts as n tokens of g / n each.
    """
    latencies: list[float] = []
    for (before_s, _), (at_s, count) in pairwise(arrivals):
        latencies += [(at_s - before_s) / count] * count
    return latencies
