"""The shared trie: exact counts while unbounded, bounded memory for ever, and pruning without a cliff."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.draft import trie_growth, trie_kernels
from batchserve.draft.base import DraftQuery, DraftRequest
from batchserve.draft.trie import MIN_ROWS, TrieDrafter, _Branches, _SharedTrie, compile_kernels
from batchserve.draft.trie_kernels import CHILD, COUNT, FREE, NEXT, PARENT, PREV, SIZE, TOKEN, USED, find_child
from batchserve.request import DraftScope
from tests.factories import examples

UNBOUNDED = 1 << 20
texts = st.lists(st.integers(0, 3), max_size=30)


def walk(trie: _SharedTrie, row: int = 0, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], int]]:
    """(path, row) of every node."""
    child = int(trie.nodes[row, CHILD])
    while child:
        below = (*path, int(trie.nodes[child, TOKEN]))
        yield below, child
        yield from walk(trie, child, below)
        child = int(trie.nodes[child, NEXT])


def counts(trie: _SharedTrie) -> dict[tuple[int, ...], int]:
    """Of every path but single tokens, which are not counted."""
    return {path: int(trie.nodes[row, COUNT]) for path, row in walk(trie) if len(path) > 1}


def check_trie(trie: _SharedTrie, capacity: int = UNBOUNDED, max_rows: int = UNBOUNDED) -> None:
    """Links, table, sizes and the free list agree, and both bounds hold."""
    nodes, rows = trie.nodes, dict(walk(trie))
    sizes = Counter(path[0] for path in rows if len(path) > 1)
    for path, row in rows.items():
        above, after = rows.get(path[:-1], 0), int(nodes[row, NEXT])
        assert nodes[row, PARENT] == above
        assert find_child(*trie.arrays, above, path[-1]) == row
        assert not after or nodes[after, PREV] == row
        if len(path) == 1:
            assert nodes[row, SIZE] == sizes[path[0]] <= capacity
        else:
            assert nodes[row, COUNT] >= 1
    assert len(set(rows.values())) == len(rows) == trie.num_nodes
    free, row = 0, int(trie.header[FREE])
    while row:
        free, row = free + 1, int(nodes[row, NEXT])
    assert 1 + len(rows) + free == trie.header[USED] <= max_rows


def insert(
    trie: _SharedTrie, pieces: list[list[int]], depth: int, capacity: int = UNBOUNDED, max_rows: int = UNBOUNDED
) -> None:
    """One text, a piece at a time."""
    branches = _Branches(depth)
    for piece in pieces:
        trie.insert(branches, piece, capacity, max_rows)


@examples(150)
@given(st.integers(1, 6), st.lists(st.lists(texts, max_size=3), max_size=3))
def test_counts_are_those_of_every_window_of_every_text(depth: int, fed: list[list[list[int]]]) -> None:
    """Each text comes in pieces; no window reaches from one text into another."""
    trie = _SharedTrie()
    expected: Counter[tuple[int, ...]] = Counter()
    for pieces in fed:
        insert(trie, pieces, depth)
        text = [token for piece in pieces for token in piece]
        for length in range(1, depth + 1):
            expected.update(tuple(text[i : i + length]) for i in range(len(text) - length + 1))
    check_trie(trie)
    assert {path for path, _ in walk(trie)} == set(expected)
    assert counts(trie) == {path: count for path, count in expected.items() if len(path) > 1}
    assert find_child(*trie.arrays, 0, 9) == 0


def test_texts_that_come_in_turns_do_not_mix() -> None:
    together, apart = _SharedTrie(), _SharedTrie()
    rng = random.Random(0)
    two = [[rng.randrange(4) for _ in range(60)] for _ in range(2)]
    open_branches = [_Branches(5), _Branches(5)]
    for i in range(60):
        for branches, text in zip(open_branches, two, strict=True):
            together.insert(branches, text[i : i + 1], UNBOUNDED, UNBOUNDED)
    for text in two:
        insert(apart, [text], 5)
    assert counts(together) == counts(apart)


def test_a_large_trie_grows_without_losing_anything() -> None:
    rng, trie = random.Random(0), _SharedTrie()
    text = [rng.randrange(50_000) for _ in range(4000)]
    insert(trie, [text[i : i + 7] for i in range(0, 4000, 7)], 4)
    check_trie(trie)
    assert len(trie.nodes) > MIN_ROWS
    assert {tuple(text[i : i + 4]) for i in range(3997)} <= set(counts(trie))


@pytest.mark.parametrize("vocab_size", [2, 50, 10_000])
@pytest.mark.parametrize(("capacity", "max_rows"), [(40, UNBOUNDED), (UNBOUNDED, 600), (40, 600), (1, 20), (3, 1)])
def test_memory_stays_bounded_under_an_endless_stream(vocab_size: int, capacity: int, max_rows: int) -> None:
    rng, trie = random.Random(0), _SharedTrie()
    running = [_Branches(6) for _ in range(3)]
    for step in range(600):
        piece = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 8))]
        trie.insert(running[step % 3], piece, capacity, max_rows)
        if step % 10 == 0:
            check_trie(trie, capacity, max_rows)
    check_trie(trie, capacity, max_rows)
    assert trie.num_nodes or max_rows == 1


def test_pruning_is_no_cliff() -> None:
    """What a full tree takes in it drops, no more; and when it has taken in its size in noise, it has kept half of what
    was frequent.

    The published code halves all counts and drops what falls to one or less: of 601 children one was left.
    """
    rng, trie, capacity = random.Random(1), _SharedTrie(), 300
    frequent = [[7, 100 + i, 200 + i] for i in range(100)]
    for text in frequent * 8:
        insert(trie, [text], 3, capacity)
    paths, before = {tuple(text) for text in frequent}, set(counts(trie))
    for _ in range(capacity // 2):  # as many new nodes as there is room for in all
        insert(trie, [[7, rng.randrange(1000, 5000), rng.randrange(1000, 5000)]], 3, capacity)
        tree = {path for path in counts(trie) if path[0] == 7}
        assert len(before - set(counts(trie))) <= 2
        assert len(paths & tree) >= 50
        before = set(counts(trie))
    assert len(tree) == capacity
    check_trie(trie, capacity)


def test_what_is_no_longer_said_makes_room_in_the_end() -> None:
    """However frequent it once was: decay halves it at every round."""
    rng, trie, capacity = random.Random(1), _SharedTrie(), 60
    for _ in range(1000):
        insert(trie, [[7, 8, 9]], 3, capacity)
    for _ in range(2000):
        insert(trie, [[7, rng.randrange(1000, 5000), rng.randrange(1000, 5000)]], 3, capacity)
    assert (7, 8, 9) not in counts(trie)
    check_trie(trie, capacity)


def test_a_full_scope_prunes_all_its_trees_in_turn() -> None:
    trie, max_rows = _SharedTrie(), 400
    for i in range(100):
        insert(trie, [[i, 1000 + i, 2000 + i]], 3, max_rows=max_rows)
    for i in range(60):
        insert(trie, [[500 + i, 1500 + i, 2500 + i]], 3, max_rows=max_rows)
        check_trie(trie, max_rows=max_rows)
        assert trie.num_nodes > max_rows // 2
    assert (559, 1559, 2559) in counts(trie)


def test_windows_that_were_forgotten_are_given_up() -> None:
    """Nothing of the text before is put back by what comes after, also if the rows are in use again."""
    trie, max_rows, rng = _SharedTrie(), 60, random.Random(0)
    branches = _Branches(4)
    trie.insert(branches, [1, 2, 3], UNBOUNDED, max_rows)
    windows = {(1, 2), (1, 2, 3), (2, 3)}
    assert set(counts(trie)) == windows
    rows = {row for path, row in walk(trie) if path in windows}
    other = _Branches(4)
    while windows & set(counts(trie)):
        trie.insert(other, [rng.randrange(100, 200)], UNBOUNDED, max_rows)
    for _ in range(100):
        trie.insert(other, [rng.randrange(100, 200)], UNBOUNDED, max_rows)
    assert rows <= {row for _, row in walk(trie)}
    trie.insert(branches, [4], UNBOUNDED, max_rows)
    trie.insert(branches, [8], UNBOUNDED, max_rows)
    check_trie(trie, max_rows=max_rows)
    paths = set(counts(trie))
    assert (4, 8) in paths
    assert not any(4 in path[1:] for path in paths), "the windows that were open led to rows of another text"


def test_nothing_is_left_to_compile() -> None:
    """Whatever kinds of sequences and sizes a drafter is given later."""

    def versions() -> dict[str, int]:
        kernels = {**vars(trie_kernels), **vars(trie_growth)}
        return {name: len(kernel.signatures) for name, kernel in kernels.items() if hasattr(kernel, "signatures")}

    compile_kernels()
    compiled = versions()
    assert compiled["grow_draft"]
    drafter = TrieDrafter(mode="single", prompt_weight=2)
    drafter.start(DraftRequest("a", np.arange(3000), references=[(1, 2), [3]], scope=DraftScope("", "a")))
    drafter.start(DraftRequest("b", [1]))
    for request_id in "ab":
        drafter.accept(request_id, range(3000))
        drafter.share(request_id, tuple(range(1000)))
        drafter.propose([DraftQuery(request_id, 5, 3)])
    assert versions() == compiled


def test_births_begin_again_below_zero() -> None:
    """After 2^31 of them: a birth must neither look like a free row's nor like a token."""
    wrapped = 0
    for seed in range(60):
        rng, trie, idle = random.Random(seed), _SharedTrie(), _Branches(4)
        trie.header[trie_kernels.LAST_BIRTH] = trie_kernels.NEVER + rng.randint(1, 4)
        trie.insert(idle, [1, 2, 3], UNBOUNDED, UNBOUNDED)
        for _ in range(100):  # of others, which prune what the idle one has open
            insert(trie, [[rng.randrange(1, 9) for _ in range(3)]], 4, 4, 16)
        trie.insert(idle, [99], UNBOUNDED, UNBOUNDED)
        check_trie(trie)
        wrapped += trie.header[trie_kernels.LAST_BIRTH] > -UNBOUNDED
        assert trie.header[trie_kernels.LAST_BIRTH] < 0
    assert wrapped == 60


def test_counts_end_at_the_most_that_there_is() -> None:
    trie = _SharedTrie()
    insert(trie, [[5, 6]], 2)
    (row,) = [row for path, row in walk(trie) if path == (5, 6)]
    trie.nodes[row, COUNT] = trie_kernels.MAX_COUNT - 2
    insert(trie, [[5, 6] * 5], 2)
    assert counts(trie)[5, 6] == trie_kernels.MAX_COUNT
