"""Slabs under any order of reserve, write, commit and release: books exact, contents kept, budget never exceeded."""

from __future__ import annotations

import ctypes
import random
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchserve.attention.base import LayerShape
from batchserve.kv.slab import EXTENT, SlabAllocator, bytes_per_token
from batchserve.native import pages
from tests.factories import dtype_name, examples, tensor_planes

LAYERS = [LayerShape(2, 4, 4), LayerShape(1, 4, 8), LayerShape(2, 4, 4)]  # stacked planes and odd ones
TOTAL = 6 * EXTENT + 17  # not a whole number of extents
IDS = st.sampled_from(["a", "b", "c", "d"])
OF_TOKEN = [
    [
        np.arange(shape.num_kv_heads * dim, dtype=np.float32).reshape(shape.num_kv_heads, 1, dim)
        for dim in (shape.key_dim, shape.value_dim)
    ]
    for shape in LAYERS
]  # by layer, K and V


def contents_of(tokens: np.ndarray, layer: int, plane: int) -> np.ndarray:
    """[heads, tokens, dim], different for every token, layer, K or V, head and channel; exact in fp32."""
    of_token = OF_TOKEN[layer][plane]
    return of_token + np.float32(32) * (plane + 2 * (layer + 3 * tokens.astype(np.float32)[:, None]))


