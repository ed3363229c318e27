"""K/V memory of the GPU path: one slot per token, reference counts, and a table of each request's slots.

Torch-free: slots are numbers, and the backend owns their memory. K/V is never moved: accepted rows keep their slots, a
prefix hit shares the slots of the matching text, and a fork shares those of its source.
"""

from __future__ import annotations

from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy as np

from batchserve.kv.prefix_index import MIN_TOKENS
from batchserve.kv.prefix_tree import PrefixTree
from batchserve.kv.slot_kernels import (
    COMMITTED,
    DUMMY_SLOT,
    NUM_FREE,
    NUM_OWNED,
    OWNED,
    PROMISED,
    commit_rows,
    count_changes,
    reserve_rows,
    take_changes,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence


NO_ROW = -1


class SlotAllocator:
    """KVAllocator over slots 1 to total_tokens.

    A slot is owned while a request refers to it, cached while only kept prefixes do, and free otherwise. A request may
    own up to max_tokens slots. Slots that a step reserved and commit() did not keep are freed, except for those that
    were reserved when the request began: an admitted prompt keeps its room.
    """

    def __init__(self, total_tokens: int, max_requests: int, max_tokens: int, bytes_per_token: int) -> None:
        self.bytes_per_token = bytes_per_token
        self._total = total_tokens
        self._rows: dict[str, int] = {}  # each request's row in the table and the books
        self._books = np.zeros((max_requests + 1, 4), np.int64)  # the last row belongs to no request and stays zero
        self._table = np.zeros((max_requests, min(max_tokens, total_tokens)), np.int32)
        self._free_rows = list(range(max_requests))[::-1]
        # A stack: the lowest slots are on top at first, and the slot that was freed last is taken first.
        self._free = np.arange(total_tokens, 0, -1, dtype=np.int32)
        self._numbers = np.array([total_tokens, 0])
        self._request_refs = np.zeros(total_tokens + 1, np.int32)
        self._prefix_refs = np.zeros(total_tokens + 1, np.int32)
        self._prefixes = PrefixTree()

    @property
    def num_slots(self) -> int:
        """The number of slots in the caches, including the dummy slot."""
        return self._total + 1

    @property
    def table_shape(self) -> tuple[int, int]:
        """Rows and columns of the table of slots. Rows are added if there are more requests than expected."""
        rows, columns = self._table.shape
        return rows, columns

    @property
    def total_tokens(self) -> int:
        return self._total

    @property
    def free_tokens(self) -> int:
        return self._total - int(self._numbers[NUM_OWNED])

    @property
    def cached_tokens(self) -> int:
        return self.free_tokens - int(self._numbers[NUM_FREE])

    def reservable_tokens(self, request_ids: Sequence[str]) -> list[int]:
        free, width = self.free_tokens, self._table.shape[1]
        books = self._books[[self._rows.get(request_id, NO_ROW) for request_id in request_ids]]
        return [min(owned + free, width) - committed for _, owned, committed, _ in books.tolist()]

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        if request_id not in self._rows:
            if num_tokens > self.reservable_tokens([request_id])[0]:
                return False
            self._begin(request_id, num_tokens)
        return self._reserve(np.array([self._rows[request_id]]), np.array([num_tokens]))

    def reclaim(self, num_needed: Mapping[str, int]) -> bool:
        return False  # commit_all() leaves nothing to reclaim

    def reserve_all(self, request_ids: Sequence[str], num_tokens: Sequence[int]) -> bool:
        if all(request_id in self._rows for request_id in request_ids):
            rows = self._rows_of(request_ids)
            if self._reserve(rows, np.array(num_tokens, np.int64)):
                return True
        return all(map(self.reserve, request_ids, num_tokens))

    def _reserve(self, rows: np.ndarray, counts: np.ndarray) -> bool:
        """True if there was memory for all of the requests; otherwise nothing has changed."""
        what = (self._books, self._table, self._free, self._request_refs, self._numbers, rows, counts)
        missing = reserve_rows(*what)
        if missing > 0 and missing <= self.cached_tokens:
            self._make_room(int(self._numbers[NUM_FREE]) + missing)
            missing = reserve_rows(*what)
        return bool(missing == 0)

    def _rows_of(self, request_ids: Sequence[str]) -> np.ndarray:
        return np.array([self._rows[request_id] for request_id in request_ids], np.int64)

    def _begin(self, request_id: str, num_tokens: int) -> int:
        """Assigns a row to a new request, which owns nothing yet, and returns it."""
        if not self._free_rows:
            count = len(self._table)
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._books = np.concatenate([self._books[:count], np.zeros((count + 1, 4), np.int64)])
            self._free_rows = list(range(count, 2 * count))[::-1]
        row = self._rows[request_id] = self._free_rows.pop()
        self._books[row] = 0
        self._books[row, PROMISED] = num_tokens
        return row

    def _make_room(self, num_tokens: int) -> None:
        """Drops prefixes, least recently used first, until num_tokens slots are free."""
        while self._numbers[NUM_FREE] < num_tokens:
            self._release_prefix_slots(self._prefixes.drop(next(iter(self._prefixes))))

    def commit(self, request_id: str, rows: Sequence[int]) -> None:
        self.commit_all([request_id], [len(rows)], {request_id: rows})

    def commit_all(self, request_ids: Sequence[str], counts: Sequence[int], moved: Mapping[str, Sequence[int]]) -> None:
        rows = [moved.get(name, range(count)) for name, count in zip(request_ids, counts, strict=True)]
        starts = np.array([0, *accumulate(map(len, rows))])
        kept = np.array([*chain.from_iterable(rows)], np.int64)
        books = (self._books, self._table, self._free, self._request_refs, self._numbers)
        wrong = commit_rows(*books, self._rows_of(request_ids), starts, kept)
        if wrong < len(request_ids):
            name = f"rows of {request_ids[wrong]!r}"
            raise IndexError(f"{name}: {[*rows[wrong]]} do not ascend, or are not all reserved")

    def _push(self, slots: np.ndarray) -> None:
        num_free = self._numbers[NUM_FREE]
        self._free[num_free : num_free + len(slots)] = slots[::-1]
        self._numbers[NUM_FREE] += len(slots)

    def touch(self, request_id: str) -> None:
        """Does nothing: device memory is allocated at the start."""

    def release(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        slots = self._table[row, : self._books[row, OWNED]]
        refs = self._request_refs[slots] - 1
        self._request_refs[slots] = refs
        unowned = slots[refs == 0]
        self._numbers[NUM_OWNED] -= len(unowned)
        self._push(unowned[self._prefix_refs[unowned] == 0])
        self._free_rows.append(row)

    def retire(self, request_id: str, scope: Hashable, token_ids: Sequence[int]) -> None:
        count = min(len(token_ids), int(self._books[self._rows[request_id], COMMITTED]))
        if count >= MIN_TOKENS:
            new, gone = self._prefixes.add(scope, token_ids[:count], self.slots(request_id)[:count])
            self._prefix_refs[new] += 1
            for slots in gone:
                self._release_prefix_slots(slots)
        self.release(request_id)

    def match_prefix(
        self, request_id: str, scope: Hashable, token_ids: Sequence[int], source_id: str = "", num_shared: int = 0
    ) -> int | None:
        shared = self._prefixes.match(scope, token_ids[:-1])
        if num_shared > len(shared):
            return num_shared if self.fork(request_id, source_id, num_shared, len(token_ids)) else None
        return len(shared) if self._begin_with(request_id, shared, len(token_ids)) else None

    def fork(self, request_id: str, source_id: str, num_shared: int, num_tokens: int) -> bool:
        committed = int(self._books[self._rows[source_id], COMMITTED])
        if num_shared > committed:
            raise ValueError(f"num_shared = {num_shared}: {source_id!r} has committed {committed} tokens")
        return self._begin_with(request_id, self.slots(source_id)[:num_shared].copy(), num_tokens)

    def _begin_with(self, request_id: str, shared: np.ndarray, num_tokens: int) -> bool:
        """Reserves num_tokens slots, the first of them shared and committed. False if there is no memory."""
        newly_owned = int(np.count_nonzero(self._request_refs[shared] == 0))
        missing = num_tokens - len(shared)
        if missing + newly_owned > self.free_tokens or num_tokens > self._table.shape[1]:
            return False
        row = self._begin(request_id, num_tokens)
        self._table[row, : len(shared)] = shared
        self._request_refs[shared] += 1
        self._numbers[NUM_OWNED] += newly_owned
        self._books[row, [OWNED, COMMITTED]] = len(shared)
        return self._reserve(np.array([row]), np.array([missing]))

    def forget_prefixes(self, scope: Hashable) -> None:
        for slots in self._prefixes.drop_scope(scope):
            self._release_prefix_slots(slots)

    def give_way(self) -> None:
        pass  # slots are allocated once

    def _release_prefix_slots(self, slots: np.ndarray) -> None:
        """Drops a prefix's references to its slots, and frees those that are unused now."""
        refs = self._prefix_refs[slots] - 1
        self._prefix_refs[slots] = refs
        self._push(slots[(refs == 0) & (self._request_refs[slots] == 0)])

    def rows(self, request_ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns (int64 [num_requests], each request's row until it is released; slot table int32 [rows, columns]).

        The table is valid until the next call.
        """
        return self._rows_of(request_ids), self._table

    def slots(self, request_id: str) -> np.ndarray:
        """Returns the request's slots (int32) in token order, including reserved ones; valid until the next call."""
        row = self._rows[request_id]
        return self._table[row, : self._books[row, OWNED]]

    def changes(
        self, request_ids: Sequence[str], room: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the table entries of these requests that the device's copy lacks, and marks them as uploaded.

        (int64 places in the flattened table, int32 slots), both [num_changes]; inside `room` if it is large enough.
        """
        rows = self._rows_of(request_ids)
        count = count_changes(self._books, rows)
        if room is None or count > len(room[0]):
            room = np.empty(count, np.int64), np.empty(count, np.int32)
        take_changes(self._books, self._table, rows, *room)
        return room[0][:count], room[1][:count]

    def check_integrity(self, request_ids: Collection[str]) -> None:
        if set(self._rows) != set(request_ids):
            raise RuntimeError(f"K/V is owned by {sorted(self._rows)}, the requests are {sorted(request_ids)}")
        self._prefixes.check()
        rows = sorted([*self._rows.values(), *self._free_rows])
        if rows != list(range(len(self._table))):
            raise RuntimeError(f"rows of the table of slots, used and free: {rows} of {len(self._table)}")
        num_free, num_owned = self._numbers.tolist()
        owners = [self.slots(request_id) for request_id in self._rows]
        free = self._free[:num_free]
        if any(len(np.unique(slots)) != len(slots) for slots in owners):
            raise RuntimeError("requests own a K/V slot twice")
        request_refs = self._count("requests own", owners, self._request_refs)
        prefix_refs = self._count("prefixes keep", [node.slots for node in self._prefixes], self._prefix_refs)
        unused = (request_refs == 0) & (prefix_refs == 0)
        unused[DUMMY_SLOT] = False
        is_free = np.zeros(len(unused), np.bool_)  # not sorted, as a GPU may have millions of slots
        is_free[free] = True
        if not np.array_equal(is_free, unused) or np.count_nonzero(is_free) != num_free:
            raise RuntimeError(f"{num_free} K/V slots are free, {np.count_nonzero(unused)} are unused")
        if np.count_nonzero(request_refs) != num_owned:
            raise RuntimeError(f"requests own {np.count_nonzero(request_refs)} K/V slots, the books say {num_owned}")
        for request_id, row in self._rows.items():
            _, owned, committed, uploaded = self._books[row].tolist()
            if not max(committed, uploaded) <= owned <= self._table.shape[1]:
                raise RuntimeError(f"{request_id!r} committed {committed} of {owned} slots")

    def _count(self, what: str, holders: list[np.ndarray], booked: np.ndarray) -> np.ndarray:
        """Counts the references to every slot anew. Raises RuntimeError if the books or the holders are wrong."""
        held = np.concatenate([np.zeros(0, np.int32), *holders])
        counted = np.bincount(held, minlength=self.num_slots)
        if counted[DUMMY_SLOT] or not np.array_equal(counted, booked):
            raise RuntimeError(f"{what} {np.count_nonzero(counted != booked)} K/V slots otherwise than is booked")
        return counted
