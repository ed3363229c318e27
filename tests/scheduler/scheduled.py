"""The plan of a step request by request."""

from __future__ import annotations

from typing import NamedTuple

from batchserve.request import Request
from batchserve.scheduler.plan import SchedulerOutput


class ScheduledRequest(NamedTuple):
    """One request's columns of a plan."""

    request: Request
    num_scheduled_tokens: int
    is_sampled: bool
    max_draft_tokens: int = 0
    max_draft_depth: int = 0
    max_row_depth: int = 0

    @property
    def is_decoding(self) -> bool:
        return self.is_sampled and self.num_scheduled_tokens == 1


def each_scheduled(plan: SchedulerOutput) -> list[ScheduledRequest]:
    each = zip(plan.requests, plan.columns.tolist(), strict=True)
    return [ScheduledRequest(r, rows, bool(sampled), *draft) for r, (_, rows, sampled, *draft) in each]
