"""Tree attention in plain torch, written as literally as possible: the reference for every other backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from batchserve.attention.base import AttentionParams, Span
    from batchserve.kv.slab import SlabAllocator


def attend_span(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Computes softmax attention of one request in fp32.

    query [num_heads, n, key_dim], key and value [num_kv_heads, s, dim], mask bool [n, s];
    returns [n, num_heads, value_dim] in the query's dtype.
    """
    group = query.shape[0] // key.shape[0]
    keys = key.float().repeat_interleave(group, 0)
    values = value.float().repeat_interleave(group, 0)
    scores = query.float() @ keys.transpose(1, 2) * params.scaling
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.float().reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
        probs = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    else:
        probs = torch.softmax(scores, -1)
    return (probs @ values).transpose(0, 1).to(query.dtype)


def store(allocator: SlabAllocator, span: Span, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes the span's new K/V after its context."""
    rows = slice(span.row_start, span.row_start + span.num_rows)
    keys, values = stored(allocator, span, layer)
    keys[:, span.context_len :] = key[0, :, rows]
    values[:, span.context_len :] = value[0, :, rows]


def stored(allocator: SlabAllocator, span: Span, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the request's K and V up to the span's end, [num_kv_heads, s, dim]."""
    end, dtype = span.context_len + span.num_rows, getattr(torch, allocator.dtype)
    keys, values = (torch.from_numpy(plane).view(dtype) for plane in allocator.planes(span.request_id, layer))
    return keys[:, :end], values[:, :end]
