"""Who comes first, and how much of a prompt a step carries beside those who are answering."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.request import Request
from batchserve.scheduler.policy import CHUNK_STEP, LEAST_CHUNK, prefill_rows, prompt_rank, rank
from batchserve.scheduler.step_time import StepLoad, StepTimeModel, StepTimeTable
from tests.factories import examples, make_request

TABLE = StepTimeTable((4, 64, 1024), (0.010, 0.016, 0.160), 0.0002, 0.00001, 1e-7, 1e-7)


def request(priority: int = 0, arrival_s: float = 0.0) -> Request:
    made = make_request("r", [5])
    made.priority, made.arrival_s = priority, arrival_s
    return made


def decoding(*contexts: int) -> list[Request]:
    requests = [make_request("r", [5] * (context + 1)) for context in contexts]
    for each in requests:
        each.num_computed_tokens = each.num_prompt_tokens - 1
    return requests


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
        each.prompt_token_ids = each.token_ids = [5] * length
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


@examples(300)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=16),
    st.integers(0, 64),
    st.integers(1, 5),
    st.integers(0, 2000),
    st.integers(1, 1024),
    st.floats(1.0, 4.0),
    st.one_of(st.none(), st.floats(0.001, 0.2)),
    st.lists(st.tuples(st.integers(1, 1024), st.floats(0.2, 5.0)), max_size=20),
)
def test_the_step_stays_within_its_bound_and_is_as_large_as_that_allows(
    contexts: list[int],
    num_draft_rows: int,
    num_prompts: int,
    context_len: int,
    max_rows: int,
    inflation: float,
    max_step_s: float | None,
    seen: list[tuple[int, float]],
) -> None:
    """As the step-time model says, whatever it has learned."""
    model = StepTimeModel(TABLE)
    for num_rows, factor in seen:
        load = StepLoad(num_rows, num_rows, 1)
        model.observe(load, factor * model.predict(load))
    before = decoding(*contexts), num_draft_rows
    rows = prefill_rows(model, *before, num_prompts, context_len, max_rows, inflation, max_step_s)
    count, context = len(contexts), sum(contexts)

    def seconds(more: int, drafts: int) -> float:
        attended = context * (count + drafts) // count + more * context_len
        load = StepLoad(count + drafts + more, count + drafts, count + 1, context + context_len, attended)
        return model.predict(load)

    quiet_s = model.predict(
        StepLoad(
            count + num_draft_rows, count + num_draft_rows, count, context, context * (count + num_draft_rows) // count
        )
    )

    def fits(more: int) -> bool:
        is_short = seconds(more, num_draft_rows) <= quiet_s * (1.0 + (inflation - 1.0) * num_prompts) * (1 + 1e-9)
        return is_short and (max_step_s is None or seconds(more, 0) <= max_step_s * (1 + 1e-9))

    assert min(LEAST_CHUNK, max_rows) <= rows <= max_rows
    assert rows <= LEAST_CHUNK or fits(rows)
    if not seen and rows + CHUNK_STEP <= max_rows:
        assert not fits(rows + CHUNK_STEP)


def test_more_prompts_may_take_more_but_never_more_than_the_hard_bound() -> None:
    model, running = StepTimeModel(TABLE), decoding(100, 100)
    one, two, eight = (prefill_rows(model, running, 0, n, 0, 1024, 1.25, None) for n in (1, 2, 8))
    assert LEAST_CHUNK < one < two < eight < 1024
    hard = [prefill_rows(model, running, 0, n, 0, 1024, 1.25, 0.015) for n in (1, 2, 8)]
    assert hard[0] == one
    assert hard[0] < hard[1] == hard[2] < eight


@pytest.mark.parametrize("max_step_s", [None, 0.001])
def test_a_prompt_goes_on_whatever_the_bound_and_alone_it_has_none(max_step_s: float | None) -> None:
    model = StepTimeModel(TABLE)
    assert prefill_rows(model, decoding(100), 0, 1, 0, 1024, 1.0, max_step_s) == LEAST_CHUNK
    assert prefill_rows(model, decoding(100), 0, 1, 0, 3, 1.0, max_step_s) == 3
    assert prefill_rows(model, [], 0, 1, 0, 1024, 1.0, max_step_s) == 1024
