"""Slots under any order of reserve, write, commit, share and release; and what the device is told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from batchserve.kv.prefix_index import MIN_TOKENS
from batchserve.kv.slot_kernels import DUMMY_SLOT, NUM_FREE, NUM_OWNED
from batchserve.kv.slots import SlotAllocator
from tests.factories import examples
from tests.kv.test_slab import LAYERS, TOTAL, SlabMachine


class SlotMachine(SlabMachine):
    """Caches beside the allocator, and the copy of its table that a device would have."""

    unit, total = 1, TOTAL

    def __init__(self) -> None:
        super().__init__()
        shapes = [((s.num_kv_heads, s.key_dim), (s.num_kv_heads, s.value_dim)) for s in LAYERS]
        self.caches = [[torch.zeros(TOTAL + 1, *shape) for shape in pair] for pair in shapes]
        self.promised: dict[str, int] = {}
        self.table = np.full(self.allocator.table_shape, -1)

    def make_allocator(self) -> SlotAllocator:
        return SlotAllocator(TOTAL, max_requests=2, max_tokens=TOTAL, bytes_per_token=1)  # rows are added for more

    def slots(self, request_id: str) -> torch.Tensor:
        return torch.from_numpy(self.allocator.slots(request_id)).long()

    def places(self, request_id: str, layer: int) -> list[torch.Tensor]:
        return [cache[self.slots(request_id)].transpose(0, 1) for cache in self.caches[layer]]

    def write(self, request_id: str, layer: int, plane: int, places: slice, contents: torch.Tensor) -> None:
        self.caches[layer][plane][self.slots(request_id)[places]] = contents.transpose(0, 1)

    @property
    def free(self) -> int:
        return TOTAL - len({int(slot) for request_id in self.owned for slot in self.slots(request_id)})

    def began(self, request_id: str, num_tokens: int) -> None:
        self.promised[request_id] = num_tokens

    def kept_by_commit(self, request_id: str) -> int:
        """Nothing that was reserved for rows which were not kept, but what was there for the prompt."""
        return max(len(self.committed[request_id]), self.promised[request_id])

    def kept_by_reclaim(self, request_id: str, num_needed: int) -> int:
        return self.owned[request_id]

    def num_shared_by_fork(self, num_tokens: int) -> int:
        return num_tokens

    def may_begin(self, prompt: list[int], free: int, cached: int | None) -> bool:
        """What is shared with a running request takes no memory, so more may begin than would fit alone."""
        return cached is not None or len(prompt) > free

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def step_on_the_device(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.owned)), unique=True))
        places, slots = self.allocator.changes(chosen)
        if self.table.shape != self.allocator.table_shape:
            grown = np.full(self.allocator.table_shape, -1)
            grown[: len(self.table)] = self.table
            self.table = grown
        self.table.reshape(-1)[places] = slots
        for request_id in chosen:
            row = self.table[self.allocator.rows([request_id])[0][0], : self.owned[request_id]]
            np.testing.assert_array_equal(row, self.allocator.slots(request_id))
        assert all(len(changed) == 0 for changed in self.allocator.changes(chosen)), "uploaded twice"

    @invariant()
    def nobody_has_the_dummy_slot_and_rows_have_slots_of_their_own(self) -> None:
        held = [(int(slot), request_id, place) for request_id, tokens in self.committed.items()
                for place, slot in enumerate(self.slots(request_id))]  # fmt: skip
        assert all(slot != DUMMY_SLOT for slot, _, _ in held)
        to_write = {slot for slot, request_id, place in held if place >= len(self.committed[request_id])}
        assert sum(slot in to_write for slot, _, _ in held) == len(to_write), "a slot to be written is also another's"


TestSlots = SlotMachine.TestCase
TestSlots.settings = examples(40, stateful_step_count=40)


@pytest.mark.slow
class TestSlotsAtLength(SlotMachine.TestCase):
    settings = examples(300, stateful_step_count=60)


def make(total: int = 100, **options: Any) -> SlotAllocator:
    return SlotAllocator(total, **{"max_requests": 4, "max_tokens": total, "bytes_per_token": 8, **options})


def keep(allocator: SlotAllocator, request_id: str, tokens: list[int], scope: str = "s") -> list[int]:
    """A request computes these tokens and ends; its slots."""
    assert allocator.reserve(request_id, len(tokens))
    allocator.commit(request_id, range(len(tokens)))
    slots: list[int] = allocator.slots(request_id).tolist()
    allocator.retire(request_id, scope, tokens)
    return slots


def test_accepted_rows_keep_their_slots_and_the_others_are_free() -> None:
    allocator = make()
    assert allocator.reserve("a", 3)
    allocator.commit("a", [0, 1, 2])
    assert allocator.reserve("a", 5)
    step = allocator.slots("a")[3:].tolist()
    allocator.commit("a", [0, 2, 3])
    assert allocator.slots("a")[3:].tolist() == [step[0], step[2], step[3]]
    assert allocator.free_tokens == 100 - 6
    allocator.check_integrity({"a"})


def test_only_what_changed_is_uploaded() -> None:
    allocator = make()
    allocator.reserve("a", 4)
    allocator.reserve("b", 2)
    places, slots = allocator.changes(["a"])
    assert (places.tolist(), slots.tolist()) == ([0, 1, 2, 3], allocator.slots("a").tolist())
    allocator.commit("a", range(4))
    allocator.reserve("a", 3)
    assert allocator.changes(["a"])[0].tolist() == [4, 5, 6]
    allocator.commit("a", [0, 2])  # place 5 has another slot now, 6 none
    assert allocator.changes(["a", "b"])[0].tolist() == [5, 100, 101]


def test_places_that_were_given_up_are_uploaded_again_with_the_slots_that_come_there() -> None:
    allocator = make()
    allocator.reserve("a", 1)
    allocator.commit("a", [0])
    allocator.reserve("a", 4)
    before = allocator.changes(["a"])[1].tolist()
    allocator.commit("a", [0])
    allocator.reserve("b", 3)  # takes what a gave up
    allocator.reserve("a", 3)
    places, slots = allocator.changes(["a"])
    assert places.tolist() == [2, 3, 4]
    assert slots.tolist() == allocator.slots("a")[2:].tolist()
    assert not set(slots.tolist()) & set(before)


def test_a_prompt_that_was_let_in_keeps_its_room_while_it_is_computed() -> None:
    allocator = make(20)
    assert allocator.reserve("a", 15)
    allocator.commit("a", range(4))
    assert allocator.free_tokens == 5
    assert allocator.reserve("a", 11)
    assert not allocator.reserve("b", 6)


def test_a_hit_shares_slots_and_their_memory_goes_with_the_last_that_needs_it() -> None:
    allocator = make()
    text = list(range(40))
    slots = keep(allocator, "a", text)
    assert (allocator.free_tokens, allocator.cached_tokens) == (100, 40)
    for name in ("b", "c"):
        assert allocator.match_prefix(name, "s", [*text[:30], 7, 7]) == 30
        assert allocator.slots(name)[:30].tolist() == slots[:30]
    assert (allocator.free_tokens, allocator.cached_tokens) == (100 - 30 - 2 * 2, 10)
    allocator.forget_prefixes("s")
    assert allocator.cached_tokens == 0
    allocator.release("b")
    assert allocator.free_tokens == 100 - 32
    allocator.check_integrity({"c"})
    allocator.release("c")
    assert allocator.free_tokens == 100


def test_a_document_that_many_had_in_common_is_kept_once_also_where_each_has_computed_it() -> None:
    allocator, document = make(400), list(range(60))
    for name in ("a", "b"):
        assert allocator.reserve(name, 70)
        allocator.commit(name, range(70))
    for place, name in enumerate(("a", "b")):
        allocator.retire(name, "s", [*document, *[100 + place] * 10])
    assert (allocator.free_tokens, allocator.cached_tokens) == (400, 60 + 2 * 10)
    for place in range(5):
        assert allocator.match_prefix("c", "s", [*document, *[200 + place] * 10]) == 60
        allocator.commit("c", range(10))
        allocator.retire("c", "s", [*document, *[200 + place] * 10])
    assert allocator.cached_tokens == 60 + 7 * 10
    assert sum(len(node.token_ids) for node in allocator._prefixes) == allocator.cached_tokens
    assert allocator.reserve("d", 400 - 60 - 2 * 10)  # the oldest tails go first, the document stays
    assert allocator.cached_tokens == 60 + 2 * 10
    allocator.release("d")
    assert allocator.match_prefix("e", "s", [*document, *[204] * 9]) == 68
    allocator.check_integrity({"e"})


def test_what_is_shared_with_a_running_request_takes_no_memory() -> None:
    allocator = make(50)
    text = list(range(40))
    keep(allocator, "a", text)
    assert allocator.match_prefix("b", "s", [*text, 1]) == 40
    assert allocator.match_prefix("c", "s", [*text, 2, 3]) == 40
    assert allocator.free_tokens == 50 - 40 - 1 - 2
    assert allocator.match_prefix("d", "s", [*text, *range(50, 58)]) is None, "one more than is free"
    assert allocator.match_prefix("d", "s", [*text, *range(50, 57)]) == 40
    allocator.check_integrity({"b", "c", "d"})


def test_a_fork_takes_memory_for_its_own_tokens_only_and_outlives_its_source() -> None:
    allocator = make(50)
    assert allocator.reserve("a", 40)
    allocator.commit("a", range(30))
    assert allocator.fork("b", "a", 30, 35)
    assert allocator.slots("b")[:30].tolist() == allocator.slots("a")[:30].tolist()
    assert allocator.free_tokens == 50 - 40 - 5
    assert not allocator.fork("c", "a", 20, 26), "one more than is free"
    with pytest.raises(ValueError, match="num_shared = 31: 'a' has committed 30"):
        allocator.fork("c", "a", 31, 32)
    allocator.release("a")
    assert allocator.free_tokens == 50 - 35
    allocator.check_integrity({"b"})
    allocator.release("b")
    assert allocator.free_tokens == 50


def test_prefixes_go_when_memory_is_needed_but_not_the_one_that_is_hit() -> None:
    allocator = make(60)
    keep(allocator, "a", list(range(20)))
    keep(allocator, "b", list(range(100, 120)))
    keep(allocator, "c", list(range(200, 220)))
    assert allocator.match_prefix("x", "s", [*range(20), *range(300, 325)]) == 20
    assert allocator.cached_tokens == 0, "b and c went for it, though each alone was too little"
    assert allocator.match_prefix("y", "s", list(range(15))) == 0
    allocator.check_integrity({"x", "y"})


def test_a_request_is_never_given_more_than_its_row_of_the_table_holds() -> None:
    allocator = make(max_tokens=30)
    assert allocator.reserve("a", 20)
    allocator.commit("a", range(20))
    assert allocator.reservable_tokens(["a"]) == [10]
    assert not allocator.reserve("a", 11)
    assert allocator.match_prefix("b", "s", list(range(31))) is None
    allocator.check_integrity({"a"})


def test_too_little_is_not_kept() -> None:
    allocator = make()
    keep(allocator, "a", list(range(MIN_TOKENS - 1)))
    assert (allocator.free_tokens, allocator.cached_tokens) == (100, 0)


def lose_a_slot(allocator: SlotAllocator) -> None:
    allocator._numbers[NUM_FREE] -= 1


def give_out_twice(allocator: SlotAllocator) -> None:
    allocator._table[allocator.rows(["b"])[0][0], 0] = allocator.slots("a")[0]


def give_out_the_dummy(allocator: SlotAllocator) -> None:
    allocator._request_refs[allocator.slots("a")[0]] -= 1
    allocator._table[allocator.rows(["a"])[0][0], 0] = DUMMY_SLOT
    allocator._request_refs[DUMMY_SLOT] += 1


def forget_a_reference(allocator: SlotAllocator) -> None:
    allocator._prefix_refs[next(iter(allocator._prefixes)).slots[0]] = 0


def miscount(allocator: SlotAllocator) -> None:
    allocator._numbers[NUM_OWNED] += 1


@pytest.mark.parametrize("fault", [lose_a_slot, give_out_twice, give_out_the_dummy, forget_a_reference, miscount])
def test_check_integrity_finds_what_went_wrong(fault: Callable[[SlotAllocator], None]) -> None:
    allocator = make()
    keep(allocator, "c", list(range(20)))
    allocator.reserve("a", 5)
    allocator.reserve("b", 5)
    allocator.check_integrity({"a", "b"})
    with pytest.raises(RuntimeError, match="owned by"):
        allocator.check_integrity({"a"})
    fault(allocator)
    with pytest.raises(RuntimeError, match=r"K/V slot"):
        allocator.check_integrity({"a", "b"})


@pytest.mark.parametrize("rows", [[3], [0, 3], [1, 0], [0, 0], [-1, 0]])
def test_rows_that_were_not_reserved_or_do_not_ascend_are_refused_and_nothing_changes(rows: list[int]) -> None:
    allocator = make()
    allocator.reserve("a", 3)
    allocator.reserve("b", 3)
    before = [allocator.slots(name).tolist() for name in "ab"]
    with pytest.raises(IndexError, match="rows of 'b'"):
        allocator.commit_all("ab", [2, len(rows)], {"a": [1, 2], "b": rows})
    assert [allocator.slots(name).tolist() for name in "ab"] == before
    allocator.check_integrity({"a", "b"})
