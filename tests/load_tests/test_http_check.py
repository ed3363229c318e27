"""Malformed HTTP streams and wrong counts are told from good ones."""

from __future__ import annotations

import json
from itertools import count

import pytest

from load_tests.http_check import FailedInStreamError, consume_http, error_text, sse_data
from load_tests.stream_check import StreamShapeError
from load_tests.workloads import Item

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
CHAT, PROMPT = Item(None, ({"role": "user", "content": "x"},)), Item("x")
ROLE = {"delta": {"role": "assistant", "content": ""}}
DONE = "[DONE]"


def chunk(choice=None, usage=None, **head):
    choices = [] if choice is None else [{"index": 0, "finish_reason": None, "token_ids": [], **choice}]
    return {**HEAD, "choices": choices, "usage": usage, **head}


def text(content, *token_ids, **more):
    return chunk({"delta": {"content": content}, "token_ids": list(token_ids), **more})


def usage(completion=4, prompt=3, total=None, drafted=5, accepted=1):
    details = {"draft_tokens": drafted, "accepted_draft_tokens": accepted, "reasoning_tokens": 0}
    total = prompt + completion if total is None else total
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    return chunk(usage={**counts, "completion_tokens_details": details})


def body_of(*events):
    return b"".join(b"data: " + (e if isinstance(e, str) else json.dumps(e)).encode() + b"\n\n" for e in events)


def consumed(*events, item=CHAT, is_speculating=True, parts=None):
    ticks = count(1)
    request = item.http_body(is_speculating, 8)
    return consume_http(request, parts or [body_of(*events)], lambda: float(next(ticks)), sent_s=0.0)


LAST = text("d", 4, finish_reason="stop")
GOOD = [chunk(ROLE), text("a", 1), text("bc", 2, 3), LAST, usage(), DONE]


def test_a_good_stream_and_its_latencies():
    record = consumed(*GOOD)
    assert record.ttft_s == 2.0, "the chunk with the role has no token"
    assert record.inter_token_latencies_s() == [0.5, 0.5, 1.0]
    assert (record.usage.completion_tokens, record.usage.accepted_draft_tokens) == (4, 1)
    assert record.end_to_end_s == 7.0


def test_events_may_be_cut_anywhere():
    whole = body_of(*GOOD)
    record = consumed(parts=[whole[i : i + 7] for i in range(0, len(whole), 7)])
    assert sum(tokens for _, tokens in record.arrivals) == 4


def test_a_good_completion():
    head = {"object": "text_completion"}
    first, last = ({"text": "a", "token_ids": [1]}, {"text": "b", "token_ids": [2], "finish_reason": "length"})
    stream = [chunk(first, **head), chunk(last, **head), usage(2) | head, DONE]
    assert consumed(*stream, item=Item("x", max_tokens=2)).usage.completion_tokens == 2
    with pytest.raises(StreamShapeError, match="2 tokens = max_tokens 8 where that was the reason"):
        consumed(*stream, item=PROMPT)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "ended before [DONE]"),
        (GOOD[:-1], "ended before [DONE]"),
        ([*GOOD, DONE], "an event after [DONE]"),
        ([*GOOD[:-2], DONE], "[DONE] before the usage"),
        ([chunk(ROLE), DONE], "[DONE] before a finish reason"),
        ([chunk(ROLE), text("a", 1), usage(1)], "a usage before the finish reason"),
        ([*GOOD[:-1], usage()], "a second usage"),
        ([*GOOD[:-2], text("e", 5)], "a choice after its finish reason"),
        ([text("a", 1)], "a delta before the role"),
        ([chunk(ROLE), chunk(ROLE)], "a second role"),
        ([chunk({"delta": {"role": "user"}})], "role = 'user': must be 'assistant'"),
        ([chunk(ROLE), text(7)], "must be an object with a text"),
        ([chunk(ROLE), text("a", "1")], "token_ids = ['1']: must be a list of integers"),
        ([chunk(ROLE), text("a", 1, index=1)], "index = 1: must be 0"),
        ([chunk(ROLE), text("a", 1, finish_reason="tired")], "finish_reason = 'tired': must be one of stop, length"),
        ([chunk(ROLE), {**text("a", 1), "id": "other"}], "a chunk of another stream"),
        ([chunk(ROLE, object="text_completion")], "object = 'text_completion': must be 'chat.completion.chunk'"),
        ([chunk(ROLE, id="")], "a chunk without an id"),
        ([{**chunk(ROLE), "choices": [1, 2]}], "must be a list of one, or empty"),
        ([chunk(ROLE, usage={"prompt_tokens": 1})], "a usage before the last chunk"),
        (["nonsense"], "an event that is not JSON"),
        (["[1]"], "an event that is not an object"),
        ([*GOOD[:-2], chunk(usage={}), DONE], "must have the counts prompt_tokens, completion_tokens, total_tokens"),
        ([*GOOD[:-2], usage(5), DONE], "4 tokens delivered = completion_tokens 5"),
        ([*GOOD[:-2], usage(total=9), DONE], "total_tokens 9 = prompt_tokens + completion_tokens"),
        ([*GOOD[:-2], usage(prompt=0), DONE], "prompt_tokens 0 > 0"),
        ([*GOOD[:-2], usage(drafted=1, accepted=2), DONE], "accepted 2 <= drafted 1"),
    ],
)
def test_a_bad_stream_is_refused_with_what_is_wrong(events, message):
    with pytest.raises(StreamShapeError) as caught:
        consumed(*events, parts=[body_of(*events)])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"data: 1\n\ndata: 2", "ended in the midst of an event"),
        (b"event: x\ndata: 1\n\n", "not one line of data"),
        (b": comment\n\n", "not one line of data"),
        (b"data: \xff\n\n", "not UTF-8"),
    ],
)
def test_a_body_that_is_not_of_events_is_refused(body, message):
    with pytest.raises(StreamShapeError, match=message):
        [*sse_data([body])]


def test_drafts_without_speculation_are_refused():
    with pytest.raises(StreamShapeError, match="drafted 5 = 0 without speculation"):
        consumed(*GOOD, is_speculating=False)


def test_an_error_in_the_stream_is_the_servers():
    error = {"error": {"message": "gone", "type": "server_error", "param": None, "code": "unavailable"}}
    with pytest.raises(FailedInStreamError, match="unavailable: gone"):
        consumed(chunk(ROLE), error, DONE)
    assert "not an error of the OpenAI API" in error_text({"detail": "x"})
