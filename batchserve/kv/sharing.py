"""Finds running requests whose K/V a waiting request can start from, so a shared prompt is computed only once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchserve.kv.prefix_index import MIN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchserve.request import Request

BLOCK = 256  # tokens that are compared at once


def best_source(request: Request, running: Iterable[Request]) -> tuple[str, int]:
    """Returns (id, tokens) of the running request in the same scope that has computed most of this request's prefix.

    ("", 0) if none shares MIN_TOKENS. At least one token is left to be computed, as its logits are needed.
    """
    best, most = "", MIN_TOKENS - 1
    for other in running:
        end = min(other.num_computed_tokens, len(request.token_ids) - 1)
        if end > most and other.prefix_scope == request.prefix_scope:
            length = _common_length(request.token_ids, other.token_ids, end)
            if length > most:
                best, most = other.request_id, length
    return (best, most) if best else ("", 0)


def _common_length(a: Sequence[int], b: Sequence[int], end: int) -> int:
    """Returns how many of the first `end` tokens are a common prefix."""
    for start in range(0, end, BLOCK):
        stop = min(start + BLOCK, end)
        if a[start:stop] != b[start:stop]:
            return next(i for i in range(start, stop) if a[i] != b[i])
    return end
