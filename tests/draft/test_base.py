"""What a draft tree must be, and that every breach is found."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.draft.base import DraftQuery, DraftRequest, DraftTree, NullDrafter
from tests.factories import examples, random_tree


@examples(100)
@given(st.integers(0, 2**32), st.integers(1, 30))
def test_valid_trees_pass_at_their_own_bounds_and_not_below(seed: int, num_nodes: int) -> None:
    tree = random_tree(random.Random(seed), num_nodes, 4)
    depths = tree.depths()
    for node, parent in enumerate(tree.parents):
        assert depths[node] == (1 if parent < 0 else depths[parent] + 1)
    tree.check(DraftQuery("a", len(tree), max(depths)))
    with pytest.raises(ValueError, match="at most"):
        tree.check(DraftQuery("a", len(tree) - 1, max(depths)))
    with pytest.raises(ValueError, match="depth"):
        tree.check(DraftQuery("a", len(tree), max(depths) - 1))


@pytest.mark.parametrize(
    ("token_ids", "parents", "reason"),
    [
        ([1, 2], [-1, 1], "does not come before"),
        ([1, 2], [1, -1], "does not come before"),
        ([1, 2], [-1, -2], "does not come before"),
        ([1, 1], [-1, -1], "two children with token 1"),
        ([5, 1, 2, 1], [-1, 0, 0, 0], "two children with token 1"),
    ],
)
def test_breaches_are_found(token_ids: list[int], parents: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DraftTree(token_ids, parents, [1.0] * len(parents)).check(DraftQuery("a", 10, 10))


def test_parents_and_tokens_of_different_lengths_are_found() -> None:
    with pytest.raises(ValueError, match="zip"):
        DraftTree([1, 2], [-1], [1.0]).check(DraftQuery("a", 10, 10))


@pytest.mark.parametrize(
    ("parents", "is_verified", "reason"),
    [
        ([-1, 0], [False, True], "its parent 0 is not"),
        ([-1, 0, 1], [True, True, True], "depth 3: at most 2"),
        ([-1, 0, 1, 2], [True, False, False, False], "depth 4: at most 3"),
    ],
)
def test_breaches_of_unverified_nodes_are_found(parents: list[int], is_verified: list[bool], reason: str) -> None:
    tree = DraftTree(list(range(len(parents))), parents, [1.0] * len(parents), is_verified)
    with pytest.raises(ValueError, match=reason):
        tree.check(DraftQuery("a", 10, 2, 3))


def test_unverified_siblings_may_repeat_a_token() -> None:
    tree = DraftTree([7, 7, 7], [-1, -1, -1], [1.0, 0.0, 0.0], [True, False, False])
    tree.check(DraftQuery("a", 3, 1))
    assert tree.num_verified == 1


def test_the_null_drafter_never_drafts() -> None:
    drafter = NullDrafter()
    drafter.start(DraftRequest("a", [1, 2, 1, 2]))
    assert [len(tree) for tree in drafter.propose([DraftQuery("a", 8, 8)] * 3)] == [0, 0, 0]
