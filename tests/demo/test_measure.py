"""The demo's figures, on answers whose figures are known."""

from __future__ import annotations

import math

import pytest

from batchserve.demo.measure import Answer, Round, first_difference, median_of, percentile


def _answer(*arrivals: tuple[float, int], sent_s: float = 0.0) -> Answer:
    token_ids = list(range(sum(count for _, count in arrivals)))
    return Answer(sent_s, token_ids=token_ids, arrivals=list(arrivals))


def test_a_gap_is_shared_by_the_tokens_that_ended_it():
    answer = _answer((1.0, 2), (1.5, 5), (2.5, 1))
    assert answer.inter_token_latencies_s() == pytest.approx([0.1] * 5 + [1.0])
    assert answer.gaps_s() == [0.5, 1.0]


def test_round_figures():
    done = Round([_answer((1.0, 1), (2.0, 4)), _answer((3.0, 1), (3.5, 1), sent_s=1.0)], wall_s=3.5)
    assert done.tokens_per_s == 7 / 3.5
    assert done.ttft_s == 1.5
    assert done.mean_itl_s == pytest.approx((4 * 0.25 + 0.5) / 5)
    assert done.p99_itl_s == 0.5
    assert done.p99_gap_s == 1.0
    assert done.acceptance_length == 7 / 4
    slower = Round(done.answers, wall_s=7.0)
    assert median_of([done, slower, slower], lambda each: each.tokens_per_s) == 1.0


def test_answers_of_one_delta_have_no_latency_and_do_not_break_the_figures():
    done = Round([_answer((1.0, 1)), _answer()], wall_s=1.0)
    assert math.isnan(done.mean_itl_s)
    assert math.isnan(done.p99_itl_s)
    assert done.ttft_s == 1.0


def test_percentile_is_the_nearest_rank():
    values = [float(i) for i in range(100, 0, -1)]
    assert percentile(values, 99) == 99.0
    assert percentile(values, 50) == 50.0
    assert percentile([3.0], 99) == 3.0


@pytest.mark.parametrize(
    ("left", "right", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [1], 0), ([], [], None)],
)
def test_first_difference(left, right, at):
    assert first_difference(left, right) == at
