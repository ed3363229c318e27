"""What a client sees of streamed answers, as numbers. Times are the client's, in seconds.

Definitions:
- TTFT: from sending the request to its first delta.
- Inter-token latency (ITL): a delta of n tokens that comes g after the delta before it counts as n tokens of g / n
  each; the first delta counts nothing. So the mean is what a reader waits per token, and without speculation (n = 1)
  it is the gap itself.
- Gap: g itself, once a delta: what vLLM's benchmark calls ITL, and what a reader sees of burstiness.
- Acceptance length: tokens delivered per verified step (a delta is one step).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchserve.types import FinishReason


@dataclass(slots=True)
class Answer:
    """One streamed answer. `arrivals` has (time, tokens) of every delta."""

    sent_s: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def inter_token_latencies_s(self) -> list[float]:
        """One value a token behind the first delta."""
        latencies: list[float] = []
        for (before_s, _), (at_s, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            latencies += [(at_s - before_s) / count] * count
        return latencies

    def gaps_s(self) -> list[float]:
        """One value a delta behind the first."""
        return [b[0] - a[0] for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Round:
    """All prompts answered at once, one time."""

    answers: list[Answer]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(answer.token_ids) for answer in self.answers) / self.wall_s

    @property
    def ttft_s(self) -> float:
        return _mean([answer.arrivals[0][0] - answer.sent_s for answer in self.answers if answer.arrivals])

    @property
    def mean_itl_s(self) -> float:
        return _mean(self._latencies_s())

    @property
    def p99_itl_s(self) -> float:
        return percentile(self._latencies_s(), 99)

    @property
    def p99_gap_s(self) -> float:
        return percentile([gap for answer in self.answers for gap in answer.gaps_s()], 99)

    @property
    def acceptance_length(self) -> float:
        steps = sum(len(answer.arrivals) for answer in self.answers)
        return sum(len(answer.token_ids) for answer in self.answers) / steps if steps else 0.0

    def _latencies_s(self) -> list[float]:
        return [latency for answer in self.answers for latency in answer.inter_token_latencies_s()]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs; where one ends early, its length; None if they are the same."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed (nearest rank); nan of nothing."""
    if not values:
        return math.nan
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def median_of(rounds: Sequence[Round], figure: Callable[[Round], float]) -> float:
    """The median of one figure over repeated rounds."""
    return statistics.median(figure(done) for done in rounds)
