"""The attention seam: what a backend is given for one step, and the methods that it supplies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from batchserve.scheduler.kv_allocator import KVAllocator


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K and V of one token in one layer: [num_kv_heads, key_dim] and [num_kv_heads, value_dim]."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What one layer asks for besides q, k and v.

    sliding_window: a row sees a key only if key_position > row_position - sliding_window. softcap: scores become
    softcap * tanh(score / softcap). sinks: one extra logit a head that takes probability and gives nothing.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Span:
    """The rows of one request in the ragged batch.

    Rows [row_start, row_start + num_rows) follow `context_len` committed tokens. parents[i] is the row (counted inside
    the span) that row i hangs from, or -1 for the context; positions are absolute. is_chain: every row hangs from the
    one before it.
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


class AttentionBackend(Protocol):
    """Owns the K/V memory and attends over it under tree masks."""

    @property
    def name(self) -> str: ...

    @property
    def allocator(self) -> KVAllocator: ...

    def begin(self, spans: list[Span]) -> None:
        """Prepare one step; every span has its rows reserved."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Store this layer's new K/V, then attend.

        query [1, num_heads, num_tokens, key_dim], key and value [1, num_kv_heads, num_tokens, dim], all rotated;
        returns [1, num_tokens, num_heads, value_dim]. Rows that belong to no span (padding) give zeros.
        """
