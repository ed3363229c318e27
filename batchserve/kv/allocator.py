"""The contract between the scheduler and whoever owns the K/V memory. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence


class KVAllocator(Protocol):
    """K/V memory in units of physically reserved tokens. The attention backend supplies it.

    A request's K/V is its committed tokens followed by the rows of the step in flight. Everything is keyed by request
    id; a request that was never reserved for has nothing.
    """

    @property
    def total_tokens(self) -> int:
        """The budget, fixed at start."""

    @property
    def bytes_per_token(self) -> int:
        """Of K and V of one token, in all layers."""

    @property
    def free_tokens(self) -> int:
        """What no request owns; part of it may hold cached prefixes, which are given up when it is needed."""

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Make room for `num_tokens` rows behind the committed ones; False (and no change) when memory is out."""

    def reserve_all(self, request_ids: Sequence[str], num_tokens: Sequence[int]) -> bool:
        """reserve() of several requests in turn, each named once, until one is refused; whether none was."""

    def reclaim(self, num_needed: Mapping[str, int]) -> bool:
        """Take from one of these requests what it has reserved for rows that were not kept: all but its committed
        tokens and so many more. False: none of them has any to give. Takes as long as copying what the request keeps.
        """

    def reservable_tokens(self, request_ids: Sequence[str]) -> list[int]:
        """The most rows that reserve() would grant to each of these requests now, if to no other."""

    def commit(self, request_id: str, rows: Sequence[int]) -> None:
        """Keep these rows as the next committed tokens: indices into the step's rows of this request, each larger than
        the one before.
        """

    def commit_all(self, request_ids: Sequence[str], counts: Sequence[int], moved: Mapping[str, Sequence[int]]) -> None:
        """commit() of several requests at once: the first counts[i] rows, or else those in `moved`, as many."""

    def match_prefix(
        self, request_id: str, scope: Hashable, token_ids: Sequence[int], source_id: str = "", num_shared: int = 0
    ) -> int | None:
        """Begin a request that owns nothing: make room for all these tokens, and commit the longest cached prefix.

        Only what was retired under the same scope is a hit, and never all of the tokens. Where a running request has
        more of them, num_shared, the new one begins with those; the source goes on, or ends, as if nothing had been.
        Raises ValueError where it has not committed so many. Returns how many are committed now; None (and no
        change) when memory is out.
        """

    def retire(self, request_id: str, scope: Hashable, token_ids: Sequence[int]) -> None:
        """Instead of release: keep what is committed as a cached prefix of the scope; it is of these tokens."""

    def forget_prefixes(self, scope: Hashable) -> None:
        """Give up what is cached under a scope."""

    def give_way(self) -> None:
        """The system has no memory left: give up all that is cached, and count on no more than what requests own now
        until none owns any.
        """

    def touch(self, request_id: str) -> None:
        """Write to all that is reserved for a request, for measurements: memory that was never written takes no time to
        read, and the first to write it waits for it. Its contents are lost.
        """

    def release(self, request_id: str) -> None:
        """Free everything of this request; nothing happens if it has nothing."""

    def check_integrity(self, request_ids: Collection[str]) -> None:
        """Raises RuntimeError unless exactly these requests own memory, and that the books add up."""
