"""A request's legal life, its counts and its times."""

from __future__ import annotations

import itertools

import pytest

from batchserve.request import RequestStatus
from tests.factories import make_request

WAITING, RUNNING, FINISHED = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED
LEGAL = {(WAITING, RUNNING), (RUNNING, WAITING), (WAITING, FINISHED), (RUNNING, FINISHED)}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RequestStatus, repeat=2)))
def test_only_legal_transitions_pass(old: RequestStatus, new: RequestStatus) -> None:
    request = make_request("a", [1, 2])
    request.status = old
    if (old, new) in LEGAL:
        request.move_to(new)
        assert request.status is new
        assert request.is_finished == (new is FINISHED)
    else:
        with pytest.raises(RuntimeError, match="'a'"):
            request.move_to(new)
        assert request.status is old


def test_counts_follow_the_tokens() -> None:
    prompt = [1, 2, 3]
    request = make_request("a", prompt)
    request.num_computed_tokens = 2
    request.token_ids += [7, 8]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_pending_tokens) == (3, 2, 3)
    assert prompt == [1, 2, 3]  # the caller's list is not written to
    usage = request.usage(1)
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 1)


def test_times_count_from_arrival_and_what_has_not_happened_is_now() -> None:
    request = make_request("a", [1])
    request.arrival_s = 10.0
    assert request.timing(15.0).queue_s == request.timing(15.0).total_s == 5.0
    request.first_scheduled_s, request.first_token_s, request.last_token_s = 11.0, 13.0, 14.0
    timing = request.timing(99.0)
    assert (timing.queue_s, timing.first_token_s, timing.total_s) == (1.0, 3.0, 4.0)


def test_two_requests_are_never_equal() -> None:
    """They are found in queues by identity, not by what they contain."""
    assert make_request("a", [1]) != make_request("a", [1])
