"""Client-side metrics of streamed answers. Times are the client's, in seconds.

Definitions:
- TTFT: time from sending the request to its first delta.
- Inter-token latency (ITL): a delta of n tokens that arrives g after the previous delta counts as n tokens of g / n
  each. The first delta does not count. The mean is the time that a reader waits per token. Without speculation (n = 1)
  the ITL is the gap.
- Gap: g, once per delta. vLLM's benchmark calls it ITL. It shows how bursty the stream looks to a reader.
- Acceptance length: tokens delivered per verified step (a delta is one step).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchserve.bench.latencies import inter_token_latencies_s, percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchserve.types import FinishReason


@dataclass(slots=True)
class Answer:
    """One streamed answer. `arrivals` holds (time, number of tokens) of every delta."""

    sent_s: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def inter_token_latencies_s(self) -> list[float]:
        """Returns one value per token after the first delta."""
        return inter_token_latencies_s(self.arrivals)

    def gaps_s(self) -> list[float]:
        """Returns one value per delta after the first."""
        return [b[0] - a[0] for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Round:
    """The answers to all prompts, sent at once."""

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
    """Returns the index of the first token that differs, or the shorter length if one is a prefix; None if equal."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def median_of(rounds: Sequence[Round], figure: Callable[[Round], float]) -> float:
    """Returns the median of one figure over repeated rounds."""
    return statistics.median(figure(done) for done in rounds)
