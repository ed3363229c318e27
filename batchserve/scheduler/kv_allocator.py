"""The contract between the scheduler and whoever owns the K/V memory. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class KVAllocator(Protocol):
    """K/V memory in units of physically reserved tokens. The attention backend supplies it.

    A request's K/V is its committed tokens followed by the rows of the step in flight. Everything is keyed by request
    id; a request that was never reserved for has nothing.
    """

    @property
    def total_tokens(self) -> int:
        """The budget, fixed at start."""

    @property
    def free_tokens(self) -> int:
        """What is left of it."""

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Make room for `num_tokens` rows behind the committed ones; False (and no change) when memory is out."""

    def reservable_tokens(self, request_id: str) -> int:
        """The most rows that reserve() would grant to this request now."""

    def commit(self, request_id: str, rows: Sequence[int]) -> None:
        """Keep these rows (indices into the step's rows of this request, ascending) as the next committed tokens."""

    def release(self, request_id: str) -> None:
        """Free everything of this request; nothing happens if it has nothing."""

    def check_integrity(self, request_ids: Collection[str]) -> None:
        """Raises RuntimeError unless exactly these requests own memory and owned + free = total, in bytes."""
