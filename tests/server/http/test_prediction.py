"""How much of a prediction an answer has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.server.http.prediction import PredictionCount

TOKENS = st.lists(st.integers(0, 5), max_size=40)


@pytest.mark.parametrize(
    ("prediction", "answer", "accepted"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 4),
        ([1, 2, 3, 4], [], 0),
        ([], [1, 2], 0),
        ([1, 2, 3, 4], [9, 9, 9], 0),
        ([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6], 3),  # 9 for 3: found again after 4 5
        ([1, 2, 3, 4, 5, 6], [0, 2, 3, 4, 5, 6], 3),
        ([1, 2, 3, 1, 2, 4], [1, 2, 3, 1, 2, 4], 6),
        ([1, 2, 3], [1, 2, 3, 1, 2, 3], 3),  # nothing is counted twice
    ],
)
def test_what_is_accepted(prediction: list[int], answer: list[int], accepted: int) -> None:
    count = PredictionCount(prediction)
    count.add(answer)
    assert (count.num_accepted, count.num_rejected) == (accepted, len(prediction) - accepted)


@given(TOKENS, TOKENS, st.integers(1, 7))
def test_it_does_not_matter_how_the_answer_is_cut(prediction: list[int], answer: list[int], size: int) -> None:
    whole, cut, same = PredictionCount(prediction), PredictionCount(prediction), PredictionCount(prediction)
    whole.add(answer)
    for i in range(0, len(answer), size):
        cut.add(answer[i : i + size])
    assert cut.num_accepted == whole.num_accepted <= min(len(prediction), len(answer))
    same.add(prediction)
    assert same.num_rejected == 0
