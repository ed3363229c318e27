"""Which running request's K/V a waiting one may begin with: prompts that begin alike are computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchserve.request import Request

FEWEST_TOKENS = 16  # less is computed as quickly as it is found
BLOCK = 256  # tokens that are compared at once


class Source(NamedTuple):
    """A running request that begins like a waiting one.

    num_shared: tokens that both begin with and whose K/V is there; num_coming: as many as there will be when the
    source's prompt is computed.
    """

    request: Request
    num_shared: int
    num_coming: int

    def is_worth_waiting_for(self, num_tokens: int) -> bool:
        """Whether most of what is missing to a waiting request's num_tokens is about to be computed anyway."""
        return 2 * (self.num_coming - self.num_shared) > num_tokens - self.num_shared


def best_source(request: Request, running: Iterable[Request]) -> Source | None:
    """The running request of the same scope that begins most like this one, K/V that is still to come included.

    One token at least is left to be computed: its logits are wanted.
    """
    if request.prefix_scope is None:
        return None
    best, wanted = None, request.token_ids[:-1]
    for other in running:
        length = common_length(wanted, other.token_ids) if other.prefix_scope == request.prefix_scope else 0
        if length >= FEWEST_TOKENS and (best is None or length > best.num_coming):
            best = Source(other, min(length, other.num_computed_tokens), length)
    return best


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(a), len(b))
    for start in range(0, shorter, BLOCK):
        end = min(start + BLOCK, shorter)
        if a[start:end] != b[start:end]:
            return next(i for i in range(start, end) if a[i] != b[i])
    return shorter