class SlabMachine(RuleBasedStateMachine):
    """The model: each request's committed tokens in order, and how many tokens of memory it must own.

    A subclass for another allocator makes that one, and says how its memory is counted and where K and V are.
    """

    allocator: Any
    unit = EXTENT  # tokens that are reserved together
    total = TOTAL // EXTENT * EXTENT

    def __init__(self) -> None:
        super().__init__()
        self.allocator = self.make_allocator()
        self.committed: dict[str, list[int]] = {}
        self.owned: dict[str, int] = {}
        self.reserved: dict[str, int] = {}  # rows behind the committed ones that may be written now
        self.tokens = count(1)
        self.retired: dict[str, list[list[int]]] = {"s": [], "t": []}  # by scope; the allocator may have dropped some

    def make_allocator(self) -> Any:
        return SlabAllocator(LAYERS, "float32", TOTAL)

    def places(self, request_id: str, layer: int) -> list[torch.Tensor]:
        """K and V of a layer as the request has them, [num_kv_heads, tokens, dim], to be written to."""
        planes = tensor_planes(self.allocator, request_id, layer)
        assert all(plane.is_contiguous() for plane in planes), "one head's keys must lie one behind the other"
        return planes

    def write(self, request_id: str, layer: int, plane: int, places: slice, contents: torch.Tensor) -> None:
        """contents: [num_kv_heads, tokens, dim]."""
        self.places(request_id, layer)[plane][:, places] = contents

    @property
    def free(self) -> int:
        return self.total - sum(self.owned.values())

    def kept_by_commit(self, request_id: str) -> int:
        """What the request owns from now on."""
        return self.owned[request_id]

    def may_begin(self, prompt: list[int], free: int, cached: int | None) -> bool:
        """Whether a beginning with this outcome is right, with so much free before it."""
        return (cached is None) == (self.rounded(len(prompt)) > free)

    def began(self, request_id: str, num_tokens: int) -> None:
        """A request that owned nothing has reserved so many tokens."""

    def rounded(self, tokens: int) -> int:
        return -(-tokens // self.unit) * self.unit

    @rule(request_id=IDS, rows=st.one_of(st.integers(1, 8), st.integers(50, 260)))
    def reserve(self, request_id: str, rows: int) -> None:
        wanted = self.rounded(len(self.committed.get(request_id, [])) + rows)
        fits = wanted - self.owned.get(request_id, 0) <= self.free
        reservable = self.allocator.reservable_tokens([request_id])[0]
        assert (rows <= reservable) == fits
        assert self.allocator.reserve(request_id, rows) == fits
        if fits:
            if request_id not in self.committed:
                self.began(request_id, rows)
            self.committed.setdefault(request_id, [])
            self.owned[request_id] = max(wanted, self.owned.get(request_id, 0))
            self.reserved[request_id] = max(rows, self.reserved.get(request_id, 0))

    @precondition(lambda self: any(self.reserved.values()))
    @rule(data=st.data())
    def write_and_commit(self, data: st.DataObject) -> None:
        """A step: every reserved row is written, any ascending choice of them is kept."""
        request_id = data.draw(st.sampled_from(sorted(r for r, rows in self.reserved.items() if rows)))
        rows = self.reserved[request_id]
        kept = data.draw(st.one_of(st.just(list(range(rows))), st.sets(st.integers(0, rows - 1)).map(sorted)))
        start = len(self.committed[request_id])
        written = [next(self.tokens) for _ in range(rows)]
        tokens = np.array(written)
        for layer in range(len(LAYERS)):
            for plane in range(2):
                contents = torch.from_numpy(contents_of(tokens, layer, plane))
                self.write(request_id, layer, plane, slice(start, start + rows), contents)
        self.allocator.commit(request_id, kept)
        self.committed[request_id] += [written[row] for row in kept]
        self.reserved[request_id] = 0
        self.owned[request_id] = self.kept_by_commit(request_id)

    @rule()
    def reclaim(self) -> None:
        """Whatever was reserved for rows that were not kept can be taken, and no more."""
        while self.allocator.reclaim(self.reserved):
            pass
        for request_id, rows in self.reserved.items():
            self.owned[request_id] = self.kept_by_reclaim(request_id, rows)

    def kept_by_reclaim(self, request_id: str, num_needed: int) -> int:
        return self.rounded(len(self.committed[request_id]) + num_needed)

    @rule(request_id=IDS)
    def release(self, request_id: str) -> None:
        self.allocator.release(request_id)  # also of one that has nothing
        for books in (self.committed, self.owned, self.reserved):
            books.pop(request_id, None)

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), scope=st.sampled_from(["s", "t"]), dropped=st.integers(0, 3))
    def retire(self, data: st.DataObject, scope: str, dropped: int) -> None:
        """An ended request leaves its K/V behind, but for some last tokens that it was not given."""
        request_id = data.draw(st.sampled_from(sorted(self.committed)))
        tokens = self.committed[request_id]
        tokens = tokens[: len(tokens) - dropped]
        self.allocator.retire(request_id, scope, tokens)
        self.retired[scope].append(tokens)
        for books in (self.committed, self.owned, self.reserved):
            books.pop(request_id, None)

    @precondition(lambda self: len(self.committed) < 4)
    @rule(data=st.data(), scope=st.sampled_from(["s", "t"]), more=st.integers(1, 40))
    def begin_with_what_is_cached(self, data: st.DataObject, scope: str, more: int) -> None:
        request_id = next(name for name in "abcd" if name not in self.committed)
        known = [tokens for texts in self.retired.values() for tokens in texts] or [[]]
        base = data.draw(st.sampled_from(known))
        prompt = base[: data.draw(st.integers(0, len(base)))] + [next(self.tokens) for _ in range(more)]
        free = self.free
        cached = self.allocator.match_prefix(request_id, scope, prompt)
        assert self.may_begin(prompt, free, cached)
        if cached is None:
            return
        longest = max((_common(prompt, tokens) for tokens in self.retired[scope]), default=0)
        assert cached <= min(longest, len(prompt) - 1), "more than the scope's requests ever had in common with it"
        self.began(request_id, len(prompt))
        self.committed[request_id] = prompt[:cached]
        self.owned[request_id] = self.rounded(len(prompt))
        self.reserved[request_id] = len(prompt) - cached

    @precondition(lambda self: 0 < len(self.committed) < 4)
    @rule(data=st.data(), more=st.integers(1, 260))
    def fork(self, data: st.DataObject, more: int) -> None:
        """A request begins with what another one has computed; both go on as if they were alone."""
        by_match = data.draw(st.booleans())  # of a scope that nothing was left in
        request_id = next(name for name in "abcd" if name not in self.committed)
        source = data.draw(st.sampled_from(sorted(self.committed)))
        shared = self.committed[source][: data.draw(st.integers(0, len(self.committed[source])))]
        num_tokens, free = len(shared) + more, self.free
        if by_match and shared:
            tokens = shared + [next(self.tokens) for _ in range(more)]
            is_forked = self.allocator.match_prefix(request_id, "u", tokens, source, len(shared)) == len(shared)
        else:
            is_forked = self.allocator.fork(request_id, source, len(shared), num_tokens)
        assert is_forked == (self.rounded(num_tokens - self.num_shared_by_fork(len(shared))) <= free)
        if is_forked:
            self.began(request_id, num_tokens)
            self.committed[request_id], self.reserved[request_id] = shared, more
            self.owned[request_id] = self.rounded(num_tokens)

    def num_shared_by_fork(self, num_tokens: int) -> int:
        """How many of the tokens that a fork begins with take no memory of their own."""
        return 0

    @rule(scope=st.sampled_from(["s", "t"]))
    def forget(self, scope: str) -> None:
        self.allocator.forget_prefixes(scope)
        self.retired[scope].clear()

    @invariant()
    def books_are_exact(self) -> None:
        self.allocator.check_integrity(set(self.owned))
        assert self.allocator.total_tokens == self.total
        assert self.allocator.free_tokens == self.free >= 0

    @invariant()
    def committed_contents_are_kept_in_order(self) -> None:
        for request_id, tokens in self.committed.items():
            for layer in range(len(LAYERS)):
                for plane, tensor in enumerate(self.places(request_id, layer)):
                    assert tensor.shape[1] == self.owned[request_id]
                    found = tensor[:, : len(tokens)].numpy()
                    assert np.array_equal(found, contents_of(np.array(tokens), layer, plane))

    def teardown(self) -> None:
        for request_id in list(self.owned):
            self.release(request_id)
        self.allocator.check_integrity(())
        assert self.allocator.free_tokens == self.allocator.total_tokens


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


