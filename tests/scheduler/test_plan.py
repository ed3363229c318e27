"""The plan of a step against its definition, request by request."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchserve.decoding_length.step_time import StepLoad
from batchserve.request import ResolvedSpeculation
from batchserve.request_table import RequestTable
from batchserve.scheduler.plan import SchedulerOutput, lay_plan
from tests.factories import examples, make_request
from tests.scheduler.scheduled import ScheduledRequest, each_scheduled

MAX_MODEL_LEN = 40

# Of a request: its prompt, how much of it is computed, the rows of the step, its max_tokens, what memory leaves for
# drafts (-1: it is not drafted), what it allows, and how deep.
FACTS = st.tuples(
    st.integers(1, 30),
    st.integers(0, 29),
    st.integers(1, 30),
    st.integers(1, 12),
    st.integers(-1, 9),
    st.integers(0, 9),
    st.integers(1, 6),
)


def planned(all_facts: list[tuple[int, ...]], share: int) -> tuple[SchedulerOutput, list[ScheduledRequest]]:
    """The plan, and what it should be."""
    requests, counts, rooms, expected = [], [], {}, []
    for i, (length, computed, rows, max_tokens, room, most, branch_length) in enumerate(all_facts):
        computed = min(computed, length - 1)
        rows = min(rows, length - computed)
        speculation = ResolvedSpeculation("trie", most, branch_length)
        request = make_request(f"r{i}", [7] * length, max_tokens=max_tokens, speculation=speculation)
        request.num_computed_tokens = computed
        requests.append(request)
        counts.append(rows)
        if room >= 0:
            rooms[i] = room + 1
        # The bonus token comes on top: of max_tokens all but one may be drafted, and of the context all but one place.
        row_depth = MAX_MODEL_LEN - length - 1
        depth, budget = min(max_tokens - 1, row_depth), min(share, room, most)
        draft = (budget, min(depth, branch_length), row_depth) if depth > 0 and budget > 0 else (0, 0, 0)
        expected.append(ScheduledRequest(request, rows, computed + rows == length, *draft))
    names, table = [request.request_id for request in requests], RequestTable()
    for request in requests:
        table.add(request)
    slots = integers([request.slot for request in requests])
    draftable = integers([*rooms]), integers([*rooms.values()])
    bounds, planned_of = (share, MAX_MODEL_LEN), (table.rows, slots, integers(counts))
    return lay_plan(requests, names, planned_of, draftable, [], 50, bounds), expected


def integers(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.int64)


def load_of(scheduled: list[ScheduledRequest]) -> StepLoad:
    contexts = [item.request.num_computed_tokens for item in scheduled]
    rows = [item.num_scheduled_tokens for item in scheduled]
    attended = sum(context * count for context, count in zip(contexts, rows, strict=True))
    return StepLoad(sum(rows), sum(i.is_sampled for i in scheduled), len(scheduled), sum(contexts), attended)


@examples(200)
@given(st.lists(FACTS, max_size=6), st.integers(0, 9))
def test_a_plan_is_what_it_is_request_by_request(all_facts: list[tuple[int, ...]], share: int) -> None:
    plan, expected = planned(all_facts, share)
    assert each_scheduled(plan) == expected
    assert plan.drafted.tolist() == [place for place, item in enumerate(expected) if item.max_draft_tokens]
    assert plan.is_decoding.tolist() == [item.is_decoding for item in expected]
    assert plan.load == load_of(expected)
    assert plan.decoding == load_of([item for item in expected if item.is_decoding])


@examples(100)
@given(st.lists(st.tuples(FACTS, st.integers(-1, 5)), max_size=6))
def test_drafts_add_their_rows_and_what_these_attend_to(drawn: list[tuple[tuple[int, ...], int]]) -> None:
    """-1: the request has no tree."""
    plan, scheduled = planned([facts for facts, _ in drawn], 9)
    sizes = [size for _, size in drawn]
    places = [place for place, size in enumerate(sizes) if size >= 0]
    starts = np.cumsum([0, *(sizes[place] for place in places)])
    rows = sum(sizes[place] for place in places)
    attended = sum(sizes[place] * scheduled[place].request.num_computed_tokens for place in places)
    before = plan.load
    assert plan.load_with(np.array(places, np.int64), starts) == StepLoad(
        before.num_rows + rows,
        before.num_logit_rows + rows,
        before.num_requests,
        before.context_tokens,
        before.attended_tokens + attended,
    )
