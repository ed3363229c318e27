"""The plan of one step: who runs, with how many rows, and what it may draft; a few arrays for all requests."""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from batchserve.decoding_length.step_time import StepLoad
from batchserve.native.jit import njit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.request import Request

    IntArray = np.ndarray[Any, np.dtype[np.int64]]

# Columns of a plan: tokens that have K/V, tokens that the step computes, whether the next token is sampled; the most
# draft tokens behind them (0: none), the deepest draft that is verified, the deepest row.
COMPUTED, PENDING, IS_SAMPLED, MOST_DRAFT, DRAFT_DEPTH, ROW_DEPTH = range(6)
# What a plan is laid out from: the first two of these; all tokens, and the most that there will be; the most draft
# tokens that K/V memory leaves (-1: not to be drafted), that the request allows, and how deep it allows them.
FACTS = 7


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. K/V for the pending tokens is reserved; for drafts it is not yet.

    columns int64 [num_requests, 6]: see above. drafted int64: the places of those that may be drafted. load: the step
    without drafts; decoding: what of it gives requests one more token each. max_draft_rows: what max_num_batched_tokens
    leaves for the drafts of all requests.
    """

    requests: list[Request]
    request_ids: list[str]
    columns: IntArray
    drafted: IntArray
    load: StepLoad
    decoding: StepLoad
    preempted: list[Request]
    max_draft_rows: int = 0

    @property
    def is_decoding(self) -> np.ndarray:
        """Whose rows are one more token of an answer, or its first behind a prompt's last one: bool [num_requests]."""
        columns = self.columns
        is_decoding: np.ndarray = (columns[:, IS_SAMPLED] != 0) & (columns[:, PENDING] == 1)
        return is_decoding

    def load_with(self, places: IntArray, starts: IntArray) -> StepLoad:
        """The step with drafts: the requests at `places` have as many rows as starts [len(places) + 1] rises."""
        load, rows = self.load, int(starts[-1])
        attended = load.attended_tokens + _count_attended(self.columns, places, starts)
        counts = load.num_rows + rows, load.num_logit_rows + rows, load.num_requests
        return StepLoad(*counts, load.context_tokens, attended)


@njit(cache=True, nogil=True)
def _lay_out(facts, share, max_model_len, columns, drafted):  # type: ignore[no-untyped-def]
    """Fill the columns, and the places of whom is drafted, from facts [num_requests, 7].

    Nobody gets more than `share` draft tokens, and no draft is deeper than could still be given to the client. Returns
    the step's load and that of those who decode, as StepLoad has them, and how many are drafted.
    """
    logit_rows, context, attended, all_rows = 0, 0, 0, 0
    num_decoding, decoding_context, num_drafted = 0, 0, 0
    for i in range(len(facts)):
        computed, rows, length, most_total, room, most, branch_length = facts[i]
        is_sampled = computed + rows == length
        columns[i, COMPUTED], columns[i, PENDING], columns[i, IS_SAMPLED] = computed, rows, is_sampled
        # The bonus token comes on top of the accepted ones, so the last place is never drafted.
        row_depth = max_model_len - length - 1
        depth, budget = min(most_total - length - 1, row_depth), min(most, share, room)
        is_drafted = depth >= 1 and budget >= 1
        columns[i, MOST_DRAFT] = budget if is_drafted else 0
        columns[i, DRAFT_DEPTH] = min(depth, branch_length) if is_drafted else 0
        columns[i, ROW_DEPTH] = row_depth if is_drafted else 0
        if is_drafted:
            drafted[num_drafted] = i
            num_drafted += 1
        all_rows += rows
        logit_rows += is_sampled
        context += computed
        attended += computed * rows
        if is_sampled and rows == 1:
            num_decoding += 1
            decoding_context += computed
    decoding = (num_decoding, num_decoding, num_decoding, decoding_context, decoding_context)
    return (all_rows, logit_rows, len(facts), context, attended), decoding, num_drafted


@njit(cache=True, nogil=True)
def _count_attended(columns, places, starts):  # type: ignore[no-untyped-def]
    """Pairs of a draft row and a K/V entry: request places[i] has the rows from starts[i] to starts[i + 1]."""
    attended = 0
    for i in range(len(places)):
        attended += (starts[i + 1] - starts[i]) * columns[places[i], COMPUTED]
    return attended


def lay_plan(
    requests: list[Request],
    request_ids: list[str],
    facts: Sequence[int],
    preempted: list[Request],
    max_draft_rows: int,
    share: int,
    max_model_len: int,
) -> SchedulerOutput:
    """facts: FACTS numbers of each request, one behind the other; share: of max_draft_rows, what each may have."""
    columns, drafted = np.empty((len(requests), 6), np.int64), np.empty(len(requests), np.int64)
    numbers = np.array(facts, np.int64).reshape(-1, FACTS)
    load, decoding, num_drafted = _lay_out(numbers, share, max_model_len, columns, drafted)
    what = columns, drafted[:num_drafted], StepLoad(*load), StepLoad(*decoding)
    return SchedulerOutput(requests, request_ids, *what, preempted, max_draft_rows)


def compile_kernels() -> None:
    """Compile the layout, or load it from the cache on disk."""
    plan = lay_plan([], [], [], [], 0, 0, 1)
    plan.load_with(np.zeros(0, np.int64), np.zeros(1, np.int64))
