"""Who comes first, and how much of a prompt a step may carry beside those who are already answering."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from batchserve.scheduler.step_time import StepLoad

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

    def seconds(rows: int, num_drafts: int) -> float:
        """With so many rows of a prompt; the head runs on the last at most."""
        most = count + num_drafts
        attended = context * most // count + rows * context_len
        of_prompt = (1, context_len) if rows else (0, 0)
        load = StepLoad(most + rows, most, count + of_prompt[0], context + of_prompt[1], attended)
        return step_time.predict(load)

    bound_s = seconds(0, num_draft_rows) * (1.0 + (max_inflation - 1.0) * max(1, num_prompts))

    def filled(rows: int) -> float:
        """Of its bounds; more than 1 is too much."""
        share = seconds(rows, num_draft_rows) / bound_s
        return share if max_step_s is None else max(share, seconds(rows, 0) / max_step_s)

    sizes = range(LEAST_CHUNK, max_rows + 1, CHUNK_STEP)
    fitting = bisect.bisect_right(sizes, 1.0, key=filled)
    return sizes[max(0, fitting - 1)]
