"""The walk down a draft tree gives what decoding token by token gives, whatever the tree is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.draft.base import DraftTree
from batchserve.sampling.sampler import NO_TOKEN
from batchserve.sampling.verify import walk_tree
from tests.factories import examples, random_tree

VOCAB_SIZE = 3  # so that drafts are often right


def target_model(seed: int) -> Callable[[tuple[int, ...]], int]:
    """A made-up language model: the next token is a function of all tokens before it."""

    def next_token(context: tuple[int, ...]) -> int:
        return random.Random(f"{seed} {context}").randrange(VOCAB_SIZE)

    return next_token


def rows_of(tree: DraftTree, num_pending: int) -> tuple[list[int], list[int]]:
    """token_ids and parents per row: pending tokens in a chain (of a token that no draft has), then the tree."""
    root = num_pending - 1
    token_ids = [VOCAB_SIZE] * num_pending + tree.token_ids
    parents = list(range(-1, root)) + [root if p < 0 else num_pending + p for p in tree.parents]
    return token_ids, parents


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], int]:
    """Token paths from the root to every node."""
    paths: dict[tuple[int, ...], int] = {}
    by_node: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        by_node.append((*(by_node[parent] if parent >= 0 else ()), token))
        paths[by_node[node]] = node
    return paths


@examples(400)
@given(st.integers(0, 2**32), st.integers(0, 24), st.integers(1, 4))
def test_equals_decoding_step_by_step(seed: int, num_nodes: int, num_pending: int) -> None:
    tree = random_tree(random.Random(seed), num_nodes, VOCAB_SIZE)
    token_ids, parents = rows_of(tree, num_pending)
    root = num_pending - 1
    model, paths = target_model(seed), paths_of(tree)
    asked: list[tuple[int, int]] = []

    def target(row: int, depth: int) -> int:
        asked.append((row, depth))
        context: list[int] = []
        while row != root:
            context.append(token_ids[row])
            row = parents[row]
        return model(tuple(reversed(context)))

    # The plain path: one token after the other, for as long as the tree has the row that the next one needs.
    plain = [model(())]
    rows: list[int] = []
    while tuple(plain) in paths:
        rows.append(num_pending + paths[tuple(plain)])
        plain.append(model(tuple(plain)))

    verified = walk_tree(token_ids, parents, root, target)
    assert verified.token_ids == plain
    assert verified.rows == rows
    # Only reached rows are sampled, each once: the others would be paid for in vain.
    assert asked == list(enumerate_path(root, rows))


def enumerate_path(root: int, rows: list[int]) -> list[tuple[int, int]]:
    return [(row, depth) for depth, row in enumerate([root, *rows])]


def test_without_drafts_it_is_one_plain_token() -> None:
    verified = walk_tree([5, 6], [-1, 0], 1, lambda row, depth: 9)
    assert (verified.token_ids, verified.rows) == ([9], [])


def test_a_token_under_the_wrong_parent_is_not_accepted() -> None:
    """Tree: root -> 1 -> 2 and root -> 3; the target says 3, then 2: the 2 under the 1 must not do."""
    target = {0: 3, 1: 2, 2: 7, 3: 2}
    verified = walk_tree([0, 1, 2, 3], [-1, 0, 1, 0], 0, lambda row, depth: target[row])
    assert (verified.token_ids, verified.rows) == ([3, 2], [3])


def test_pending_rows_are_never_taken_for_drafts() -> None:
    """The prompt's own tokens hang from each other; the walk starts behind the last of them."""
    verified = walk_tree([4, 4, 4], [-1, 0, 1], 0 + 2, lambda row, depth: 4)
    assert (verified.token_ids, verified.rows) == ([4], [])


@pytest.mark.parametrize(
    ("said", "token_ids", "rows"),
    [
        ([NO_TOKEN], [NO_TOKEN], []),  # there is no next token at all
        ([5, NO_TOKEN], [5], []),
        ([5, 6, NO_TOKEN], [5, 6], [1]),  # what comes before is given; its last row is computed again
        ([5, 6, 7, NO_TOKEN], [5, 6, 7], [1, 2]),
    ],
)
def test_where_the_target_says_nothing_the_tokens_before_are_still_given(
    said: list[int], token_ids: list[int], rows: list[int]
) -> None:
    verified = walk_tree([4, 5, 6, 7], [-1, 0, 1, 2], 0, lambda row, depth: said[depth])
    assert (verified.token_ids, verified.rows) == (token_ids, rows)
