"""One step's rows: prefill chunks, draft trees and plain rows of all requests in one ragged batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from batchserve.attention.base import Span
from batchserve.attention.mask import tree_positions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.request import ResolvedSampling

MIN_ROWS = 4  # packed matmuls run 4 rows faster than 1, and are row-invariant from 2 rows on


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

    @property
    def num_verified(self) -> int:
        """Draft tokens that may be accepted."""
        return sum(self.is_verified) if self.is_verified else self.num_draft_tokens


@dataclass(slots=True)
class RaggedBatch:
    """The flattened step. Filled here: ids, positions, spans, and the rows whose logits are needed.

    input_ids and position_ids are int64 [num_rows]; padding rows come last and belong to no span. logit_rows are the
    rows that the head runs on; first_logit[i] is where request i's root row stands among them (-1: not sampled).
    """

    requests: list[RequestRows]
    input_ids: np.ndarray
    position_ids: np.ndarray
    spans: list[Span]
    logit_rows: np.ndarray
    first_logit: list[int]
    num_rows: int = field(default=0)  # without padding


def build_batch(requests: list[RequestRows]) -> RaggedBatch:
    """Lay the rows of all requests behind each other, padded to MIN_ROWS."""
    input_ids: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    logit_rows: list[int] = []
    first_logit: list[int] = []
    starts: list[int] = []
    for rows in requests:
        start, count = len(input_ids), len(rows.token_ids)
        starts.append(start)
        input_ids += rows.token_ids
        parents += rows.parents
        if rows.num_draft_tokens:
            positions += tree_positions(rows.parents, rows.context_len)
        else:
            positions += range(rows.context_len, rows.context_len + count)
        first_logit.append(len(logit_rows) if rows.sampling is not None else -1)
        if rows.sampling is not None:
            logit_rows.extend(range(start + rows.root, start + count))
    num_rows = len(input_ids)
    padding = [0] * max(0, MIN_ROWS - num_rows)
    position_ids, all_parents = np.array(positions + padding, np.int64), np.array(parents, np.int32)
    spans = []
    for rows, start, end in zip(requests, starts, [*starts[1:], num_rows], strict=True):
        where = all_parents[start:end], position_ids[start:end]
        spans.append(Span(rows.request_id, start, rows.context_len, *where, rows.num_draft_tokens == 0))
    return RaggedBatch(
        requests=requests,
        input_ids=np.array(input_ids + padding, np.int64),
        position_ids=position_ids,
        spans=spans,
        logit_rows=_padded(logit_rows),
        first_logit=first_logit,
        num_rows=num_rows,
    )


def _padded(logit_rows: list[int]) -> np.ndarray:
    """The head, too, needs MIN_ROWS rows to be row-invariant and fast; where nothing is sampled it needs none."""
    if not logit_rows:
        return np.zeros(0, dtype=np.int64)
    return np.array(logit_rows + [logit_rows[-1]] * max(0, MIN_ROWS - len(logit_rows)), dtype=np.int64)
