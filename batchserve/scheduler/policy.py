"""Who comes first: whose turn it is to be let in, to get a step's rows for a prompt, to keep memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchserve.request import Request


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
