"""Which running request's K/V a waiting one may begin with: what is computed of a prompt is not computed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchserve.kv.prefix_index import FEWEST_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchserve.request import Request

BLOCK = 256  # tokens that are compared at once


def best_source(request: Request, running: Iterable[Request]) -> tuple[str, int]:
    """Who of the request's own scope has computed most of what it begins with, and how many tokens; ("", 0): nobody.

    One token at least is left to be computed: its logits are wanted.
    """
    best, most = "", FEWEST_TOKENS - 1
    for other in running:
        end = min(other.num_computed_tokens, len(request.token_ids) - 1)
        if end > most and other.prefix_scope == request.prefix_scope:
            length = _common_length(request.token_ids, other.token_ids, end)
            if length > most:
                best, most = other.request_id, length
    return (best, most) if best else ("", 0)


def _common_length(a: Sequence[int], b: Sequence[int], end: int) -> int:
    """How many of the first `end` tokens both begin with."""
    for start in range(0, end, BLOCK):
        stop = min(start + BLOCK, end)
        if a[start:stop] != b[start:stop]:
            return next(i for i in range(start, stop) if a[i] != b[i])
    return end
