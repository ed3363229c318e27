"""K/V memory of the GPU path: one slot a token, counted references, a table of each request's slots.

Torch-free: slots are numbers, the memory behind them is the backend's. Nothing is ever moved: accepted rows keep their
slots, a prefix hit shares the slots of the text that it begins like, and a fork those of the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchserve.attention.prefix_index import FEWEST_TOKENS, PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

DUMMY_SLOT = 0  # nobody's: where padding rows write


@dataclass(slots=True)
class _Request:
    """One row of the table: `owned` slots, the first `committed` of them written for good.

    promised: what was reserved when the request began; it is kept until it is used. uploaded: leading entries of the
    row that the device has.
    """

    row: int
    promised: int
    owned: int = 0
    committed: int = 0
    uploaded: int = 0


class SlotAllocator:
    """KVAllocator over slots 1 to total_tokens.

    A slot is owned while a request refers to it, cached while only kept prefixes do, and free otherwise. A request may
    own up to max_tokens slots. What a step reserved and commit() did not keep is free again, but for what was reserved
    when the request began: a prompt that was let in keeps its room.
    """

    def __init__(self, total_tokens: int, max_requests: int, max_tokens: int, bytes_per_token: int) -> None:
        self.bytes_per_token = bytes_per_token
        self._total = total_tokens
        self._owned = 0
        self._requests: dict[str, _Request] = {}
        self._table = np.zeros((max_requests, min(max_tokens, total_tokens)), np.int32)
        self._free_rows = list(range(max_requests))[::-1]
        # A stack: the lowest slots are on top at first, and what was given back last is taken first.
        self._free = np.arange(total_tokens, 0, -1, dtype=np.int32)
        self._num_free = total_tokens
        self._request_refs = np.zeros(total_tokens + 1, np.int32)
        self._prefix_refs = np.zeros(total_tokens + 1, np.int32)
        self._prefixes = PrefixIndex()
        self._kept: dict[int, np.ndarray] = {}  # slots, by handle of the index

    @property
    def num_slots(self) -> int:
        """Of the caches, the dummy slot included."""
        return self._total + 1

    @property
    def table_shape(self) -> tuple[int, int]:
        """Rows and columns of the table of slots; rows are added when more requests come than were foreseen."""
        rows, columns = self._table.shape
        return rows, columns

    @property
    def total_tokens(self) -> int:
        return self._total

    @property
    def free_tokens(self) -> int:
        return self._total - self._owned

    @property
    def cached_tokens(self) -> int:
        return self._total - self._owned - self._num_free

    def reservable_tokens(self, request_id: str) -> int:
        request = self._requests.get(request_id)
        owned, committed = (request.owned, request.committed) if request else (0, 0)
        return min(owned + self.free_tokens, self._table.shape[1]) - committed

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        if num_tokens > self.reservable_tokens(request_id):
            return False
        request = self._requests.get(request_id) or self._begin(request_id, num_tokens)
        missing = request.committed + num_tokens - request.owned
        if missing > 0:
            self._extend(request, missing)
        return True

    def _begin(self, request_id: str, num_tokens: int) -> _Request:
        if not self._free_rows:
            rows = len(self._table)
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._free_rows = list(range(rows, 2 * rows))[::-1]
        request = self._requests[request_id] = _Request(self._free_rows.pop(), num_tokens)
        return request

    def _extend(self, request: _Request, count: int) -> None:
        while self._num_free < count:
            self._drop(next(iter(self._prefixes)))
        self._num_free -= count
        slots = self._free[self._num_free : self._num_free + count][::-1]
        self._table[request.row, request.owned : request.owned + count] = slots
        self._request_refs[slots] = 1
        self._owned += count
        request.owned += count

    def commit_all(self, rows: Mapping[str, Sequence[int]]) -> None:
        for request_id, kept in rows.items():
            self.commit(request_id, kept)

    def commit(self, request_id: str, rows: Sequence[int]) -> None:
        request = self._requests[request_id]
        start, count = request.committed, len(rows)
        step = self._table[request.row, start : request.owned]
        moved = next((i for i, row in enumerate(rows) if row != i), count)
        if moved < count:
            others = np.delete(step, rows)
            step[:count] = step[rows]
            step[count:] = others
            request.uploaded = min(request.uploaded, start + moved)
        request.committed = start + count
        self._shrink(request, max(request.committed, request.promised))

    def _shrink(self, request: _Request, count: int) -> None:
        """Give up all but the first `count` slots; the others were reserved for rows and are nobody else's."""
        if count >= request.owned:
            return
        slots = self._table[request.row, count : request.owned]
        self._request_refs[slots] = 0
        self._owned -= len(slots)
        self._push(slots)
        request.owned = count
        request.uploaded = min(request.uploaded, count)

    def _push(self, slots: np.ndarray) -> None:
        self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)

    def touch(self, request_id: str) -> None:
        """Nothing: a device's memory is there from the start."""

    def release(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        slots = self._table[request.row, : request.owned]
        refs = self._request_refs[slots] - 1
        self._request_refs[slots] = refs
        unowned = slots[refs == 0]
        self._owned -= len(unowned)
        self._push(unowned[self._prefix_refs[unowned] == 0])
        self._free_rows.append(request.row)

    def retire(self, request_id: str, scope: Hashable, token_ids: Sequence[int]) -> None:
        request = self._requests[request_id]
        count = min(len(token_ids), request.committed)
        if count >= FEWEST_TOKENS:
            slots = self._table[request.row, :count].copy()
            self._prefix_refs[slots] += 1
            handle, gone = self._prefixes.add(scope, token_ids[:count])
            self._kept[handle] = slots
            for old in gone:
                self._let_go(old)
        self.release(request_id)

    def match_prefix(
        self, request_id: str, scope: Hashable, token_ids: Sequence[int], source_id: str = "", num_shared: int = 0
    ) -> int | None:
        handle, length = self._prefixes.match(scope, token_ids[:-1])
        if num_shared > length:
            return num_shared if self.fork(request_id, source_id, num_shared, len(token_ids)) else None
        self._prefixes.use(handle)
        shared = self._kept[handle][:length] if handle else np.zeros(0, np.int32)
        return length if self._begin_with(request_id, shared, len(token_ids)) else None

    def fork(self, request_id: str, source_id: str, num_shared: int, num_tokens: int) -> bool:
        committed = self._requests[source_id].committed
        if num_shared > committed:
            raise ValueError(f"num_shared = {num_shared}: {source_id!r} has committed {committed} tokens")
        return self._begin_with(request_id, self.slots(source_id)[:num_shared].copy(), num_tokens)

    def _begin_with(self, request_id: str, shared: np.ndarray, num_tokens: int) -> bool:
        """Reserve so many tokens, the first of them in slots that others have, committed; False when memory is out."""
        newly_owned = int(np.count_nonzero(self._request_refs[shared] == 0))
        missing = num_tokens - len(shared)
        if missing + newly_owned > self.free_tokens or num_tokens > self._table.shape[1]:
            return False
        request = self._begin(request_id, num_tokens)
        self._table[request.row, : len(shared)] = shared
        self._request_refs[shared] += 1
        self._owned += newly_owned
        request.owned = request.committed = len(shared)
        self._extend(request, missing)
        return True

    def forget_prefixes(self, scope: Hashable) -> None:
        for handle in self._prefixes.of_scope(scope):
            self._drop(handle)

    def _drop(self, handle: int) -> None:
        self._prefixes.remove(handle)
        self._let_go(handle)

    def _let_go(self, handle: int) -> None:
        slots = self._kept.pop(handle)
        refs = self._prefix_refs[slots] - 1
        self._prefix_refs[slots] = refs
        self._push(slots[(refs == 0) & (self._request_refs[slots] == 0)])

    def row(self, request_id: str) -> int:
        """The request's row in the table; it keeps it until it is released."""
        return self._requests[request_id].row

    def slots(self, request_id: str) -> np.ndarray:
        """int32: the request's slots in the order of its tokens, reserved ones included; valid until the next call."""
        request = self._requests[request_id]
        return self._table[request.row, : request.owned]

    def changes(self, request_ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """What the device's copy of the table lacks of these requests; from now on it is taken to have it.

        (int64 places in the flattened table, int32 slots), both [num_changes].
        """
        places, slots, width = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], self._table.shape[1]
        for request_id in request_ids:
            request = self._requests[request_id]
            if request.uploaded < request.owned:
                first = request.row * width
                places.append(np.arange(first + request.uploaded, first + request.owned))
                slots.append(self._table[request.row, request.uploaded : request.owned])
                request.uploaded = request.owned
        return np.concatenate(places), np.concatenate(slots)

    def check_integrity(self, request_ids: Collection[str]) -> None:
        if set(self._requests) != set(request_ids):
            raise RuntimeError(f"K/V is owned by {sorted(self._requests)}, the requests are {sorted(request_ids)}")
        if set(self._kept) != set(self._prefixes):
            raise RuntimeError(f"K/V is kept of {sorted(self._kept)}, the index has {sorted(self._prefixes)}")
        rows = sorted([request.row for request in self._requests.values()] + self._free_rows)
        if rows != list(range(len(self._table))):
            raise RuntimeError(f"rows of the table of slots, used and free: {rows} of {len(self._table)}")
        owners = [self.slots(request_id) for request_id in self._requests]
        free = self._free[: self._num_free]
        request_refs = self._count("requests own", owners, self._request_refs)
        prefix_refs = self._count("prefixes keep", list(self._kept.values()), self._prefix_refs)
        unused = (request_refs == 0) & (prefix_refs == 0)
        unused[DUMMY_SLOT] = False
        if not np.array_equal(np.sort(free), np.flatnonzero(unused)):
            raise RuntimeError(f"{self._num_free} K/V slots are free, {np.count_nonzero(unused)} are unused")
        if np.count_nonzero(request_refs) != self._owned:
            raise RuntimeError(f"requests own {np.count_nonzero(request_refs)} K/V slots, the books say {self._owned}")
        for handle, slots in self._kept.items():
            if self._prefixes.num_tokens(handle) != len(slots):
                raise RuntimeError(f"prefix {handle} has {len(slots)} slots for its tokens")
        for request_id, request in self._requests.items():
            if not max(request.committed, request.uploaded) <= request.owned <= self._table.shape[1]:
                raise RuntimeError(f"{request_id!r} committed {request.committed} of {request.owned} slots")

    def _count(self, what: str, holders: list[np.ndarray], booked: np.ndarray) -> np.ndarray:
        """References to every slot, counted anew; raises RuntimeError where the books or the holders are wrong."""
        if any(len(np.unique(slots)) != len(slots) for slots in holders):
            raise RuntimeError(f"{what} a K/V slot twice")
        held = np.concatenate([np.zeros(0, np.int32), *holders])
        counted = np.bincount(held, minlength=self.num_slots)
        if counted[DUMMY_SLOT] or not np.array_equal(counted, booked):
            raise RuntimeError(f"{what} {np.count_nonzero(counted != booked)} K/V slots otherwise than is booked")
        return counted
