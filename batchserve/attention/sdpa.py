"""Attention of one request with torch's SDPA. The GQA group is folded into the query length if its mask stays small."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from batchserve.attention.mask import visible_keys
from batchserve.attention.torch_reference import attend_span

if TYPE_CHECKING:
    from batchserve.attention.base import AttentionParams, Span

# Folding is faster in fp16, where torch prepares K and V once per head, but repeats the mask for each of a group's
# heads.
MAX_FOLDED_BYTES = 64 << 20


def attend_alone(
    span: Span, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Attends with SDPA, or with the reference's arithmetic if a layer has sinks or a soft cap, which SDPA lacks.

    query [1, num_heads, n, dim], keys and values [num_kv_heads, s, dim]; returns [n, num_heads, dim].
    """
    if params.softcap is not None or params.sinks is not None:
        return attend_span(query[0], keys, values, _bool_mask(span, params.sliding_window), params)
    num_kv_heads, n = keys.shape[0], span.num_rows
    start, mask = _additive_mask(span, query, num_kv_heads, params.sliding_window)
    group = query.shape[1] // num_kv_heads
    unfolded = 1 if mask is None or len(mask) == group * n else group
    out = F.scaled_dot_product_attention(
        query.reshape(num_kv_heads, unfolded, -1, query.shape[-1]),
        keys[:, None, start:].expand(-1, unfolded, -1, -1),
        values[:, None, start:].expand(-1, unfolded, -1, -1),
        mask,
        scale=params.scaling,
    )
    return out.reshape(query.shape[1], n, -1).transpose(0, 1)


def _bool_mask(span: Span, sliding_window: int | None) -> torch.Tensor:
    slot = ("bool", sliding_window)
    if slot not in span.cache:
        span.cache[slot] = torch.from_numpy(visible_keys(span, sliding_window))
    mask: torch.Tensor = span.cache[slot]
    return mask


def _additive_mask(
    span: Span, query: torch.Tensor, num_kv_heads: int, sliding_window: int | None
) -> tuple[int, torch.Tensor | None]:
    """Returns (first key that any row sees, additive mask [group * n, keys], or None if all rows see all keys).

    If that mask would be too large, it is [n, keys] and the group's heads are not folded.
    """
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
            is_folded = group * additive.nbytes <= MAX_FOLDED_BYTES
            span.cache[slot] = (start, additive.repeat(group, 1) if is_folded else additive)
    cached: tuple[int, torch.Tensor | None] = span.cache[slot]
    return cached
