"""The queue of those who wait against a list that is searched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.request import Request
from batchserve.scheduler.policy import rank
from batchserve.scheduler.waiting import WaitingQueue
from tests.factories import examples, make_request

MAX_WAIT_S = 3.0


def request(priority: int, arrival_s: int, deadline_s: int | None) -> Request:
    made = make_request("r", [5], deadline_s=deadline_s)
    made.priority, made.arrival_s = priority, arrival_s
    return made


requests = st.builds(request, st.integers(-1, 1), st.integers(0, 6), st.none() | st.integers(0, 12))


@examples(300)
@given(st.lists(st.one_of(st.tuples(st.booleans(), requests), st.integers(0, 20)), max_size=40))
def test_it_is_a_sorted_list(what: list[tuple[bool, Request] | int]) -> None:
    queue, line = WaitingQueue(MAX_WAIT_S), list[Request]()
    for each in what:
        if isinstance(each, int):
            if not line:
                continue
            gone = line.pop(each % len(line))
            queue.remove(gone)
            assert gone not in queue
        elif each[0]:
            line.append(each[1])
            queue.add(each[1])
        else:
            line.insert(0, each[1])
            queue.put_back(each[1])
        assert len(queue) == len(line)
        assert set(queue) == set(line)
        for now_s in range(0, 13, 2):
            late = {r for r in line if r.deadline_s is not None and r.deadline_s <= now_s}
            assert set(queue.expired(now_s)) == late
            if line:
                first = min(line, key=lambda r: rank(r, now_s, MAX_WAIT_S))
                assert queue.first(now_s) is first, "of equals the one that stands first"
                is_overdue = now_s - first.arrival_s > MAX_WAIT_S
                ordered = sorted(line, key=lambda r: rank(r, now_s, MAX_WAIT_S))
                assert queue.foremost(now_s, 3) == ([first] if is_overdue else ordered[:3])


def test_who_does_not_wait_cannot_be_taken_out() -> None:
    queue = WaitingQueue(MAX_WAIT_S)
    with pytest.raises(KeyError):
        queue.remove(request(0, 0, None))
