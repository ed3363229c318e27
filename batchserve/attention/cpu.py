"""Tree attention on a CPU: SDPA over each request's slab, with the GQA group folded into the query length.

A loop of SDPA calls over contiguous slabs measured faster than gathering or padding (docs/cpu.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from batchserve.attention.base import AttentionParams, Span
from batchserve.attention.mask import visible_keys
from batchserve.attention.slab import SlabAllocator
from batchserve.attention.torch_reference import attend_span, store


class CpuBackend:
    """SDPA over slabs; layers with a soft cap or sinks, which SDPA has not, take the reference's arithmetic."""

    name = "cpu"

    def __init__(self, allocator: SlabAllocator) -> None:
        self.allocator = allocator
        self._spans: list[Span] = []

    def begin(self, spans: list[Span]) -> None:
        self._spans = spans

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        num_tokens, num_heads = query.shape[2], query.shape[1]
        covered = sum(span.num_rows for span in self._spans)
        shape = (num_tokens, num_heads, value.shape[-1])
        out = query.new_empty(shape) if covered == num_tokens else query.new_zeros(shape)
        for span in self._spans:
            keys, values = store(self.allocator, span, layer, key, value)
            rows = slice(span.row_start, span.row_start + span.num_rows)
            if params.softcap is not None or params.sinks is not None:
                out[rows] = attend_span(query[0, :, rows], keys, values, self._bool_mask(span, params), params)
            else:
                out[rows] = self._sdpa(span, query[:, :, rows], keys, values, params)
        return out.unsqueeze(0)

    def _bool_mask(self, span: Span, params: AttentionParams) -> torch.Tensor:
        slot = ("bool", params.sliding_window)
        if slot not in span.cache:
            span.cache[slot] = torch.from_numpy(visible_keys(span, params.sliding_window))
        mask: torch.Tensor = span.cache[slot]
        return mask

    def _sdpa(
        self, span: Span, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        num_kv_heads, n = keys.shape[0], span.num_rows
        start, mask = self._folded_mask(span, query, num_kv_heads, params.sliding_window)
        folded = query.reshape(1, num_kv_heads, -1, query.shape[-1])
        out = F.scaled_dot_product_attention(
            folded, keys[None, :, start:], values[None, :, start:], mask, scale=params.scaling
        )
        return out.reshape(query.shape[1], n, -1).transpose(0, 1)

    def _folded_mask(
        self, span: Span, query: torch.Tensor, num_kv_heads: int, sliding_window: int | None
    ) -> tuple[int, torch.Tensor | None]:
        """(first key that any row sees, additive mask [group * n, keys] or None where all rows see all keys)."""
        group = query.shape[1] // num_kv_heads
        slot = (group, sliding_window)
        if slot not in span.cache:
            start = 0
            if sliding_window is not None:
                start = max(0, min(span.context_len, int(span.positions[0]) - sliding_window + 1))
            if span.num_rows == 1:
                span.cache[slot] = (start, None)
            else:
                visible = torch.from_numpy(visible_keys(span, sliding_window)[:, start:])
                additive = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, float("-inf"))
                span.cache[slot] = (start, additive.repeat(group, 1))
        cached: tuple[int, torch.Tensor | None] = span.cache[slot]
        return cached
