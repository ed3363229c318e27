"""The attention interface: the spans that a backend gets for one step, and the methods that it provides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from batchserve.kv.allocator import KVAllocator


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K and V of one token in one layer: [num_kv_heads, key_dim] and [num_kv_heads, value_dim]."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """A layer's attention parameters, apart from q, k and v.

    sliding_window: a row sees a key only if key_position > row_position - sliding_window. softcap: scores become
    softcap * tanh(score / softcap). sinks: one extra logit per head that takes probability and adds no value.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Span:
    """The rows of one request in the ragged batch.

    Rows [row_start, row_start + num_rows) follow `context_len` committed tokens. parents[i] is the parent of row i
    (counted inside the span), or -1 for the context. positions are absolute. is_chain: the parent of every row is the
    row before it.
    """

    request_id: str
    row_start: int
    context_len: int
    parents: np.ndarray  # int32 [num_rows]
    positions: np.ndarray  # int64 [num_rows]
    is_chain: bool
    cache: dict[Any, Any] = field(default_factory=dict)  # masks, shared by the layers of one step

    @property
    def num_rows(self) -> int:
        return len(self.parents)


@dataclass(slots=True, eq=False)
class Spans:
    """All spans of a step as a few arrays, in row order. Single Span objects are created on demand.

    rows int64 [num_requests, 3]: first row, rows, context length. is_chain bool [num_requests]. parents int32 and
    positions int64 [num_rows] are those of all spans, concatenated.
    """

    request_ids: Sequence[str]
    rows: np.ndarray
    is_chain: np.ndarray
    parents: np.ndarray
    positions: np.ndarray
    _each: list[Span] = field(default_factory=list)

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Spans:
        """Concatenates spans. Raises ValueError if a row belongs to no span or to two."""
        ends = [0, *(span.row_start + span.num_rows for span in spans)]
        if any(span.row_start != end for span, end in zip(spans, ends, strict=False)):
            raise ValueError("spans do not follow each other")
        return cls(
            [span.request_id for span in spans],
            np.array([(s.row_start, s.num_rows, s.context_len) for s in spans], np.int64).reshape(-1, 3),
            np.array([span.is_chain for span in spans], np.bool_),
            np.concatenate([np.zeros(0, np.int32), *(span.parents for span in spans)]),
            np.concatenate([np.zeros(0, np.int64), *(span.positions for span in spans)]),
            list(spans),
        )

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.each())

    def each(self) -> list[Span]:
        if not self._each:
            heads = zip(self.request_ids, self.rows.tolist(), self.is_chain.tolist(), strict=True)
            for name, (start, count, context), is_chain in heads:
                rows = slice(start, start + count)
                self._each.append(Span(name, start, context, self.parents[rows], self.positions[rows], is_chain))
        return self._each


class AttentionBackend(Protocol):
    """Owns the K/V memory and attends over it under tree masks."""

    @property
    def name(self) -> str: ...

    @property
    def allocator(self) -> KVAllocator: ...

    def begin(self, spans: Spans) -> None:
        """Prepares one step; the rows of every span are already reserved."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Stores this layer's new K/V, then attends.

        query [1, num_heads, num_tokens, key_dim], key and value [1, num_kv_heads, num_tokens, dim], all rotated;
        returns [1, num_tokens, num_heads, value_dim]. Rows that belong to no span (padding) give zeros.
        """
