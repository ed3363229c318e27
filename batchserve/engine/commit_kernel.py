"""The compiled part of a commit: what a step's verified tokens make of all requests' rows in the table."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np
from numba import carray

from batchserve.native.addresses import as_pointer
from batchserve.native.jit import njit
from batchserve.request_table import ROW
from batchserve.sampling.sampler import NO_TOKEN
from batchserve.sampling.verify import NOT_SAMPLED

GOES_ON, STOPPED, FULL, OVERFLOWED, LEFT_OUT = range(5)
# Columns of what commit_tokens says of each request: the rows whose K/V is kept; whether these are its first rows; the
# tokens that its answer gets; the accepted drafts among them; and how it goes on: it does; it ended with an end token;
# with its last token; the logits after its last token say nothing; or it was not looked at.
NUM_KEPT, IS_IN_PLACE, NUM_GIVEN, NUM_ACCEPTED, STATUS, NUM_COLUMNS = range(6)


@njit(cache=True, nogil=True)
def commit_tokens(table, slots, is_over, batch, verified, found, given):  # type: ignore[no-untyped-def]
    """Append each request's verified tokens to its row of the table, up to its end, and count what it has computed.

    slots int64, is_over bool [num_requests]: those that have ended already are left out. batch: num_pending and
    num_verified of RaggedBatch; verified: the arrays of StepTokens. Fills found [num_requests, NUM_COLUMNS].

    given: int64 arrays slots, starts, token_ids; filled as decoding_length.acceptance.Given with the tokens of decoding
    requests, the end token included. Returns the number of these requests.
    """
    (num_pending, num_verified), (num_accepted, starts, token_ids, rows) = batch, verified
    given_slots, given_starts, given_ids = given
    num_decoding, num_given_ids = 0, 0
    given_starts[0] = 0
    for i in range(len(slots)):
        found[i, :] = 0
        if is_over[i]:
            found[i, STATUS] = LEFT_OUT
            continue
        row, start, accepted = table[slots[i]], starts[i], num_accepted[i]
        found[i, NUM_KEPT], found[i, IS_IN_PLACE] = num_pending[i], True
        if accepted == NOT_SAMPLED:
            row.num_computed += num_pending[i]
            continue
        if token_ids[start + accepted] == NO_TOKEN:
            found[i, NUM_KEPT], found[i, STATUS] = 0, OVERFLOWED
            continue
        found[i, NUM_KEPT] += accepted
        found[i, IS_IN_PLACE] = accepted == 0 or rows[start + accepted - 1] == num_pending[i] + accepted - 1
        row.num_computed += num_pending[i] + accepted
        row.num_draft_tokens += num_verified[i]
        ends = carray(as_pointer(row.end_tokens), row.num_end_tokens, np.int64)
        room = row.max_total - row.num_tokens
        count, came = min(accepted + 1, room), min(accepted + 1, room)
        if count >= room:
            found[i, STATUS] = FULL
        for k in range(count):
            is_end = False
            for end in ends:
                is_end = is_end or end == token_ids[start + k]
            if is_end:
                count, came, found[i, STATUS] = k, k + 1, STOPPED
                break
        # Drafts that were accepted after the answer's end helped nobody.
        found[i, NUM_GIVEN], found[i, NUM_ACCEPTED] = count, min(accepted, count)
        row.num_accepted_draft_tokens += min(accepted, count)
        row.num_tokens += count
        if count > 0:
            row.last_token = token_ids[start + count - 1]
        if num_pending[i] == 1:
            for k in range(came):
                given_ids[num_given_ids + k] = token_ids[start + k]
            num_given_ids += came
            given_slots[num_decoding] = slots[i]
            num_decoding += 1
            given_starts[num_decoding] = num_given_ids
    return num_decoding


def compile_kernels() -> None:
    """Compile commit_tokens, or load it from the cache on disk."""
    one, numbers = np.zeros(1, np.int64), np.zeros(2, np.int64)
    batch, verified = (one, one), (one - 1, one, one, one)
    commit_tokens(
        np.zeros(1, ROW),
        one,
        np.zeros(1, np.bool_),
        batch,
        verified,
        np.zeros((1, NUM_COLUMNS), np.int64),
        (one, numbers, one),
    )
