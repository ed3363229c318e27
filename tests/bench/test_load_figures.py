"""The arithmetic of `bench serve`: when requests are sent, what a stream holds, and the figures of known records."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from typing import Any

import pytest

from batchserve.bench.arrivals import Extent, arrival_times_s, run_closed_loop, run_open_loop
from batchserve.bench.load_records import Latency, RequestRecord, summarise
from batchserve.bench.openai_stream import EventReader, OpenAiStream, StreamError, spread
from batchserve.bench.serve_options import Slo
from tests.fake_endpoint import text, usage


class FakeClock:
    """Time passes when somebody sleeps. The loop takes turns before each sleep ends."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    async def sleep_until(self, when_s: float) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.now_s = max(self.now_s, when_s)


def times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    return list(itertools.islice(arrival_times_s(rate, burstiness, seed), count))


def test_arrivals_are_a_poisson_process_by_seed():
    first = times(20_001, 10.0)
    assert first == times(20_001, 10.0)
    assert first[1:4] != times(4, 10.0, seed=1)[1:4]
    assert first[0] == 0.0
    gaps = [b - a for a, b in itertools.pairwise(first)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.03), "of exponential gaps it is the mean"
    assert sum(gap < 0.1 * math.log(2) for gap in gaps) == pytest.approx(10_000, rel=0.03), "nor is their median"
    even = [b - a for a, b in itertools.pairwise(times(5001, 10.0, burstiness=100.0))]
    assert statistics.fmean(even) == pytest.approx(0.1, rel=0.02)
    assert statistics.stdev(even) == pytest.approx(0.01, rel=0.1)
    assert times(3, math.inf) == [0.0, 0.0, 0.0]


async def test_an_open_loop_waits_for_no_answer():
    clock, sent, all_sent = FakeClock(), [], asyncio.Event()

    async def send(number: int, due_s: float) -> None:
        sent.append((number, due_s, clock.now()))
        if len(sent) == 5:
            all_sent.set()
        await all_sent.wait()  # no request ends before all have been sent

    await run_open_loop([0.0, 0.5, 0.5, 2.0, 7.0, 9.0], Extent(num_requests=5), clock, send)
    assert [(number, due_s) for number, due_s, _ in sent] == [(0, 0.0), (1, 0.5), (2, 0.5), (3, 2.0), (4, 7.0)]
    assert clock.now() == 7.0
    sent.clear()
    all_sent.set()
    await run_open_loop(itertools.count(0.0, 1.5), Extent(duration_s=4.0), clock, send)
    assert [due_s for _, due_s, _ in sent] == [0.0, 1.5, 3.0], "what is due at the end or after it is not sent"


async def test_a_closed_loop_keeps_so_many_in_flight():
    clock, numbers, in_flight, most = FakeClock(), [], 0, 0

    async def send(number: int, due_s: float) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        numbers.append(number)
        assert due_s == clock.now()
        await clock.sleep_until(clock.now() + 1.0)
        in_flight -= 1

    await run_closed_loop(3, Extent(num_requests=10), clock, send)
    assert (sorted(numbers), most) == (list(range(10)), 3)
    numbers.clear()
    clock.now_s = 0.0
    await run_closed_loop(1, Extent(duration_s=3.5), clock, send)
    assert numbers == [0, 1, 2, 3]


def record(number: int, due_s: float, *deltas: tuple[float, int], **fields: Any) -> RequestRecord:
    made = RequestRecord(number, due_s, sent_s=due_s, deltas=list(deltas), finish_reason="length", **fields)
    made.output_tokens = sum(count for _, count in deltas)
    made.ended_s = deltas[-1][0] if deltas else fields.get("ended_s", due_s)
    return made


def test_the_latencies_of_one_request():
    several = record(0, 1.0, (1.5, 1), (1.6, 1), (2.0, 4))
    assert several.ttft_s == pytest.approx(0.5)
    assert several.e2e_s == pytest.approx(1.0)
    assert several.tpot_s == pytest.approx(0.5 / 5), "a delta of four tokens counts as four"
    assert record(0, 0.0, (1.0, 5)).tpot_s is None, "one delta tells no time between tokens"
    assert record(0, 0.0, (1.0, 1)).tpot_s is None
    empty = record(0, 0.0, ended_s=1.0)
    assert (empty.ttft_s, empty.tpot_s, empty.e2e_s) == (None, None, 1.0)


def test_the_figures_of_known_records():
    done = [
        record(0, 0.0, (0.1, 1), (0.2, 1), (0.5, 3), prompt_tokens=10),  # TTFT 100, TPOT 100, E2E 500 ms
        record(1, 1.0, (1.4, 1), (1.5, 2), prompt_tokens=20),  # 400, 50, 500
        record(2, 1.5, (1.6, 1), prompt_tokens=30),  # 100, none, 100
    ]
    failed = [RequestRecord(3 + i, 0.0, failure=why) for i, why in enumerate(["HTTP 500", "timeout", "HTTP 500"])]
    failed[0].deltas, failed[0].output_tokens = [(0.5, 50)], 50
    found = summarise([*failed, *done], 2.0, Slo(ttft_ms=150, tpot_ms=100.001))
    assert (found.num_completed, found.num_failed, found.failures) == (3, 3, {"HTTP 500": 2, "timeout": 1})
    assert (found.requests_per_s, found.output_tokens, found.output_tokens_per_s) == (1.5, 9, 4.5)
    assert (found.prompt_tokens, found.total_tokens_per_s) == (60, 34.5)
    assert (found.num_good, found.good_requests_per_s) == (2, 1.0)
    assert found.num_by_counting == {"delta": 3}
    ttft, tpot, itl, e2e = (found.latencies[name] for name in ("TTFT", "TPOT", "ITL", "E2E"))
    assert None not in (ttft, tpot, itl, e2e)
    assert (ttft.count, ttft.mean_ms, ttft.percentiles_ms[50]) == pytest.approx((3, 200.0, 100.0))
    assert (tpot.count, tpot.mean_ms) == pytest.approx((2, 75.0))
    assert (itl.count, itl.mean_ms, itl.percentiles_ms[99]) == pytest.approx((6, 500 / 6, 100.0))
    assert e2e.percentiles_ms == pytest.approx({50: 500.0, 90: 500.0, 95: 500.0, 99: 500.0})
    assert summarise(done, 2.0, Slo(e2e_ms=499.0)).num_good == 1
    assert summarise(done, 2.0).good_requests_per_s is None
    done[1].prompt_tokens = None
    unknown = summarise(done, 2.0, num_unfinished=4)
    assert (unknown.prompt_tokens, unknown.total_tokens_per_s, unknown.num_unfinished) == (None, None, 4)
    nothing = summarise([], 0.0)
    assert (nothing.requests_per_s, nothing.latencies["ITL"]) == (0.0, None)


