"""The table of requests in flight: one row of numbers each, which compiled code reads and writes by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from batchserve.request import Request

IntArray = np.ndarray[Any, np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float64]]

ROW = np.dtype(
    [
        ("generation", np.int64),  # rises each time the slot is given to a request
        ("num_tokens", np.int64),  # prompt and answer so far
        ("num_prompt", np.int64),
        ("num_computed", np.int64),  # tokens that have K/V
        ("last_token", np.int64),
        ("max_total", np.int64),  # the most tokens that there will be
        ("max_draft_tokens", np.int64),  # in a step
        ("branch_length", np.int64),
        ("plain_until", np.int64),  # no drafts before there are so many tokens
        ("num_draft_tokens", np.int64),  # verified so far
        ("num_accepted_draft_tokens", np.int64),
        ("end_tokens", np.int64),  # the address of an int64 array [num_end_tokens]
        ("num_end_tokens", np.int64),
        ("last_token_s", np.float64),  # when the last token came, or the request if there is none yet
        ("is_over", np.int64),  # a stop string has ended the answer while a step was under way
    ],
    align=True,
)
FIRST_SIZE = 16


class RequestTable:
    """Slots and their rows. A request keeps its slot from `add` to `remove`; its position in a batch may change.

    rows: structured array [size] of ROW. It is replaced when the table grows, which only `add` does; so are the columns
    that Python reads, each a view [size].
    """

    num_computed: IntArray
    num_draft_tokens: IntArray
    num_accepted_draft_tokens: IntArray
    last_token: IntArray

    def __init__(self) -> None:
        self.requests: list[Request | None] = []  # by slot
        self._free: list[int] = []
        self._set_rows(np.zeros(0, ROW))

    def _set_rows(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.num_computed, self.num_draft_tokens = rows["num_computed"], rows["num_draft_tokens"]
        self.num_accepted_draft_tokens, self.last_token = rows["num_accepted_draft_tokens"], rows["last_token"]

    def add(self, request: Request) -> None:
        """Give a request a slot, and fill its row."""
        if not self._free:
            size = len(self.rows)
            added = max(size, FIRST_SIZE)
            self._set_rows(np.concatenate((self.rows, np.zeros(added, ROW))))
            self.requests += [None] * added
            self._free = list(range(size + added - 1, size - 1, -1))
        slot = self._free.pop()
        generation = int(self.rows["generation"][slot]) + 1
        self.rows[slot] = (generation, *request.numbers())
        request.table, request.slot, self.requests[slot] = self, slot, request

    def remove(self, request: Request) -> None:
        """Free a request's slot."""
        slot = request.slot
        request.leave_table()
        self.requests[slot] = None
        self._free.append(slot)

    def check_integrity(self) -> None:
        """Raises RuntimeError if a row disagrees with its request, or a slot is neither used nor free."""
        used = [slot for slot, request in enumerate(self.requests) if request is not None]
        if sorted([*used, *self._free]) != list(range(len(self.rows))):
            raise RuntimeError(f"slots {used} are used and {sorted(self._free)} are free of {len(self.rows)}")
        for slot in used:
            request, row = self.requests[slot], self.rows[slot]
            assert request is not None
            known = len(request.token_ids), request.token_ids[-1]
            if request.slot != slot or known != (int(row["num_tokens"]), int(row["last_token"])):
                raise RuntimeError(f"request {request.request_id!r} and its row {slot} disagree: {known}, {row}")
