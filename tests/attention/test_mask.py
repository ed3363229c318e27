"""Tree masks and positions against their definition, said literally."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchserve.attention.base import Span
from batchserve.attention.mask import ancestor_mask, visible_keys
from tests.factories import examples


def random_parents(rng: random.Random, num_rows: int) -> list[int]:
    """Any rows whose parents come first; -1 is the context."""
    return [rng.choice([i - 1, i - 1, rng.randint(-1, i - 1)]) for i in range(num_rows)]


def ancestors(parents: list[int], row: int) -> list[int]:
    """Row itself and up to the context."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path


def tree_positions(parents: list[int], context_len: int) -> list[int]:
    """The absolute position of every row, from its depth below the context."""
    positions: list[int] = []
    for parent in parents:
        positions.append(context_len if parent < 0 else positions[parent] + 1)
    return positions


def make_span(parents: list[int], context_len: int, *, row_start: int = 0, request_id: str = "r") -> Span:
    array = np.array(parents, dtype=np.int32)
    is_chain = parents == list(range(-1, len(parents) - 1))
    return Span(request_id, row_start, context_len, array, np.array(tree_positions(parents, context_len)), is_chain)


@examples(150)
@given(st.integers(0, 2**32), st.integers(1, 24), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_a_row_sees_context_ancestors_and_itself_inside_the_window(
    seed: int, num_rows: int, context_len: int, window: int | None
) -> None:
    parents = random_parents(random.Random(seed), num_rows)
    span = make_span(parents, context_len)
    expected = np.zeros((num_rows, context_len + num_rows), dtype=bool)
    for row in range(num_rows):
        path = ancestors(parents, row)
        position = context_len + len(path) - 1
        assert span.positions[row] == position
        for key in range(context_len):
            expected[row, key] = window is None or position - key < window
        for ancestor in path:
            key_position = context_len + len(ancestors(parents, ancestor)) - 1
            expected[row, context_len + ancestor] = window is None or position - key_position < window
    np.testing.assert_array_equal(visible_keys(span, window), expected)
    np.testing.assert_array_equal(ancestor_mask(span.parents), visible_keys(make_span(parents, 0), None))


def test_a_chain_is_causal_whether_or_not_it_is_known_to_be_one() -> None:
    known = make_span(list(range(-1, 9)), 5)
    assert known.is_chain
    unknown = make_span(list(range(-1, 9)), 5)
    unknown.is_chain = False
    for window in (None, 3, 8):
        np.testing.assert_array_equal(visible_keys(known, window), visible_keys(unknown, window))
    np.testing.assert_array_equal(visible_keys(known, None)[:, 5:], np.tri(10, dtype=bool))


def test_siblings_share_a_position_and_do_not_see_each_other() -> None:
    span = make_span([-1, 0, 0, 1, 2], 10)
    assert span.positions.tolist() == [10, 11, 11, 12, 12]
    mask = visible_keys(span, None)[:, 10:]
    assert mask[3].tolist() == [True, True, False, True, False]
    assert mask[4].tolist() == [True, False, True, False, True]