TestSlabs = SlabMachine.TestCase
TestSlabs.settings = examples(140, stateful_step_count=100)  # some 80 operations each: 10,000 and more


@pytest.mark.slow
class TestSlabsAtLength(SlabMachine.TestCase):
    settings = examples(300, stateful_step_count=60)  # 18,000 operations


def keep(allocator: SlabAllocator, request_id: str, scope: str, tokens: list[int]) -> None:
    """A request computes these tokens, each with its id as K/V, and ends."""
    assert allocator.reserve(request_id, len(tokens))
    for layer in range(len(LAYERS)):
        for plane in allocator.planes(request_id, layer):
            plane[:, : len(tokens)] = np.array(tokens, np.float32)[None, :, None]
    allocator.commit(request_id, range(len(tokens)))
    allocator.retire(request_id, scope, tokens)


def test_a_prompt_begins_with_the_longest_prefix_of_its_own_scope() -> None:
    allocator = SlabAllocator(LAYERS, "float32", 20 * EXTENT)
    keep(allocator, "a", "mine", [*range(100), 7])
    keep(allocator, "b", "mine", [*range(120), 8])
    keep(allocator, "c", "theirs", list(range(150)))
    assert allocator.match_prefix("d", "mine", list(range(200))) == 120
    assert allocator.planes("d", 0)[0][0, :120, 0].tolist() == list(range(120))
    assert allocator.match_prefix("e", "nobody's", list(range(200))) == 0
    assert allocator.match_prefix("f", "mine", list(range(100))) == 99, "one token is left to be computed"
    assert allocator.cached_tokens == 2 * EXTENT + 2 * EXTENT + 3 * EXTENT
    allocator.check_integrity({"d", "e", "f"})


def test_cached_prefixes_go_when_memory_is_needed_the_least_recently_used_first() -> None:
    allocator = SlabAllocator(LAYERS, "float32", 6 * EXTENT)
    for name, base in (("a", 0), ("b", 1000), ("c", 2000)):
        keep(allocator, name, "s", list(range(base, base + 2 * EXTENT)))
    assert allocator.free_tokens == 6 * EXTENT
    assert allocator.cached_tokens == 6 * EXTENT
    assert allocator.match_prefix("x", "s", [*range(EXTENT), 5, 5]) == EXTENT  # a is used; b goes for it
    allocator.release("x")
    assert allocator.match_prefix("y", "s", list(range(1000, 1000 + EXTENT))) == 0
    allocator.release("y")
    assert allocator.match_prefix("z", "s", list(range(EXTENT))) == EXTENT - 1
    assert allocator.reserve("w", 5 * EXTENT)
    assert allocator.cached_tokens == 0
    allocator.check_integrity({"z", "w"})


