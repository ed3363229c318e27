"""Time to first token and inter-token latency of all calls, counted so that processes can add theirs up."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from load_tests.stream_check import StreamRecord

TTFT, INTER_TOKEN = "time to first token", "inter-token latency"


class Latencies:
    """How often each latency came, in hundredths of a millisecond: bounded however long a run is."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[int]] = {TTFT: Counter(), INTER_TOKEN: Counter()}

    def add(self, record: StreamRecord) -> None:
        if record.ttft_s is not None:
            self.counts[TTFT][_hundredths(record.ttft_s)] += 1
        self.counts[INTER_TOKEN].update(map(_hundredths, record.inter_token_latencies_s()))

    def take(self) -> dict[str, dict[int, int]]:
        """What came since the last call, to be merged elsewhere."""
        taken, self.counts = self.counts, {name: Counter() for name in self.counts}
        return {name: dict(counts) for name, counts in taken.items()}

    def merge(self, taken: Mapping[str, Mapping[int, int]]) -> None:
        for name, counts in taken.items():
            self.counts[name].update(counts)

    def lines(self) -> Iterator[str]:
        """A line for each kind of latency that there is."""
        for name, counts in self.counts.items():
            if counts:
                shown = ", ".join(f"p{percent} {percentile(counts, percent) / 100:.1f}" for percent in (50, 90, 99))
                yield f"{name} in ms: {shown} ({counts.total()} measured)"


def percentile(counts: Mapping[int, int], percent: float) -> int:
    """The smallest value that at least `percent` of all do not exceed (nearest rank)."""
    left = max(1, math.ceil(sum(counts.values()) * percent / 100))
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    raise ValueError("nothing was counted")


def _hundredths(seconds: float) -> int:
    return round(seconds * 1e5)
