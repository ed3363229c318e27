"""Who comes first, and how much of a prompt a step may carry beside those who are already answering."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from batchserve.scheduler.time_kernels import fitting_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchserve.request import Request
    from batchserve.scheduler.step_time import StepTimeModel

LEAST_CHUNK = 4  # rows: prompts go on, whatever the bound
CHUNK_STEP = 4


def rank(request: Request, now_s: float, max_wait_s: float) -> tuple[bool, int, float]:
    """The lowest comes first: higher priority, then earlier arrival; but whoever came max_wait_s ago before all others.

    So nobody is starved: behind that time only older requests are before him.
    """
    is_overdue = now_s - request.arrival_s > max_wait_s
    return not is_overdue, 0 if is_overdue else -request.priority, request.arrival_s


def prompt_rank(request: Request, now_s: float, max_wait_s: float) -> tuple[bool, int, int, float]:
    """Whose prompt gets a step's rows, the lowest first: as rank, but the one that needs the fewest comes first.

    Steps that others answer in have few rows for prompts. First come, first served, a short prompt would wait for all
    of a long one before it; this way round the long one waits for the short ones, max_wait_s at most. A request that
    was preempted amid its answer does not wait for any.
    """
    is_not_overdue, priority, arrival_s = rank(request, now_s, max_wait_s)
    is_first = not is_not_overdue or request.num_output_tokens > 0
    return is_not_overdue, priority, 0 if is_first else request.num_pending_tokens, arrival_s


def prefill_rows(
    step_time: StepTimeModel,
    decoding: Iterable[Request],
    num_draft_rows: int,
    num_prompts: int,
    context_len: int,
    max_rows: int,
    max_inflation: float,
    max_step_s: float | None,
) -> int:
    """How many rows of prompts a step may carry beside its decoding requests and the draft rows to be expected.

    Each of the num_prompts prompts that are to be computed (which have context_len tokens behind them) may stretch the
    step by max_inflation - 1 of its length, so that a queue does not wait longer the more of it there is; all together
    by no more than max_step_s allows, which drafts come after. Never less than LEAST_CHUNK.
    """
    contexts = [request.num_computed_tokens for request in decoding]
    if not contexts or max_rows <= LEAST_CHUNK:
        return max_rows
    count, context = len(contexts), sum(contexts)
    bounds = 1.0 + (max_inflation - 1.0) * max(1, num_prompts), math.inf if max_step_s is None else max_step_s
    sizes = LEAST_CHUNK, CHUNK_STEP, max_rows
    what = float(count), float(context), float(num_draft_rows), float(context_len)
    return fitting_rows(step_time.arrays, what, sizes, bounds)  # type: ignore[no-any-return]
