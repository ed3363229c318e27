"""K/V memory that several ranks keep alike: what one of them does to its own, the others do again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from batchserve.kv.slab import SlabAllocator


class TableChange(NamedTuple):
    """A call of an allocator's method, and what it returned."""

    method: str
    arguments: tuple[Any, ...]
    result: Any = None


class DivergedError(RuntimeError):
    """A rank's K/V memory is no longer what rank 0 believes that it is."""


class MirroredAllocator:
    """The KVAllocator of rank 0. Every call that changes something is noted, for the other ranks to repeat.

    An allocator is deterministic: the same calls give the same memory, if the system has enough of it.

    paths_in_place: a step's accepted rows are its first ones already when they are committed.
    """

    def __init__(self, own: SlabAllocator, *, paths_in_place: bool = False) -> None:
        self.own = own
        self.total_tokens, self.bytes_per_token = own.total_tokens, own.bytes_per_token
        self._paths_in_place = paths_in_place
        self._changes: list[TableChange] = []

    def take_changes(self) -> list[TableChange]:
        """Returns the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def note(self, method: str, *arguments: Any) -> None:
        """Notes a call that only the other ranks make."""
        self._changes.append(TableChange(method, arguments))

    def _call(self, method: str, *arguments: Any) -> Any:
        result = getattr(self.own, method)(*arguments)
        self._changes.append(TableChange(method, arguments, result))
        return result

    @property
    def free_tokens(self) -> int:
        return self.own.free_tokens

    @property
    def cached_tokens(self) -> int:
        return self.own.cached_tokens

    def reservable_tokens(self, request_ids: Sequence[str]) -> list[int]:
        return self.own.reservable_tokens(request_ids)

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        return bool(self._call("reserve", request_id, num_tokens))

    def reserve_all(self, request_ids: Sequence[str], num_tokens: Sequence[int]) -> bool:
        return bool(self._call("reserve_all", [*request_ids], [*num_tokens]))

    def reclaim(self, num_needed: Mapping[str, int]) -> bool:
        return bool(self._call("reclaim", dict(num_needed)))

    def commit(self, request_id: str, rows: Sequence[int]) -> None:
        self.commit_all([request_id], [len(rows)], {request_id: rows})

    def commit_all(self, request_ids: Sequence[str], counts: Sequence[int], moved: Mapping[str, Sequence[int]]) -> None:
        self._call("commit_all", [*request_ids], [*counts], {} if self._paths_in_place else dict(moved))

    def match_prefix(
        self, request_id: str, scope: Hashable, token_ids: Sequence[int], source_id: str = "", num_shared: int = 0
    ) -> int | None:
        found: int | None = self._call("match_prefix", request_id, scope, token_ids, source_id, num_shared)
        return found

    def retire(self, request_id: str, scope: Hashable, token_ids: Sequence[int]) -> None:
        self._call("retire", request_id, scope, token_ids)

    def forget_prefixes(self, scope: Hashable) -> None:
        self._call("forget_prefixes", scope)

    def give_way(self) -> None:
        self._call("give_way")

    def touch(self, request_id: str) -> None:
        self._call("touch", request_id)

    def release(self, request_id: str) -> None:
        self._call("release", request_id)

    def check_integrity(self, request_ids: Collection[str]) -> None:
        self.own.check_integrity(request_ids)


def repeat_changes(allocator: SlabAllocator, changes: Sequence[TableChange]) -> None:
    """Makes the calls that rank 0 has made. Raises DivergedError if one of them returns something else."""
    for method, arguments, result in changes:
        found = getattr(allocator, method)(*arguments)
        if found != result:
            raise DivergedError(f"K/V memory: {method} returned {found!r}, on rank 0 {result!r}")
