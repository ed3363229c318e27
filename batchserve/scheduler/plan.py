"""The plan of one step: which requests run, with how many rows, and what each may draft, in a few arrays."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from batchserve.decoding_length.step_time import StepLoad
from batchserve.native.jit import njit
from batchserve.request_table import ROW

if TYPE_CHECKING:
    from batchserve.request import Request

IntArray = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

# Columns of a plan: tokens that have K/V, tokens that the step computes, whether the next token is sampled; the most
# draft tokens after them (0: none), the deepest draft that is verified, the deepest row.
COMPUTED, PENDING, IS_SAMPLED, MOST_DRAFT, DRAFT_DEPTH, ROW_DEPTH = range(6)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. K/V for the pending tokens is reserved; for drafts it is not yet.

    slots int64 [num_requests]: the requests' slots in the RequestTable. columns int64 [num_requests, 6]: see above.
    drafted int64: the places of the requests that may be drafted. load: the step without drafts; decoding: the part of
    it that gives requests one more token each. max_draft_rows: what max_num_batched_tokens leaves for drafts.
    """

    requests: list[Request]
    request_ids: list[str]
    slots: IntArray
    columns: IntArray
    drafted: IntArray
    load: StepLoad
    decoding: StepLoad
    preempted: list[Request]
    max_draft_rows: int = 0

    @property
    def is_all_decoding(self) -> bool:
        """True if every request has one row, for one more token of its answer."""
        return self.decoding.num_requests == len(self.requests)

    @property
    def is_decoding(self) -> BoolArray:
        """bool [num_requests]: whose single row gives one more token of an answer, or the first after a prompt."""
        columns = self.columns
        is_decoding: BoolArray = (columns[:, IS_SAMPLED] != 0) & (columns[:, PENDING] == 1)
        return is_decoding

    def load_with(self, places: IntArray, starts: IntArray) -> StepLoad:
        """The step with drafts: the requests at `places` have as many rows as starts [len(places) + 1] rises."""
        load, rows = self.load, int(starts[-1])
        attended = load.attended_tokens + _count_attended(self.columns, places, starts)
        counts = load.num_rows + rows, load.num_logit_rows + rows, load.num_requests
        return StepLoad(*counts, load.context_tokens, attended)


@njit(cache=True, nogil=True)
def all_decode(table, slots):  # type: ignore[no-untyped-def]
    """True if each of these requests has one token without K/V."""
    for slot in slots:  # noqa: SIM110 - compiled code has no generators
        if table[slot].num_tokens - table[slot].num_computed != 1:
            return False
    return True


@njit(cache=True, nogil=True)
def find_draftable(table, slots, counts, places):  # type: ignore[no-untyped-def]
    """Fill `places` with those of the requests that may have drafts in this step; returns their number.

    table: RequestTable.rows; slots, counts int64 [num_requests]: the requests, and the tokens that are planned of each.
    """
    found = 0
    for i in range(len(slots)):
        row = table[slots[i]]
        is_decoding = row.num_tokens - row.num_computed == 1 and counts[i] == 1
        if is_decoding and row.max_draft_tokens > 0 and row.num_tokens >= row.plain_until:
            places[found] = i
            found += 1
    return found


@njit(cache=True, nogil=True)
def _lay_out(table, slots, counts, draftable, rooms, bounds, columns, drafted):  # type: ignore[no-untyped-def]
    """Fill the columns of a plan and the places of the requests that may be drafted.

    draftable: ascending places; rooms: the K/V entries that each of these can have. bounds: the most draft tokens of a
    request, and the model's context length. No draft is deeper than could still be given to the client. Returns the
    step's load and that of the decoding requests, as StepLoad has them, and the number of requests that are drafted.
    """
    share, max_model_len = bounds
    logit_rows, context, attended, all_rows = 0, 0, 0, 0
    num_decoding, decoding_context, num_drafted, candidate = 0, 0, 0, 0
    for i in range(len(slots)):
        row, rows = table[slots[i]], counts[i]
        computed, length = row.num_computed, row.num_tokens
        is_sampled = computed + rows == length
        columns[i, COMPUTED], columns[i, PENDING], columns[i, IS_SAMPLED] = computed, rows, is_sampled
        columns[i, MOST_DRAFT:] = 0
        if candidate < len(draftable) and draftable[candidate] == i:
            # The bonus token comes on top of the accepted ones, so the last place is never drafted.
            row_depth = max_model_len - length - 1
            depth = min(row.max_total - length - 1, row_depth)
            budget = min(row.max_draft_tokens, share, rooms[candidate] - 1)
            candidate += 1
            if depth >= 1 and budget >= 1:
                columns[i, MOST_DRAFT], columns[i, DRAFT_DEPTH] = budget, min(depth, row.branch_length)
                columns[i, ROW_DEPTH] = row_depth
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
    return (all_rows, logit_rows, len(slots), context, attended), decoding, num_drafted


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
    planned: tuple[np.ndarray, IntArray, IntArray],
    draftable: tuple[IntArray, IntArray],
    preempted: list[Request],
    max_draft_rows: int,
    bounds: tuple[int, int],
) -> SchedulerOutput:
    """planned, draftable and bounds: (table, slots, counts), (draftable, rooms) and bounds of _lay_out."""
    columns, drafted = np.empty((len(requests), 6), np.int64), np.empty(len(requests), np.int64)
    load, decoding, num_drafted = _lay_out(*planned, *draftable, bounds, columns, drafted)
    what = planned[1], columns, drafted[:num_drafted], StepLoad(*load), StepLoad(*decoding)
    return SchedulerOutput(requests, request_ids, *what, preempted, max_draft_rows)


def compile_kernels() -> None:
    """Compile the plan's kernels, or load them from the cache on disk."""
    table, none = np.zeros(1, ROW), np.zeros(0, np.int64)
    all_decode(table, none)
    find_draftable(table, none, none, none)
    plan = lay_plan([], [], (table, none, none), (none, none), [], 0, (0, 1))
    plan.load_with(none, np.zeros(1, np.int64))