def test_percentiles_are_by_nearest_rank():
    latency = Latency.of([i / 1e3 for i in range(200, 0, -1)])
    assert latency is not None
    assert latency.percentiles_ms == pytest.approx({50: 100.0, 90: 180.0, 95: 190.0, 99: 198.0})
    assert latency.mean_ms == pytest.approx(100.5)


def test_an_answer_without_tokens_has_no_ttft_to_meet():
    empty = record(0, 0.0)
    assert not empty.meets(Slo(ttft_ms=1.0))
    assert empty.meets(Slo(tpot_ms=1.0, e2e_ms=1.0))


def test_events_in_any_pieces():
    data = b': a comment\n\ndata: {"a":\ndata: 1}\r\n\r\nevent: x\ndata:2\n\nid: 7\n\ndata: torn'
    for size in (1, 2, 3, 7, len(data)):
        reader = EventReader()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert [found for piece in pieces for found in reader.feed(piece)] == [b'{"a":\n1}', b"2"]


def read(*events: Any, **record_fields: Any) -> RequestRecord:
    """Reads a stream whose events come a second apart, the first at 1."""
    now, found = itertools.count(1.0), RequestRecord(0, 0.0, **record_fields)
    stream = OpenAiStream(found, lambda: next(now))
    try:
        for each in events:
            stream.feed(b"data: " + (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n\n")
    finally:
        stream.settle()
    stream.check_complete()
    return found


def test_tokens_that_each_event_tells():
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": usage(7, 0)}
    found = read(
        role,
        text("a", usage=usage(7, 1)),
        text("", usage=usage(7, 2)),  # half a character
        text("bcd", usage=usage(7, 5)),
        text("", "stop", usage=usage(7, 5)),
        {"choices": [], "usage": usage(7, 5)},
        b"[DONE]",
    )
    assert found.deltas == [(2.0, 1), (3.0, 1), (4.0, 3)]
    assert (found.prompt_tokens, found.output_tokens, found.finish_reason) == (7, 5, "stop")
    assert (found.ended_s, found.counted_by) == (5.0, "delta")


def test_tokens_that_only_the_whole_answer_tells():
    chats = [{"choices": [{"index": 0, "delta": {"content": each}}]} for each in ("", "a", "b", "c")]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": None}
    found = read(*chats, end, {"choices": [], "usage": usage(4, 8)}, b"[DONE]")
    assert (found.deltas, found.output_tokens) == ([(2.0, 3), (3.0, 3), (4.0, 2)], 8)
    assert (found.counted_by, found.prompt_tokens) == ("answer", 4)


def test_tokens_that_nobody_tells():
    found = read(text("a"), text(""), text("b", "stop"), b"[DONE]")
    assert (found.deltas, found.output_tokens) == ([(1.0, 1), (3.0, 1)], 2)
    assert (found.counted_by, found.prompt_tokens) == ("text", None)
    empty = read(text("", "stop"), b"[DONE]")
    assert (empty.deltas, empty.output_tokens, empty.ttft_s, empty.ended_s) == ([], 0, None, 1.0)


def test_tokens_are_shared_evenly():
    assert spread([1.0, 2.0, 3.0], 2) == [(1.0, 1), (2.0, 1)]
    assert spread([1.0, 2.0], 5) == [(1.0, 3), (2.0, 2)]
    assert spread([], 5) == []


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([text("a")], r"stream ended without \[DONE\]"),
        ([text("a"), b"[DONE]"], "stream ended without a finish reason"),
        ([b"{"], "malformed event"),
        ([b"[" * 100_000], "malformed event"),
        ([b"7"], "malformed event"),
        ([{"choices": {"a": 1}}], "malformed event"),
        ([{"choices": [1]}], "malformed event"),
        ([text("a", usage={"prompt_tokens": 1})], "malformed usage"),
        ([text("a", usage=usage(1, -1))], "malformed usage"),
        ([{"error": {"code": "engine_fault", "message": "x"}}], "error in the stream: engine_fault"),
        ([{"error": "x"}], "^error in the stream$"),
        ([text("a", "stop"), b"[DONE]", text("b")], r"event after \[DONE\]"),
    ],
)
def test_streams_that_are_not_complete(events: list[Any], message: str):
    with pytest.raises(StreamError, match=message):
        read(*events)


def test_what_came_before_a_failure_is_kept():
    found = RequestRecord(0, 0.0)
    stream = OpenAiStream(found, lambda: 1.0)
    stream.feed(b'data: {"choices": [{"text": "a"}]}\n\ndata: {"cho')
    stream.settle()
    with pytest.raises(StreamError):
        stream.check_complete()
    assert (found.deltas, found.output_tokens) == ([(1.0, 1)], 1)
