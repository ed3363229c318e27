"""Commits a step's verified tokens to the table of requests: one compiled call for all requests."""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import carray

from batchserve.decoding_length.acceptance import Given
from batchserve.metrics import VERIFIED
from batchserve.native.addresses import as_pointer
from batchserve.native.jit import njit
from batchserve.request_table import ROW
from batchserve.sampling.sampler import NO_TOKEN
from batchserve.sampling.verify import NOT_SAMPLED

if TYPE_CHECKING:
    from batchserve.runner.ragged_batch import RaggedBatch
    from batchserve.sampling.verify import StepTokens
    from batchserve.scheduler.plan import SchedulerOutput

# How a request goes on after a step: it does; its answer ended with an end token; it is as long as it may be; nothing
# was sampled; the logits after its last token say nothing; its answer had ended before.
GOES_ON, STOPPED, FULL, PREFILLING, OVERFLOWED, LEFT_OUT = range(6)
# Columns of what _commit_tokens finds for each request: the rows whose K/V is kept; whether these are its first rows;
# where its tokens begin; how many its answer gets; the accepted drafts among them; whether it had drafts; whether its
# first token is among them; and how it goes on.
NUM_KEPT, IS_IN_PLACE, START, NUM_GIVEN, NUM_ACCEPTED, HAS_DRAFTS, IS_FIRST, STATUS, NUM_COLUMNS = range(9)


@njit(cache=True, nogil=True)
def _commit_tokens(table, slots, batch, verified, now_s, found, counted, given):  # type: ignore[no-untyped-def]
    """Append each request's verified tokens to its row of the table, up to its end, and count what it has computed.

    slots int64 [num_requests]. batch: spans.rows, num_pending and num_verified of RaggedBatch; verified: the arrays of
    StepTokens. Fills found int64 [num_requests, NUM_COLUMNS], and as many of counted, VERIFIED [num_requests], as there
    are requests that were verified.

    given: int64 arrays slots, starts, token_ids; filled as decoding_length.acceptance.Given with the tokens of decoding
    requests, the end token included. Returns the number of these, of verified requests, and of draft rows, and whether
    all kept rows are in place.
    """
    (spans, num_pending, num_verified), (num_accepted, starts, token_ids, rows) = batch, verified
    given_slots, given_starts, given_ids = given
    num_decoding, num_verified_requests, num_given_ids, num_draft_rows, is_in_place = 0, 0, 0, 0, True
    given_starts[0] = 0
    for i in range(len(slots)):
        row, start, accepted = table[slots[i]], starts[i], num_accepted[i]
        found[i, :] = 0
        found[i, IS_IN_PLACE], found[i, START] = True, start
        if row.is_over:
            found[i, STATUS] = LEFT_OUT
            continue
        if accepted == NOT_SAMPLED:
            found[i, NUM_KEPT], found[i, STATUS] = num_pending[i], PREFILLING
            row.num_computed += num_pending[i]
            continue
        if token_ids[start + accepted] == NO_TOKEN:
            found[i, STATUS], found[i, HAS_DRAFTS] = OVERFLOWED, spans[i, 1] > num_pending[i]
            continue
        num_draft_rows += spans[i, 1] - num_pending[i]
        num_kept = num_pending[i] + accepted
        found[i, NUM_KEPT] = num_kept
        found[i, IS_IN_PLACE] = accepted == 0 or rows[start + accepted - 1] == num_kept - 1
        is_in_place = is_in_place and found[i, IS_IN_PLACE]
        row.num_computed += num_kept
        row.num_draft_tokens += num_verified[i]
        ends = carray(as_pointer(row.end_tokens), row.num_end_tokens, np.int64)
        room = row.max_total - row.num_tokens
        count = came = min(accepted + 1, room)
        status = FULL if count >= room else GOES_ON
        for k in range(count):
            is_end = False
            for end in ends:
                is_end = is_end or end == token_ids[start + k]
            if is_end:
                count, came, status = k, k + 1, STOPPED
                break
        # Drafts that were accepted after the answer's end helped nobody.
        found[i, NUM_GIVEN], found[i, NUM_ACCEPTED], found[i, STATUS] = count, min(accepted, count), status
        row.num_accepted_draft_tokens += min(accepted, count)
        one = counted[num_verified_requests]
        num_verified_requests += 1
        one.num_drafted, one.num_accepted, one.num_given = num_verified[i], min(accepted, count), count
        one.is_first, one.waited_s = row.num_tokens == row.num_prompt, now_s - row.last_token_s
        if count > 0:
            found[i, IS_FIRST] = one.is_first
            row.num_tokens += count
            row.last_token, row.last_token_s = token_ids[start + count - 1], now_s
        if num_pending[i] == 1:
            for k in range(came):
                given_ids[num_given_ids + k] = token_ids[start + k]
            num_given_ids += came
            given_slots[num_decoding] = slots[i]
            num_decoding += 1
            given_starts[num_decoding] = num_given_ids
    return num_decoding, num_verified_requests, num_draft_rows, is_in_place


class Committed(NamedTuple):
    """The outcome of a step for its requests.

    columns: the rows of _commit_tokens' `found`. moved: by request id the rows whose K/V is kept, where they are not
    its first ones. given: the tokens of the decoding requests.
    """

    columns: list[list[int]]
    moved: dict[str, list[int]]
    given: Given
    verified: np.ndarray
    num_draft_rows: int


def commit_step(
    table: np.ndarray, plan: SchedulerOutput, batch: RaggedBatch, verified: StepTokens, now_s: float
) -> Committed:
    """Brings the requests' rows of the table up to date after a step. table: RequestTable.rows."""
    count = len(plan.requests)
    found, counted = np.empty((count, NUM_COLUMNS), np.int64), np.empty(count, VERIFIED)
    slots, starts = np.empty((2, count + 1), np.int64)
    tokens = np.empty(len(verified.token_ids), np.int64)
    rows = batch.spans.rows, batch.num_pending, batch.num_verified
    arrays = verified.num_accepted, verified.starts, verified.token_ids, verified.rows
    num_decoding, num_verified, num_draft_rows, is_in_place = _commit_tokens(
        table, plan.slots, rows, arrays, now_s, found, counted, (slots, starts, tokens)
    )
    columns = found.tolist()
    moved = {} if is_in_place else _moved(columns, plan.request_ids, batch, verified)
    given = Given(slots[:num_decoding], starts[: num_decoding + 1], tokens[: starts[num_decoding]])
    return Committed(columns, moved, given, counted[:num_verified], num_draft_rows)


def _moved(
    columns: list[list[int]], request_ids: list[str], batch: RaggedBatch, verified: StepTokens
) -> dict[str, list[int]]:
    """Returns the rows to keep of requests whose accepted drafts are not the first ones."""
    moved = {}
    for place, (name, column) in enumerate(zip(request_ids, columns, strict=True)):
        if not column[IS_IN_PLACE]:
            start, count = column[START], int(verified.num_accepted[place])
            moved[name] = [*range(batch.num_pending[place]), *verified.rows[start : start + count].tolist()]
    return moved


def compile_kernels() -> None:
    """Compile _commit_tokens, or load it from the cache on disk."""
    one, numbers = np.zeros(1, np.int64), np.zeros(2, np.int64)
    batch, verified = (np.zeros((1, 3), np.int64), one, one), (one - 1, one, one, one)
    found, given = np.zeros((1, NUM_COLUMNS), np.int64), (one, numbers, one)
    _commit_tokens(np.zeros(1, ROW), one, batch, verified, 0.0, found, np.zeros(1, VERIFIED), given)
