"""Who comes first."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchserve.request import Request
from batchserve.scheduler.policy import prompt_rank, rank
from tests.factories import examples, make_request


def request(priority: int = 0, arrival_s: float = 0.0) -> Request:
    made = make_request("r", [5])
    made.priority, made.arrival_s = priority, arrival_s
    return made


def test_higher_priority_comes_first_then_the_earlier() -> None:
    worst, later, earlier, best = request(-5, 0.5), request(0, 2.0), request(0, 1.0), request(3, 9.0)
    line = sorted([worst, later, earlier, best], key=lambda r: rank(r, 9.0, 10.0))
    assert line == [best, earlier, later, worst]


def test_who_has_waited_long_comes_before_all_others_and_the_oldest_first() -> None:
    old, older, high = request(-5, 2.0), request(-9, 1.0), request(1000, 50.0)
    assert sorted([high, old, older], key=lambda r: rank(r, 12.5, 10.0)) == [older, old, high]
    # At the bound itself he has not waited longer than it.
    assert sorted([high, old, older], key=lambda r: rank(r, 12.0, 10.0)) == [older, high, old]


def test_the_prompt_with_the_fewest_tokens_left_comes_first_among_its_equals() -> None:
    long, short, best, overdue = request(0, 5.0), request(0, 6.0), request(1, 7.0), request(-1, 1.0)
    for each, length in ((long, 9), (short, 4), (best, 90), (overdue, 50)):
        each.token_ids, each.num_prompt_tokens = [5] * length, length
    everybody = [long, short, best, overdue]
    assert sorted(everybody, key=lambda r: prompt_rank(r, 9.0, 10.0)) == [best, short, long, overdue]
    assert sorted(everybody, key=lambda r: prompt_rank(r, 11.5, 10.0)) == [overdue, best, short, long]
    long.num_computed_tokens = 6
    assert prompt_rank(long, 9.0, 10.0) < prompt_rank(short, 9.0, 10.0)
    # Who was preempted amid his answer has waited before.
    long.num_computed_tokens, long.token_ids = 0, [5] * 10
    assert prompt_rank(long, 9.0, 10.0) < prompt_rank(short, 9.0, 10.0)


@examples(200)
@given(st.lists(st.tuples(st.integers(-9, 9), st.floats(0, 100)), min_size=2, max_size=2), st.floats(0, 50))
def test_two_requests_change_places_once_at_most_and_then_stand_by_arrival(
    each: list[tuple[int, float]], max_wait_s: float
) -> None:
    """So no two can preempt each other in turns for ever."""
    a, b = (request(priority, arrival) for priority, arrival in each)
    times = [100.0 + 0.5 * i for i in range(120)]  # both have come
    order = [rank(a, now, max_wait_s) < rank(b, now, max_wait_s) for now in times]
    assert sum(before != after for before, after in pairwise(order)) <= 1
    if a.arrival_s != b.arrival_s:
        assert order[-1] == (a.arrival_s < b.arrival_s)
