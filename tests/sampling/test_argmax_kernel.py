"""The likeliest token of each row, among numbers, infinities and NaNs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchserve.sampling.argmax_kernel import best_of_parts, best_tokens
from tests.factories import examples

VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, -4.0, 3e38, np.inf, -np.inf, np.nan])


def expected(row: list[float]) -> tuple[int, bool]:
    """The first NaN, or else the first of the greatest."""
    nans = [place for place, value in enumerate(row) if value != value]
    best = nans[0] if nans else row.index(max(row))
    return best, bool(np.isfinite(row[best]))


@examples(300)
@given(st.lists(st.lists(VALUES, min_size=7, max_size=7), min_size=1, max_size=5), st.integers(1, 8))
def test_the_first_of_the_greatest_counts_and_a_nan_is_above_all(rows: list[list[float]], width: int) -> None:
    logits = np.array(rows, np.float32)
    best, is_finite = best_tokens(logits)
    rows = logits.tolist()
    assert [*zip(best.tolist(), is_finite.tolist(), strict=True)] == [expected(row) for row in rows]
    greatest = np.stack([part.max(axis=1) for part in np.array_split(logits, range(width, 7, width), axis=1)])
    found = np.empty(len(rows), np.int64), np.empty(len(rows), np.bool_)
    best_of_parts(greatest, logits.ctypes.data, 7, width, *found)
    assert [*zip(found[0].tolist(), found[1].tolist(), strict=True)] == [expected(row) for row in rows]


def test_no_rows_have_no_likeliest_token() -> None:
    assert best_tokens(np.zeros((0, 5), np.float32))[0].shape == (0,)
