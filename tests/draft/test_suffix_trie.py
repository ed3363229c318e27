"""The trie of all windows: exact counts while unbounded, bounded memory for ever."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.draft.suffix_trie import CHILDREN, COUNT, Node, SuffixTrie
from tests.factories import examples

texts = st.lists(st.integers(0, 3), max_size=30)


def contents(root: Node) -> dict[tuple[int, ...], int]:
    """Count of every path."""

    def walk(node: Node, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
        for token, child in node[CHILDREN].items():
            yield (*path, token), child[COUNT]
            yield from walk(child, (*path, token))

    return dict(walk(root, ()))


@examples(150)
@given(st.integers(1, 6), st.lists(st.lists(texts, max_size=3), max_size=3))
def test_counts_are_those_of_every_window_of_every_text(depth: int, fed: list[list[list[int]]]) -> None:
    """Each text comes in pieces; no window reaches from one text into another."""
    trie = SuffixTrie(depth)
    expected: Counter[tuple[int, ...]] = Counter()
    for pieces in fed:
        cursors: list[Node] = []
        for piece in pieces:
            cursors = trie.extend(cursors, piece)
        text = [token for piece in pieces for token in piece]
        for length in range(1, depth + 1):
            expected.update(tuple(text[i : i + length]) for i in range(len(text) - length + 1))
        suffixes = [text[-n:] for n in range(min(depth - 1, len(text)), 0, -1)]
        assert [id(node) for node in cursors] == [id(trie.find(suffix)) for suffix in suffixes]
    assert contents(trie.root) == expected
    assert trie.num_nodes == len(expected)
    for path, count in expected.items():
        found = trie.find(path)
        assert found is not None
        assert found[COUNT] == count
    assert trie.find([9]) is None


@pytest.mark.parametrize("vocab_size", [2, 50, 10_000])
def test_memory_stays_bounded_under_an_endless_stream(vocab_size: int) -> None:
    rng, piece, capacity = random.Random(0), 8, 600
    trie = SuffixTrie(6, capacity)
    cursors: list[Node] = []
    for _ in range(1500):
        generation = trie.generation
        cursors = trie.extend(cursors, [rng.randrange(vocab_size) for _ in range(piece)])
        assert trie.num_nodes <= capacity + piece * trie.depth
        if trie.prune():
            cursors = []
        assert trie.num_nodes <= capacity
        assert (trie.generation != generation) == (cursors == [])
    assert trie.num_nodes == len(contents(trie.root))


def test_pruning_keeps_what_is_frequent() -> None:
    rng, trie = random.Random(1), SuffixTrie(4, 300)
    for i in range(400):
        trie.extend([], [7, 8, 9] if i % 2 else [rng.randrange(100, 5000) for _ in range(3)])
        trie.prune()
    kept = contents(trie.root)
    assert (7, 8, 9) in kept
    assert kept[7,] == max(count for path, count in kept.items() if len(path) == 1)
