"""The reference's arithmetic as a backend."""

from __future__ import annotations

import torch

from batchserve.attention.base import AttentionParams, Span, Spans
from batchserve.attention.mask import visible_keys
from batchserve.attention.torch_reference import attend_span, store, stored
from batchserve.kv.slab import SlabAllocator


class TorchReferenceBackend:
    """The oracle as a backend: one request after another, nothing folded, nothing cached."""

    name = "torch_reference"

    def __init__(self, allocator: SlabAllocator) -> None:
        self.allocator = allocator
        self._spans: list[Span] = []

    def begin(self, spans: Spans) -> None:
        self._spans = spans.each()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        out = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
        for span in self._spans:
            rows = slice(span.row_start, span.row_start + span.num_rows)
            store(self.allocator, span, layer, key, value)
            keys, values = stored(self.allocator, span, layer)
            mask = torch.from_numpy(visible_keys(span, params.sliding_window))
            out[rows] = attend_span(query[0, :, rows], keys, values, mask, params)
        return out.unsqueeze(0)
