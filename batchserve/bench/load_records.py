"""The record of each request of a measurement, and the figures of all of them.

docs/benchmarking.md defines every figure.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchserve.bench.latencies import inter_token_latencies_s, percentile

if TYPE_CHECKING:
    from batchserve.bench.serve_options import Slo

PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are in seconds since the measurement began.

    due_s: when it was to be sent; latencies count from it. deltas: (time, tokens) of each delta that brought tokens.
    ended_s: its last delta, or what told of its end. failure: why it failed, in a few words; empty if it is complete.
    counted_by: "delta" if the server told each delta's tokens, "answer" if only those of the whole answer, which its
    deltas then share evenly, "text" if it told none: every delta with text counts as one token.
    """

    number: int
    due_s: float
    sent_s: float = 0.0
    deltas: list[tuple[float, int]] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int = 0
    finish_reason: str = ""
    counted_by: str = "delta"
    failure: str = ""

    @property
    def ttft_s(self) -> float | None:
        """None without a token."""
        return self.deltas[0][0] - self.due_s if self.deltas else None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """None if there is no second token, or no second delta to measure by."""
        if self.output_tokens < 2 or len(self.deltas) < 2:
            return None
        return (self.ended_s - self.deltas[0][0]) / (self.output_tokens - 1)

    def meets(self, slo: Slo) -> bool:
        """True if no bound is exceeded. An answer without a TPOT meets any, one without tokens has no TTFT to meet."""
        if slo.ttft_ms is not None and (self.ttft_s is None or self.ttft_s * 1e3 > slo.ttft_ms):
            return False
        if slo.tpot_ms is not None and self.tpot_s is not None and self.tpot_s * 1e3 > slo.tpot_ms:
            return False
        return slo.e2e_ms is None or self.e2e_s * 1e3 <= slo.e2e_ms


@dataclass(frozen=True, slots=True)
class Latency:
    """A latency's mean and percentiles (nearest rank), in milliseconds, and of how many values."""

    count: int
    mean_ms: float
    percentiles_ms: dict[int, float]

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Latency | None:
        """Returns None of no values."""
        if not values_s:
            return None
        ordered = sorted(values_s)
        ranks = {percent: percentile(ordered, percent) * 1e3 for percent in PERCENTILES}
        return cls(len(ordered), statistics.fmean(ordered) * 1e3, ranks)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a measurement. Latencies and tokens are those of completed requests.

    num_unfinished: requests in flight when it was interrupted, which count nowhere else. total_tokens_per_s: None if
    the server did not tell how long prompts are. good_requests_per_s: None without an SLO. late_s: how late requests
    were sent, at most. num_by_counting: completed requests by `RequestRecord.counted_by`.
    """

    num_completed: int
    failures: dict[str, int]
    num_unfinished: int
    duration_s: float
    requests_per_s: float
    prompt_tokens: int | None
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    num_good: int | None
    good_requests_per_s: float | None
    late_s: float
    latencies: dict[str, Latency | None]
    num_by_counting: dict[str, int]

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())


def summarise(
    records: Sequence[RequestRecord], duration_s: float, slo: Slo | None = None, num_unfinished: int = 0
) -> Summary:
    """Returns the figures of these requests, all of which have ended."""
    done = [record for record in records if not record.failure]
    failures = Counter(record.failure for record in records if record.failure)
    output_tokens = sum(record.output_tokens for record in done)
    prompts = [record.prompt_tokens for record in done]
    known = [tokens for tokens in prompts if tokens is not None]
    prompt_tokens = sum(known) if len(known) == len(prompts) else None
    num_good = None if slo is None else sum(record.meets(slo) for record in done)

    def per_s(amount: float) -> float:
        return amount / duration_s if duration_s > 0 else 0.0

    return Summary(
        num_completed=len(done),
        failures=dict(failures.most_common()),
        num_unfinished=num_unfinished,
        duration_s=duration_s,
        requests_per_s=per_s(len(done)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_per_s=per_s(output_tokens),
        total_tokens_per_s=None if prompt_tokens is None else per_s(prompt_tokens + output_tokens),
        num_good=num_good,
        good_requests_per_s=None if num_good is None else per_s(num_good),
        late_s=max((record.sent_s - record.due_s for record in records), default=0.0),
        latencies={
            "TTFT": Latency.of([record.ttft_s for record in done if record.ttft_s is not None]),
            "TPOT": Latency.of([record.tpot_s for record in done if record.tpot_s is not None]),
            "ITL": Latency.of([gap for record in done for gap in inter_token_latencies_s(record.deltas)]),
            "E2E": Latency.of([record.e2e_s for record in done]),
        },
        num_by_counting=dict(Counter(record.counted_by for record in done)),
    )
