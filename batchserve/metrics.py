"""Every metric's name, in one place. The engine counts into EngineMetrics and imports no exporter."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchserve.types import Timing, Usage

PREFIX = "batchserve_"
COUNTERS = {
    "steps_total": "Engine steps.",
    "rows_total": "Rows run through the model, drafts and prefill included.",
    "step_seconds_total": "Time in forward and verification.",
    "draft_tokens_total": "Draft tokens verified.",
    "accepted_draft_tokens_total": "Draft tokens accepted.",
    "verify_steps_total": "Verifications of one request in one step.",
    "preemptions_total": "Requests preempted for want of K/V memory.",
    "requests_finished_total": "Requests that ended with a finish reason.",
    "prompt_tokens_total": "Prompt tokens of finished requests.",
    "completion_tokens_total": "Tokens delivered by finished requests.",
    "first_token_seconds_total": "Sum of times to first token of finished requests.",
}


@dataclass(slots=True)
class EngineMetrics:
    """Counters of one engine, written by its thread, read by anyone."""

    values: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self.values)

    def _add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self.values[name] += amount

    def step_done(self, num_rows: int, seconds: float) -> None:
        self._add(steps_total=1, rows_total=num_rows, step_seconds_total=seconds)

    def verified(self, num_draft_tokens: int, num_accepted: int) -> None:
        self._add(verify_steps_total=1, draft_tokens_total=num_draft_tokens, accepted_draft_tokens_total=num_accepted)

    def preempted(self, num_requests: int) -> None:
        if num_requests:
            self._add(preemptions_total=num_requests)

    def finished(self, usage: Usage, timing: Timing) -> None:
        self._add(
            requests_finished_total=1,
            prompt_tokens_total=usage.prompt_tokens,
            completion_tokens_total=usage.completion_tokens,
            first_token_seconds_total=timing.first_token_s,
        )
