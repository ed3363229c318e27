"""K/V memory of the CPU path: one contiguous head-major slab per request, grown by extents.

A slab holds, for every layer, K and V as planes [num_kv_heads, capacity, dim]; planes of equal shape are stacked in
one array, so that growing a slab costs one operation a shape, not one a layer. Accepted rows of all requests move in
one compiled call.
"""

from __future__ import annotations

from itertools import accumulate, chain, starmap
from typing import TYPE_CHECKING

import numpy as np

from batchserve.errors import is_out_of_memory
from batchserve.kv.prefix_index import MIN_TOKENS, PrefixIndex
from batchserve.kv.row_moves import UNIT, move_rows
from batchserve.native import pages
from batchserve.native.dtypes import HELD_AS, item_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from batchserve.attention.base import LayerShape

EXTENT = 64  # tokens
# Each time a slab grows it is copied: so by half of what it has or one extent more than it needs, unless that is more
# than an 8th of what is free. It begins with one extent more than it needs, unless that is more than a 1024th of what
# stays free: who begins may keep nobody else from beginning.
GROWTH, PLENTY, PLENTY_AT_FIRST = 2, 8, 1024


class _Slab:
    """The memory of one request."""

    __slots__ = ("addresses", "addresses_at", "capacity", "num_committed", "planes", "stacks")

    def __init__(self) -> None:
        self.capacity = 0
        self.num_committed = 0
        self.stacks: list[np.ndarray] = []  # [num_planes, num_kv_heads, capacity, dim]
        self.planes: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # (K, V) of layers that were asked for
        self.addresses = np.zeros((0, 2), dtype=np.int64)  # of the planes, for compiled kernels
        self.addresses_at = 0  # where these are


_NO_SLAB = _Slab()


