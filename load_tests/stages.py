"""The stages of a run: how many users, with or without speculation, for how long; and what each one measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from load_tests.stream_check import StreamRecord

USER_COUNTS = (2, 8, 16)
SETTLE_SHARE = 0.15  # of a stage: while requests of the one before still run, nothing is measured


@dataclass(frozen=True, slots=True)
class Stage:
    """One load, held from `start_s` on for `duration_s` seconds of the run."""

    users: int
    is_speculating: bool
    start_s: float
    duration_s: float

    @property
    def mode(self) -> str:
        return "on" if self.is_speculating else "off"

    @property
    def name(self) -> str:
        return f"{self.users} users, speculation {self.mode}"

    @property
    def measured_from_s(self) -> float:
        return self.start_s + SETTLE_SHARE * self.duration_s

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


def plan_stages(duration_s: float, user_counts: Sequence[int] = USER_COUNTS) -> list[Stage]:
    """Every number of users with speculation on and off, side by side in time, in an order that alternates."""
    stages: list[Stage] = []
    for i, users in enumerate(user_counts):
        for is_speculating in (True, False) if i % 2 == 0 else (False, True):
            stages.append(Stage(users, is_speculating, len(stages) * duration_s, duration_s))
    return stages


def stage_at(stages: Sequence[Stage], run_time_s: float) -> Stage | None:
    """The stage of this moment, or None behind the last one."""
    return next((stage for stage in stages if run_time_s < stage.end_s), None)


@dataclass(slots=True)
class StageSamples:
    """Raw samples of one stage, in seconds."""

    stage: Stage
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    end_to_end_s: list[float] = field(default_factory=list)
    num_tokens: int = 0  # that arrived inside the measured time
    num_deltas: int = 0
    num_delta_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    num_answered: int = 0
    num_failures: int = 0

    def covers(self, record: StreamRecord, run_start_s: float) -> bool:
        """Whether the request lies wholly inside the measured time, so that its latencies are this load's."""
        is_after = record.sent_s - run_start_s >= self.stage.measured_from_s
        return is_after and record.ended_s - run_start_s <= self.stage.end_s

    def add(self, record: StreamRecord, run_start_s: float) -> bool:
        """Take in an answered request that was sent during this stage; returns whether its latencies count."""
        self.num_answered += 1
        window = (run_start_s + self.stage.measured_from_s, run_start_s + self.stage.end_s)
        self.num_tokens += sum(count for at_s, count in record.arrivals if window[0] <= at_s <= window[1])
        if not self.covers(record, run_start_s):
            return False
        if record.ttft_s is not None:
            self.ttft_s.append(record.ttft_s)
        self.itl_s += record.inter_token_latencies_s()
        self.end_to_end_s.append(record.end_to_end_s)
        self.num_deltas += sum(1 for _, count in record.arrivals if count)
        self.num_delta_tokens += sum(count for _, count in record.arrivals)
        self.draft_tokens += record.usage.draft_tokens
        self.accepted_draft_tokens += record.usage.accepted_draft_tokens
        return True

    def summary(self) -> dict[str, object]:
        """Plain data for JSON: milliseconds, tokens a second, tokens a verified step."""
        measured_s = self.stage.end_s - self.stage.measured_from_s
        return {
            "users": self.stage.users,
            "speculation": self.stage.mode,
            "seconds": round(measured_s, 3),
            "requests": self.num_answered,
            "measured_requests": len(self.end_to_end_s),
            "failures": self.num_failures,
            "tokens_per_s": round(self.num_tokens / measured_s, 1),
            "acceptance_length": round(self.num_delta_tokens / self.num_deltas, 3) if self.num_deltas else None,
            "draft_tokens": self.draft_tokens,
            "accepted_draft_tokens": self.accepted_draft_tokens,
            "ttft_ms": percentiles_ms(self.ttft_s),
            "inter_token_ms": percentiles_ms(self.itl_s),
            "end_to_end_ms": percentiles_ms(self.end_to_end_s),
        }


def percentiles_ms(samples_s: Sequence[float]) -> dict[str, float]:
    """Mean and nearest-rank percentiles in milliseconds; empty of nothing."""
    if not samples_s:
        return {}
    ordered = sorted(samples_s)
    ranks = {f"p{percent}": max(1, math.ceil(len(ordered) * percent / 100)) for percent in (50, 90, 99)}
    values = {"mean": sum(ordered) / len(ordered), **{name: ordered[rank - 1] for name, rank in ranks.items()}}
    return {name: round(value * 1e3, 3) for name, value in values.items()}