def test_a_longer_text_replaces_its_own_beginning_in_the_cache() -> None:
    allocator = SlabAllocator(LAYERS, "float32", 20 * EXTENT)
    keep(allocator, "a", "s", list(range(100)))
    keep(allocator, "b", "t", list(range(100)))
    keep(allocator, "c", "s", list(range(200)))
    assert allocator.cached_tokens == 2 * EXTENT + 4 * EXTENT
    allocator.forget_prefixes("s")
    assert allocator.cached_tokens == 2 * EXTENT
    assert allocator.match_prefix("d", "s", list(range(100))) == 0


def test_nobody_forks_what_is_not_committed() -> None:
    allocator = SlabAllocator(LAYERS, "float32", 20 * EXTENT)
    assert allocator.reserve("a", 30)
    allocator.commit("a", range(20))
    with pytest.raises(ValueError, match="num_shared = 21: 'a' has committed 20"):
        allocator.fork("b", "a", 21, 40)
    allocator.check_integrity({"a"})


def test_memory_is_reserved_by_the_extent_and_never_for_the_whole_context() -> None:
    allocator = SlabAllocator(LAYERS, "bfloat16", 10 * EXTENT)
    assert allocator.reserve("a", 1)
    assert allocator.free_tokens == 9 * EXTENT
    assert allocator.reserve("a", EXTENT)  # the same extent
    assert allocator.free_tokens == 9 * EXTENT
    assert allocator.reserve("a", EXTENT + 1)
    assert allocator.free_tokens == 8 * EXTENT


def test_to_begin_takes_no_more_than_is_needed_and_to_grow_a_little_more() -> None:
    allocator = SlabAllocator(LAYERS, "float32", 100 * EXTENT)
    assert all(allocator.reserve(str(i), EXTENT) for i in range(50))
    assert allocator.free_tokens == 50 * EXTENT
    assert allocator.reserve("0", EXTENT + 1)
    assert allocator.free_tokens == 48 * EXTENT
    assert all(allocator.reserve(str(i), EXTENT) for i in range(50, 98))
    allocator.check_integrity({str(i) for i in range(98)})


def test_where_memory_is_plentiful_a_request_begins_with_room_for_its_answer() -> None:
    allocator = SlabAllocator([LayerShape(1, 8, 8)], "float32", 1100 * EXTENT)
    assert allocator.reserve("long", 30 * EXTENT)
    assert allocator.free_tokens == (1100 - 31) * EXTENT
    assert allocator.reserve("longer", 46 * EXTENT)
    assert allocator.free_tokens == (1100 - 31 - 46) * EXTENT, "1,023 are left: an extent more is too much"
    assert allocator.reserve("short", 1)
    assert allocator.free_tokens == (1100 - 31 - 46 - 1) * EXTENT
    allocator.check_integrity({"long", "longer", "short"})