class SlabAllocator:
    """KVAllocator over slabs. The budget is in tokens; extents are reserved whole, so nothing is hidden by rounding.

    The budget is what slabs hold between two calls: while one grows, its old planes live on until they are copied, so
    for that moment memory exceeds the budget by at most that request's own part. So do those of an ended request that
    were given up while somebody is about to copy from them.

    Slabs of ended requests may be kept as a cache of prefixes: memory that nobody owns, given up when it is needed, the
    least recently used first. A hit copies what it takes over, and so does a fork.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: str, total_tokens: int) -> None:
        self.layers, self.dtype = tuple(layers), dtype
        self._budget = self._total = total_tokens // EXTENT * EXTENT
        self._owned = 0
        self._slabs: dict[str, _Slab] = {}
        self._prefixes = PrefixIndex()
        self._kept: dict[int, _Slab] = {}  # by handle of the index
        self._cached = 0  # tokens that kept slabs hold
        self._stack_shapes, self._plane_index = _plan_stacks(layers)
        # A plane's address is a sum: of each stack's address and of its bytes a plane, so many times.
        self._planes_in = np.zeros((*self._plane_index.shape[:2], 2 * len(self._stack_shapes)), np.int64)
        stack, place = np.moveaxis(self._plane_index, 2, 0)[..., None]
        np.put_along_axis(self._planes_in, 2 * stack, 1, 2)
        np.put_along_axis(self._planes_in, 2 * stack + 1, place, 2)
        units = item_bytes(dtype) // UNIT.itemsize
        sizes = [(s.num_kv_heads, dim * units) for s in layers for dim in (s.key_dim, s.value_dim)]
        self._plane_sizes = np.array(sizes, np.int64)  # heads and units of a token, as move_rows has them
        self.num_layers = len(layers)
        self.bytes_per_token = bytes_per_token(layers, dtype)
        self.num_kv_heads = max(layer.num_kv_heads for layer in layers)
        self.min_kv_heads = min(layer.num_kv_heads for layer in layers)

    @property
    def total_tokens(self) -> int:
        return self._total

    @property
    def free_tokens(self) -> int:
        return self._total - self._owned

    @property
    def cached_tokens(self) -> int:
        return self._cached

    def reservable_tokens(self, request_ids: Sequence[str]) -> list[int]:
        free, slabs = self.free_tokens // EXTENT * EXTENT, self._slabs
        return [(slab := slabs.get(each, _NO_SLAB)).capacity - slab.num_committed + free for each in request_ids]

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        slab = self._slabs.get(request_id)
        owned, committed = (slab.capacity, slab.num_committed) if slab else (0, 0)
        if committed + num_tokens <= owned:
            return True
        wanted = _rounded(committed + num_tokens)
        if wanted - owned > self.free_tokens:
            return False
        roomy = max(wanted + EXTENT, owned + owned // GROWTH // EXTENT * EXTENT)
        has_plenty = roomy - owned <= self.free_tokens // PLENTY
        if slab is None:
            has_plenty = (self.free_tokens - wanted) // PLENTY_AT_FIRST >= EXTENT
        if has_plenty:
            wanted = roomy
        self._make_room(wanted - owned)
        slab = slab or _Slab()
        if not self._can_resize(slab, wanted):
            return False
        self._slabs[request_id] = slab
        self._owned += wanted - owned
        return True

    def reserve_all(self, request_ids: Sequence[str], num_tokens: Sequence[int]) -> bool:
        slabs = self._slabs
        short = [  # only these have to be looked at again: each step asks for every request
            (each, count)
            for each, count in zip(request_ids, num_tokens, strict=True)
            if (slab := slabs.get(each, _NO_SLAB)).num_committed + count > slab.capacity
        ]
        return all(starmap(self.reserve, short))

    def reclaim(self, num_needed: Mapping[str, int]) -> bool:
        slabs = [(self._slabs[request_id], needed) for request_id, needed in num_needed.items()]
        spare = [slab.capacity - _rounded(slab.num_committed + needed) for slab, needed in slabs]
        most = max(spare, default=0)
        if most <= 0:
            return False
        slab, _ = slabs[spare.index(most)]
        if not self._can_resize(slab, slab.capacity - most):
            return False
        self._owned -= most
        return True

    def _can_resize(self, slab: _Slab, capacity: int) -> bool:
        """Resize a slab; False if the system has no memory for that, even without what is cached."""
        while True:
            try:
                self._resize(slab, capacity)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                had_cached = bool(self._kept)
                self.give_way()
                if not had_cached:
                    return False
            else:
                return True

    def _resize(self, slab: _Slab, capacity: int) -> None:
        kept = slab.num_committed
        # All of them or none: the system may have no memory for one.
        resized = [pages.zeros((n, heads, capacity, dim), HELD_AS[self.dtype]) for n, heads, dim in self._stack_shapes]
        if kept:
            for new, old in zip(resized, slab.stacks, strict=True):
                new[:, :, :kept] = old[:, :, :kept]
        slab.stacks, slab.capacity = resized, capacity
        slab.planes.clear()
        # Not asked of the planes one by one: a model may have hundreds, and a step waits for this.
        where = [each for stack in slab.stacks for each in (stack.ctypes.data, stack.strides[0])]
        slab.addresses = self._planes_in @ np.array(where, np.int64)
        slab.addresses_at = slab.addresses.ctypes.data

    def commit(self, request_id: str, rows: Sequence[int]) -> None:
        self.commit_all([request_id], [len(rows)], {request_id: rows})

    def commit_all(self, request_ids: Sequence[str], counts: Sequence[int], moved: Mapping[str, Sequence[int]]) -> None:
        if moved:
            self._move(moved)
        slabs = self._slabs
        for request_id, count in zip(request_ids, counts, strict=True):
            slabs[request_id].num_committed += count

    def _move(self, moved: Mapping[str, Sequence[int]]) -> None:
        """Move rows to where the next committed tokens are."""
        places = []
        for request_id, rows in moved.items():
            slab = self._slabs[request_id]
            if len(rows) and slab.num_committed + rows[-1] >= slab.capacity:  # compiled code would not notice
                raise IndexError(f"rows of {request_id!r}: {rows[-1]} was not reserved")
            places.append((slab.addresses_at, slab.capacity, slab.num_committed))
        starts = np.array([0, *accumulate(map(len, moved.values()))])
        move_rows(
            np.array(places), self._plane_sizes, starts, np.array([*chain.from_iterable(moved.values())], np.int64)
        )

    def move_rows(self, request_id: str, first: int, rows: Sequence[int]) -> None:
        """Moves rows of a step, counted after the committed ones, in ascending order, to `first` and what follows."""
        self._move({request_id: [*range(first), *rows]})

    def read_rows(self, request_id: str, first: int, count: int) -> bytes:
        """Returns K and V of rows that follow the committed ones, for write_rows of an allocator like this one."""
        slab = self._slabs[request_id]
        start = slab.num_committed + first
        return b"".join(stack[:, :, start : start + count].tobytes() for stack in slab.stacks)

    def write_rows(self, request_id: str, first: int, data: bytes) -> None:
        """Overwrites K and V of rows that follow the committed ones, and were reserved."""
        slab, at = self._slabs[request_id], 0
        start = slab.num_committed + first
        count = len(data) // self.bytes_per_token
        if start + count > slab.capacity:
            raise IndexError(f"rows of {request_id!r}: {first + count} were not reserved")
        for stack in slab.stacks:
            shape = (*stack.shape[:2], count, stack.shape[3])
            size = stack.itemsize * shape[0] * shape[1] * shape[2] * shape[3]
            stack[:, :, start : start + count] = np.frombuffer(data[at : at + size], stack.dtype).reshape(shape)
            at += size

    def touch(self, request_id: str) -> None:
        for stack in self._slabs[request_id].stacks:
            stack.fill(0)

    def release(self, request_id: str) -> None:
        slab = self._slabs.pop(request_id, None)
        if slab is not None:
            self._owned -= slab.capacity
            self._recover()

    def _recover(self) -> None:
        """Where nobody owns anything, the system is believed to have all of the budget again."""
        if not self._slabs:
            self._total = self._budget

    def retire(self, request_id: str, scope: Hashable, token_ids: Sequence[int]) -> None:
        slab = self._slabs[request_id]
        count = min(len(token_ids), slab.num_committed)
        if count < MIN_TOKENS:
            self.release(request_id)
            return
        del self._slabs[request_id]
        self._owned -= slab.capacity
        self._cached += slab.capacity
        handle, gone = self._prefixes.add(scope, token_ids[:count])
        self._kept[handle] = slab
        self._recover()
        for old in gone:
            self._cached -= self._kept.pop(old).capacity

    def match_prefix(
        self, request_id: str, scope: Hashable, token_ids: Sequence[int], source_id: str = "", num_shared: int = 0
    ) -> int | None:
        if len(token_ids) > self.reservable_tokens([request_id])[0]:
            return None
        handle, length = self._prefixes.match(scope, token_ids[:-1])
        if num_shared > length:
            return num_shared if self.fork(request_id, source_id, num_shared, len(token_ids)) else None
        # What is used now goes last, if others are not enough: and stays alive here until it is copied.
        self._prefixes.use(handle)
        is_begun = self._begin_with(request_id, self._kept.get(handle), length, len(token_ids))
        return length if is_begun else None

    def fork(self, request_id: str, source_id: str, num_shared: int, num_tokens: int) -> bool:
        source = self._slabs[source_id]
        if num_shared > source.num_committed:
            raise ValueError(f"num_shared = {num_shared}: {source_id!r} has committed {source.num_committed} tokens")
        if num_tokens > self.reservable_tokens([request_id])[0]:
            return False
        return self._begin_with(request_id, source, num_shared, num_tokens)

    def _begin_with(self, request_id: str, source: _Slab | None, num_shared: int, num_tokens: int) -> bool:
        """Reserve, and commit a copy of what another slab begins with; False if the system has no memory."""
        if not self.reserve(request_id, num_tokens):
            return False
        slab = self._slabs[request_id]
        if source is not None:
            for stack, others in zip(slab.stacks, source.stacks, strict=True):
                stack[:, :, :num_shared] = others[:, :, :num_shared]
        slab.num_committed = num_shared
        return True

    def give_way(self) -> None:
        for handle in [*self._kept]:
            self._drop(handle)
        self._total = self._owned or self._budget

    def forget_prefixes(self, scope: Hashable) -> None:
        for handle in self._prefixes.of_scope(scope):
            self._drop(handle)

    def _make_room(self, num_tokens: int) -> None:
        while self._total - self._owned - self._cached < num_tokens:
            self._drop(next(iter(self._prefixes)))

    def _drop(self, handle: int) -> None:
        self._prefixes.remove(handle)
        self._cached -= self._kept.pop(handle).capacity

    def planes(self, request_id: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """(K, V) of one layer, each [num_kv_heads, capacity, dim], as dtypes.HELD_AS."""
        slab = self._slabs[request_id]
        if layer not in slab.planes:
            (k_stack, k), (v_stack, v) = self._plane_index[layer].tolist()
            slab.planes[layer] = slab.stacks[k_stack][k], slab.stacks[v_stack][v]
        return slab.planes[layer]

    def slabs(self, request_ids: Sequence[str]) -> np.ndarray:
        """int64 [num_requests, 2]: where the addresses of each request's planes are (int64 [num_layers, 2], K and V),
        and its capacity; valid until the next reserve.
        """
        slabs = [self._slabs[request_id] for request_id in request_ids]
        return np.array([(slab.addresses_at, slab.capacity) for slab in slabs], np.int64).reshape(-1, 2)

    def check_integrity(self, request_ids: Collection[str]) -> None:
        if set(self._slabs) != set(request_ids):
            raise RuntimeError(f"K/V is owned by {sorted(self._slabs)}, the requests are {sorted(request_ids)}")
        for name, slabs, booked in (("owned", self._slabs, self._owned), ("cached", self._kept, self._cached)):
            held = sum(stack.nbytes for slab in slabs.values() for stack in slab.stacks)
            if held != booked * self.bytes_per_token:
                raise RuntimeError(f"{name} K/V slabs hold {held} bytes, the books say {booked * self.bytes_per_token}")
        if not 0 <= self._owned <= self._owned + self._cached <= self._total:
            raise RuntimeError(f"K/V owned = {self._owned} and cached = {self._cached} tokens of {self._total}")
        if set(self._kept) != set(self._prefixes):
            raise RuntimeError(f"K/V is kept of {sorted(self._kept)}, the index has {sorted(self._prefixes)}")
        for handle, slab in self._kept.items():
            if self._prefixes.num_tokens(handle) > slab.num_committed:
                raise RuntimeError(f"prefix {handle} has fewer K/V than tokens")
        for request_id, slab in self._slabs.items():
            if slab.num_committed > slab.capacity:
                raise RuntimeError(f"{request_id!r} committed {slab.num_committed} of {slab.capacity} tokens")


def _rounded(num_tokens: int) -> int:
    """Tokens of as many extents as that takes."""
    return -(-num_tokens // EXTENT) * EXTENT


def bytes_per_token(layers: Sequence[LayerShape], dtype: str) -> int:
    """Bytes of K and V that one token takes in all layers."""
    return sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers) * item_bytes(dtype)


def _plan_stacks(
    layers: Sequence[LayerShape],
) -> tuple[list[tuple[int, int, int]], np.ndarray]:
    """(count, heads, dim) of each stack; and where K and V planes are, int64 [num_layers, 2, 2]: the stack, the place
    in it.
    """
    stacks: dict[tuple[int, int], int] = {}
    counts: list[int] = []

    def place(heads: int, dim: int) -> tuple[int, int]:
        stack = stacks.setdefault((heads, dim), len(stacks))
        if stack == len(counts):
            counts.append(0)
        counts[stack] += 1
        return stack, counts[stack] - 1

    index = [(place(s.num_kv_heads, s.key_dim), place(s.num_kv_heads, s.value_dim)) for s in layers]
    return [(counts[i], heads, dim) for (heads, dim), i in stacks.items()], np.array(index, np.int64).reshape(-1, 2, 2)
