"""One step's rows: prefill chunks, draft trees and plain rows of all requests in one ragged batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np

from batchserve.attention.base import Spans
from batchserve.draft.forest import DraftForest
from batchserve.runner.row_layout import lay_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.request import ResolvedSampling
    from batchserve.row_adjustments import RowAdjustments

    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

MIN_ROWS = 4  # of a model's modules: torch multiplies a single row by other kernels, with other bits


@dataclass(slots=True)
class RequestRows:
    """The rows of one request: `num_pending` tokens that extend its context in a chain, then its draft tree.

    parents[i] is a row of this request, -1 for the context; is_verified has one entry a tree row
    (empty: all are). Where `sampling` is None the chunk ends before the last prompt token and nothing is sampled;
    otherwise the last pending row and all tree rows are.
    """

    request_id: str
    context_len: int
    token_ids: list[int]
    parents: list[int]
    num_pending: int
    sampling: ResolvedSampling | None
    is_verified: Sequence[bool] = ()

    @property
    def root(self) -> int:
        """The row that the draft tree hangs from: the request's last token."""
        return self.num_pending - 1

    @property
    def num_draft_tokens(self) -> int:
        return len(self.token_ids) - self.num_pending


@dataclass(slots=True)
class RaggedBatch:
    """The flattened step, request behind request.

    input_ids and position_ids are int64 [num_rows], padded to MIN_ROWS; padding rows belong to no span. num_pending
    and num_verified int64 [num_requests]: of each request the rows that are no draft, and those that may be accepted;
    is_verified bool [num_rows] is true for both.
    logit_rows are the rows that the head runs on, num_logits and padding; first_logit[i] is where request i's root row
    stands among them (-1: not sampled).
    """

    request_ids: list[str]
    samplings: list[ResolvedSampling | None]
    spans: Spans
    num_pending: IntArray
    num_verified: IntArray
    input_ids: IntArray
    position_ids: IntArray
    is_verified: BoolArray
    logit_rows: IntArray
    num_logits: int
    first_logit: IntArray
    num_rows: int  # without padding
    adjustments: dict[int, RowAdjustments] = field(default_factory=dict)  # of requests that change logits, by place
    # By place, of requests that ask for the log probabilities of a prompt: the tokens after their pending rows, and of
    # how many of the likeliest tokens they are wanted.
    prompts: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    _requests: list[RequestRows] = field(default_factory=list)

    def prompt_rows(self, place: int) -> slice:
        """Returns the logit rows that predict the tokens of `prompts`."""
        first = int(np.searchsorted(self.logit_rows[: self.num_logits], self.spans.rows[place, 0]))
        return slice(first, first + len(self.prompts[place][0]))

    def tree(self, place: int) -> tuple[list[int], list[int], list[bool]]:
        """Returns the draft tree of one request: tokens, parents (inside the tree, -1 for its root), is_verified."""
        start, size, _ = self.spans.rows[place].tolist()
        root = int(self.num_pending[place]) - 1
        rows = slice(start + root + 1, start + size)
        parents = (self.spans.parents[rows] - (root + 1)).tolist()
        return self.input_ids[rows].tolist(), parents, self.is_verified[rows].tolist()

    @property
    def requests(self) -> list[RequestRows]:
        """The rows request by request: for whom a step need not be fast."""
        if not self._requests:
            ids, parents, verified = self.input_ids.tolist(), self.spans.parents.tolist(), self.is_verified.tolist()
            places, counts = self.spans.rows.tolist(), self.num_pending.tolist()
            each = zip(self.request_ids, self.samplings, places, counts, strict=True)
            for name, sampling, (start, size, context), count in each:
                rows, end = slice(start, start + size), start + size
                what = (ids[rows], parents[rows], count, sampling, verified[start + count : end])
                self._requests.append(RequestRows(name, context, *what))
        return self._requests


def build_batch(requests: Sequence[RequestRows]) -> RaggedBatch:
    """The ragged batch of these rows."""
    nodes = [rows.parents[rows.num_pending :] for rows in requests]
    starts = np.array([0, *accumulate(map(len, nodes))])
    trees = DraftForest(
        starts,
        np.array([token for rows in requests for token in rows.token_ids[rows.num_pending :]], np.int64),
        np.array([p - rows.num_pending for rows, own in zip(requests, nodes, strict=True) for p in own], np.int64),
        np.ones(int(starts[-1])),
        np.array([v for rows in requests for v in rows.is_verified or [True] * rows.num_draft_tokens], np.bool_),
    )
    pending = list(chain.from_iterable(rows.token_ids[: rows.num_pending] for rows in requests))
    heads = [(rows.context_len, rows.num_pending, rows.sampling is not None) for rows in requests]
    names, samplings = [rows.request_id for rows in requests], [rows.sampling for rows in requests]
    return flatten(names, samplings, np.array(heads, np.int64).reshape(-1, 3), pending, trees)


def flatten(
    request_ids: list[str],
    samplings: list[ResolvedSampling | None],
    heads: IntArray,
    pending_ids: Sequence[int],
    trees: DraftForest,
) -> RaggedBatch:
    """Lay the rows of all requests behind each other.

    heads int64 [num_requests, 3]: as row_layout.lay_out takes them; pending_ids: the pending tokens of all requests.
    Raises ValueError where a parent does not come before its node.
    """
    head = np.ascontiguousarray(heads)  # in one piece, as kernels were compiled for it
    pending, count = np.array(pending_ids, np.int64), len(request_ids)
    num_rows = len(pending_ids) + int(trees.starts[-1])
    padded = max(num_rows, MIN_ROWS)
    input_ids, position_ids, logit_rows = np.empty((3, padded), np.int64)
    (num_verified, first_logit), rows = np.empty((2, count), np.int64), np.empty((count, 3), np.int64)
    parents, is_verified = np.empty(num_rows, np.int32), np.empty(num_rows, np.bool_)
    is_chain = np.empty(count, np.bool_)
    out = (rows, is_chain, num_verified, input_ids, position_ids, parents, is_verified, logit_rows, first_logit)
    num_logits = lay_out(head, pending, trees.starts, trees.token_ids, trees.parents, trees.is_verified, out)
    if num_logits < 0:
        raise ValueError("a draft node's parent does not come before it")
    # The head, too, runs on MIN_ROWS rows at least; where nothing is sampled it needs none.
    num_kept = max(num_logits, MIN_ROWS) if num_logits else 0
    return RaggedBatch(
        request_ids=request_ids,
        samplings=samplings,
        spans=Spans(request_ids, rows, is_chain, parents, position_ids[:num_rows]),
        num_pending=head[:, 1].copy(),  # in one piece, too
        num_verified=num_verified,
        input_ids=input_ids,
        position_ids=position_ids,
        is_verified=is_verified,
        logit_rows=logit_rows[:num_kept],
        num_logits=num_logits,
        first_logit=first_logit,
        num_rows=num_rows,
    )
