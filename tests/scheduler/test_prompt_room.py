"""How much of prompts a step carries beside those who are answering."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from batchserve.request import Request
from batchserve.scheduler.prompt_room import CHUNK_STEP, MIN_CHUNK, PromptRoom, StepBound
from tests.factories import examples, make_request

TABLE = StepTimeTable((4, 64, 1024), (0.010, 0.016, 0.160), 0.0002, 0.00001, 1e-7, 1e-7)


def decoding(*contexts: int) -> list[Request]:
    requests = [make_request("r", [5] * (context + 1)) for context in contexts]
    for each in requests:
        each.num_computed_tokens = each.num_prompt_tokens - 1
    return requests


def room(
    running: list[Request],
    *,
    num_drafts: int = 0,
    max_rows: int = 1024,
    inflation: float = 1.25,
    max_step_s: float = math.inf,
) -> PromptRoom:
    bound = StepBound.beside(StepTimeModel(TABLE), running, num_drafts, inflation, max_step_s)
    return PromptRoom(max_rows, bound)


@examples(300)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=16),
    st.integers(0, 64),
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 300)), min_size=1, max_size=6),
    st.integers(1, 1024),
    st.floats(1.0, 4.0),
    st.one_of(st.just(math.inf), st.floats(0.001, 0.2)),
    st.lists(st.tuples(st.integers(1, 1024), st.floats(0.2, 5.0)), max_size=20),
)
def test_the_step_stays_within_its_bound_and_is_as_large_as_that_allows(
    contexts: list[int],
    num_draft_rows: int,
    prompts: list[tuple[int, int]],
    max_rows: int,
    inflation: float,
    max_step_s: float,
    seen: list[tuple[int, float]],
) -> None:
    """As the step-time model says, whatever it has learned. prompts: what each has behind it, and its tokens left."""
    model = StepTimeModel(TABLE)
    for num_rows, factor in seen:
        load = StepLoad(num_rows, num_rows, 1)
        model.observe(load, factor * model.predict(load))
    bound = StepBound.beside(model, decoding(*contexts), num_draft_rows, inflation, max_step_s)
    given_rows, left = PromptRoom(max_rows, bound), max_rows
    count, context = len(contexts), sum(contexts)
    chunks: list[tuple[int, int]] = []

    def seconds(chunks: list[tuple[int, int]], drafts: int) -> float:
        chunks = [(rows, behind) for rows, behind in chunks if rows]
        rows, behind = sum(rows for rows, _ in chunks), sum(behind for _, behind in chunks)
        attended = context * (count + drafts) // count + sum(rows * behind for rows, behind in chunks)
        load = StepLoad(count + drafts + rows, count + drafts, count + len(chunks), context + behind, attended)
        return model.predict(load)

    def fits(chunks: list[tuple[int, int]]) -> bool:
        longest_s = seconds([], num_draft_rows) * inflation * (1 + 1e-9)
        is_short = seconds(chunks, 0) <= max_step_s * (1 + 1e-9)
        return is_short and seconds(chunks, num_draft_rows) <= longest_s

    for behind, wanted in prompts:
        most = given_rows.rows_for(max_rows, behind)
        assert 0 <= most <= left
        if not seen and most + CHUNK_STEP <= left:
            assert not fits([*chunks, (most + CHUNK_STEP, behind)])
        rows = given_rows.rows_for(wanted, behind)
        assert rows == min(most, wanted)
        if rows == 0:
            continue
        given_rows.take(rows, behind)
        left -= rows
        chunks.append((rows, behind))
        assert sum(rows for rows, _ in chunks) <= MIN_CHUNK or fits(chunks)
    assert sum(rows for rows, _ in chunks) >= min(MIN_CHUNK, max_rows, sum(wanted for _, wanted in prompts))


def test_a_larger_inflation_gives_more_but_never_more_than_the_hard_bound() -> None:
    running = decoding(100, 100)
    little, more, much = (room(running, inflation=n).rows_for(1024, 0) for n in (1.25, 1.5, 3.0))
    assert MIN_CHUNK < little < more < much < 1024
    hard = [room(running, inflation=n, max_step_s=0.015).rows_for(1024, 0) for n in (1.25, 1.5, 3.0)]
    assert hard[0] == little
    assert hard[0] < hard[1] == hard[2] < much


def test_rows_behind_a_long_context_are_fewer_also_where_another_prompt_has_come_first() -> None:
    running = decoding(100, 100)
    first, alone = room(running, inflation=1.5), room(running, inflation=1.5)
    assert MIN_CHUNK < alone.rows_for(1024, 2000) < alone.rows_for(1024, 0)
    first.take(12, 0)
    assert 0 < first.rows_for(1024, 2000) < alone.rows_for(1024, 2000)
    first.take(first.rows_for(1024, 0), 0)
    assert first.rows_for(1024, 2000) == 0


@pytest.mark.parametrize("max_step_s", [math.inf, 0.001])
def test_a_prompt_goes_on_whatever_the_bound_and_alone_it_has_none(max_step_s: float) -> None:
    narrow = room(decoding(100), inflation=1.0, max_step_s=max_step_s)
    assert narrow.rows_for(1024, 3000) == MIN_CHUNK
    narrow.take(MIN_CHUNK - 1, 3000)
    assert narrow.rows_for(1024, 3000) == 1
    narrow.take(1, 3000)
    assert narrow.rows_for(1024, 0) == 0
    assert room(decoding(100), inflation=1.0, max_step_s=max_step_s, max_rows=3).rows_for(1024, 0) == 3
    assert PromptRoom(1024).rows_for(1024, 3000) == 1024