@pytest.mark.parametrize("seed", range(4))
def test_addresses_are_those_of_the_planes_whatever_shapes_layers_have(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = [LayerShape(*(int(size) for size in rng.integers(1, 4, 3))) for _ in range(7)]
    allocator = SlabAllocator(layers, "float32", 8 * EXTENT)
    for num_tokens in (1, EXTENT + 1):
        assert allocator.reserve("a", num_tokens)
        where, capacity = allocator.slabs(["a"])[0]
        addresses = np.ctypeslib.as_array((ctypes.c_int64 * 14).from_address(int(where))).reshape(7, 2)
        for layer in range(7):
            planes = allocator.planes("a", layer)
            assert [plane.ctypes.data for plane in planes] == addresses[layer].tolist()
            assert [plane.shape[1] for plane in planes] == [capacity, capacity]


def test_bytes_per_token_are_those_of_k_and_v_in_all_layers() -> None:
    assert bytes_per_token(LAYERS, "bfloat16") == 2 * (2 * 8 + 1 * 12 + 2 * 8)
    assert bytes_per_token(LAYERS, "float32") == 2 * bytes_per_token(LAYERS, "bfloat16")


def test_a_refused_reservation_changes_nothing() -> None:
    allocator = SlabAllocator(LAYERS, "float32", 2 * EXTENT)
    assert allocator.reserve("a", 10)
    assert not allocator.reserve("b", EXTENT + 1)
    assert not allocator.reserve("a", 2 * EXTENT + 1)
    allocator.check_integrity({"a"})
    assert allocator.reserve("b", EXTENT)


def test_what_the_system_has_no_memory_for_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = SlabAllocator(LAYERS, "float32", 20 * EXTENT)
    assert allocator.reserve("a", 10)
    allocator.commit("a", range(10))
    left, zeros = [True], pages.zeros  # for the planes of one shape of two

    def scarce(*arguments: Any) -> np.ndarray:
        if not left:
            raise MemoryError
        left.pop()
        return zeros(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(pages, "zeros", scarce)
        assert not allocator.reserve("a", 2 * EXTENT)
        assert not allocator.reclaim({"a": -10})
        assert not allocator.reserve("new", 10)
    allocator.check_integrity({"a"})
    assert allocator.free_tokens == 0, "the system has less than was planned with"
    assert not allocator.reserve("a", 2 * EXTENT)
    allocator.release("a")
    assert allocator.free_tokens == 20 * EXTENT
    assert allocator.reserve("a", 2 * EXTENT)


def test_what_is_cached_is_given_up_where_the_system_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = SlabAllocator(LAYERS, "float32", 20 * EXTENT)
    assert allocator.reserve("a", EXTENT)
    allocator.commit("a", range(EXTENT))
    allocator.retire("a", "s", [*range(EXTENT)])
    zeros = pages.zeros

    def scarce(*arguments: Any) -> np.ndarray:
        if allocator.cached_tokens:
            raise MemoryError
        return zeros(*arguments)

    monkeypatch.setattr(pages, "zeros", scarce)
    assert allocator.reserve("b", EXTENT)
    allocator.check_integrity({"b"})


def test_check_integrity_finds_leaked_and_lost_memory() -> None:
    allocator = SlabAllocator(LAYERS, "float32", 4 * EXTENT)
    allocator.reserve("leaked", 5)
    with pytest.raises(RuntimeError, match="leaked"):
        allocator.check_integrity(())
    with pytest.raises(RuntimeError, match="lost"):
        allocator.check_integrity({"leaked", "lost"})
    allocator.check_integrity({"leaked"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_many_requests_move_in_one_call(dtype: torch.dtype) -> None:
    """Layers of different shapes, slabs of different sizes, some requests of which nothing moves or nothing is kept."""
    rng, rows = random.Random(5), 24
    allocator = SlabAllocator(LAYERS, dtype_name(dtype), 100 * EXTENT)
    kept, expected = {}, {}
    for i in range(8):
        name = f"r{i}"
        assert allocator.reserve(name, 1 + 40 * i + rows)
        allocator.commit(name, range(1 + 40 * i))
        planes = [plane for layer in range(len(LAYERS)) for plane in tensor_planes(allocator, name, layer)]
        for plane in planes:
            plane.copy_(torch.randn(plane.shape))
        kept[name] = [range(rows), []][i] if i < 2 else sorted(rng.sample(range(rows), 1 + 2 * i))
        start = allocator._slabs[name].num_committed
        places = [*range(start), *(start + row for row in kept[name])]
        expected[name] = [plane[:, places].clone() for plane in planes]
    moved = {name: rows for name, rows in kept.items() if rows != range(len(rows))}
    allocator.commit_all([*kept], [*map(len, kept.values())], moved)
    for name, contents in expected.items():
        planes = [plane for layer in range(len(LAYERS)) for plane in tensor_planes(allocator, name, layer)]
        for plane, content in zip(planes, contents, strict=True):
            assert torch.equal(plane[:, : content.shape[1]], content)
    allocator.check_integrity(kept)


def test_a_row_that_was_not_reserved_is_refused() -> None:
    allocator = SlabAllocator(LAYERS, "float32", 4 * EXTENT)
    assert allocator.reserve("a", EXTENT)
    with pytest.raises(IndexError, match=f"'a': {EXTENT} was not reserved"):
        allocator.commit("a", [0, EXTENT])
