"""The tree of kept prefixes against one that compares with everything."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.kv import prefix_tree
from batchserve.kv.prefix_index import MIN_TOKENS
from batchserve.kv.prefix_tree import PrefixNode, PrefixTree
from tests.factories import common_length, examples

TEXTS = st.tuples(st.integers(MIN_TOKENS - 2, MIN_TOKENS + 2), st.lists(st.integers(0, 3), max_size=6)).map(
    lambda drawn: [7] * drawn[0] + drawn[1]
)
ACTIONS = st.sampled_from(["add", "add", "match", "drop", "drop scope"])


def paths(tree: PrefixTree) -> list[tuple[str, list[int], list[int]]]:
    """Of every node its scope, and all tokens and slots down to its end."""
    found = []
    for node in tree:
        tokens, slots, above = list[int](), list[int](), node
        while above.parent is not None:
            tokens, slots = above.token_ids.tolist() + tokens, above.slots.tolist() + slots
            above = above.parent
        found.append((str(node.scope), tokens, slots))
    return found


@examples(300)
@given(st.lists(st.tuples(st.sampled_from("aab"), TEXTS, ACTIONS), max_size=40))
def test_it_finds_what_comparing_with_everything_finds(what: list[tuple[str, list[int], str]]) -> None:
    tree, numbers, kept = PrefixTree(), count(1), set[int]()
    for scope, text, action in what:
        if action == "add":
            slots = np.array([next(numbers) for _ in text], np.int32)
            longest = max((common_length(own, text) for owner, own, _ in paths(tree) if owner == scope), default=0)
            new, gone = tree.add(scope, text, slots)
            assert (new.tolist(), gone) == (slots[longest:].tolist(), [])
            kept |= set(new.tolist())
        elif action == "match":
            same = [(common_length(own, text), slots) for owner, own, slots in paths(tree) if owner == scope]
            longest = max((length for length, _ in same), default=0)
            found = tree.match(scope, text).tolist()
            assert len(found) == (longest if longest >= MIN_TOKENS else 0)
            assert not found or (longest, found) in [(length, slots[:length]) for length, slots in same]
        elif action == "drop scope":
            gone = {slot for slots in tree.drop_scope(scope) for slot in slots.tolist()}
            assert gone <= kept
            kept -= gone
            assert all(owner != scope for owner, _, _ in paths(tree))
        elif len(tree):
            gone = set(tree.drop(next(iter(tree))).tolist())
            assert gone <= kept
            kept -= gone
        tree.check()
        held = [slot for node in tree for slot in node.slots.tolist()]
        assert (len(held), set(held)) == (len(kept), kept), "a slot is kept once"


def add(tree: PrefixTree, text: list[int], first_slot: int, scope: str = "s") -> list[np.ndarray]:
    _, gone = tree.add(scope, text, np.arange(first_slot, first_slot + len(text), dtype=np.int32))
    return gone


def test_what_was_used_last_goes_last_and_what_others_begin_with_behind_them() -> None:
    tree, shared = PrefixTree(), [7] * 20
    for number in (1, 2, 3):
        add(tree, [*shared, *[number] * 5], 100 * number)
    assert len(tree.match("s", [*shared, 1, 1])) == 22
    dropped = [tree.drop(next(iter(tree))).tolist() for _ in range(3)]
    assert dropped == [[*range(220, 225)], [*range(320, 325)], [*range(100, 125)]]
    assert len(tree.match("s", shared)) == len(tree) == 0


def test_a_conversation_and_what_nobody_shares_any_more_are_one_piece() -> None:
    tree = PrefixTree()
    for turn in range(1, 6):
        add(tree, [*range(20 * turn)], 100 * turn)
    (node,) = tree
    assert node.slots.tolist() == [100 * (place // 20 + 1) + place for place in range(100)]
    add(tree, [*range(50), 7], 1000)
    assert len(tree) == 3
    assert len(tree.match("s", [*range(100)])) == 100
    assert tree.drop(next(iter(tree))).tolist() == [1050]
    (node,) = tree
    assert node.token_ids.tolist() == [*range(100)]
    tree.check()


def test_of_too_many_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "MAX_ENTRIES", 3)
    tree = PrefixTree()
    for number in range(3):
        assert add(tree, [number] * 20, 100 * number) == []
    assert len(tree.match("s", [0] * 30)) == 20
    (gone,) = add(tree, [9] * 20, 900, scope="t")
    assert gone.tolist() == [*range(100, 120)]
    assert [len(tree.match("s", [number] * 20)) for number in range(3)] == [20, 0, 20]
    assert len(tree.match("t", [])) == 0


@pytest.mark.parametrize("fault", ["a wrong place", "no place", "too early"])
def test_check_finds_what_went_wrong(fault: str) -> None:
    tree = PrefixTree()
    add(tree, [7] * 20, 100)
    add(tree, [*[7] * 18, 1, 2], 200)
    tree.check()
    first, *_, last = tree
    if fault == "a wrong place":
        first.parent = PrefixNode("s")
    elif fault == "no place":
        del tree._nodes[first]
    else:
        tree._nodes.move_to_end(last, last=False)
    with pytest.raises(RuntimeError, match="kept prefix"):
        tree.check()
