"""Clients that do not read their answers: they are given up, and fill no memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from batchserve.engine import backpressure
from batchserve.engine.backpressure import Backlog, BackpressureLimits
from batchserve.server_config import ServerConfig
from batchserve.types import Delta, GenerateCall
from batchserve.v1 import generation_pb2 as pb
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine
from tests.server.harness import Served, ask, serving
from tests.server.raw_http2 import RawClient

pytestmark = pytest.mark.faults
RESOURCE_EXHAUSTED = b"grpc-status\x018"


@asynccontextmanager
async def unread_by(served: Served, is_deaf: bool = False) -> AsyncIterator[RawClient]:
    client = await RawClient.connect(served.address, is_deaf)
    try:
        yield client
    finally:
        await client.close()


def answering() -> Any:
    """An engine that answers at once."""
    engine = FakeEngine()
    engine.go_on.set()
    return engine


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("method", ["StreamGenerate", "Generate", "GetModelInfo"])
async def test_an_answer_that_nobody_reads_is_ended_after_its_time(method: str):
    engine = answering()
    async with (
        serving(engine, ServerConfig(port=0, http_port=0, unread_timeout_s=0.5)) as served,
        unread_by(served) as client,
    ):
        request = pb.GetModelInfoRequest() if method == "GetModelInfo" else ask()
        streams = [await client.call(method, request) for _ in range(300)]
        counts = served.server._calls.failed_calls
        await until(lambda: counts["UNREAD_ANSWER"] == len(streams))
        await served.settle()
        for stream in streams:
            client.read_on(stream)
        await until(lambda: len(client.trailers) == len(streams))
        assert all(RESOURCE_EXHAUSTED in trailer for trailer in client.trailers.values())
        assert all(b"does not take its answer" in trailer for trailer in client.trailers.values())
        assert len((await served.client.generate(ask())).token_ids) == 2, "others are served"


async def test_calls_of_a_client_that_does_not_read_its_connection_are_ended(caplog: pytest.LogCaptureFixture):
    engine = answering()
    short = engine.events

    async def events(call: GenerateCall, **options: Any) -> AsyncIterator[Any]:
        async with aclosing(short(call, **options)) as inner:
            async for event in inner:
                yield replace(event, text="a" * (1 << 20)) if isinstance(event, Delta) else event

    engine.events = events
    async with (
        serving(engine, ServerConfig(port=0, http_port=0, unread_timeout_s=0.5)) as served,
        unread_by(served, True) as client,
    ):
        counts = served.server._calls.failed_calls
        for _ in range(20):  # they fill the socket, whose buffers grow to some megabytes
            await client.call("Generate", ask())
        await until(lambda: counts["UNREAD_ANSWER"] > 0)
        await served.settle()
        num_full = counts["UNREAD_ANSWER"]
        for _ in range(20):  # not even their headers can be sent
            await client.call("StreamGenerate", ask())
        await until(lambda: counts["UNREAD_ANSWER"] == num_full + 20)
        await served.settle()
        assert served.server._calls.unread.writing == {}
        assert len(await served.client.stream(ask())) > 2, "others are served"
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_stream_that_leaves_too_much_unread_is_ended_while_it_is_made(serve_tiny: Serve):
    config = ServerConfig(port=0, http_port=0, unread_timeout_s=600, max_unread_deltas=100)
    async with serve_tiny(server=config, decoding_length=0) as served, unread_by(served) as client:
        await client.call("StreamGenerate", ask(max_tokens=400))
        counts = served.server._calls.failed_calls
        for _ in range(4):  # as many in all, and read; each has too few deltas to be ended, however late they are read
            messages = await served.client.stream(ask(max_tokens=99))
            assert messages[-1].finished.usage.completion_tokens == 99
        await until(lambda: counts["UNREAD_ANSWER"] == 1)
        await until(lambda: served.engine.num_in_flight == 0)
        assert served.server._calls.unread.num_deltas == 0
        assert counts.total() == 1


async def test_of_all_streams_together_the_longest_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backpressure, "STREAMS_PER_BOUND", 2)
    bounds = BackpressureLimits(max_deltas=10, timeout_s=600)

    async def stream(num_deltas: int) -> Backlog:
        with Backlog(bounds) as backlog:
            writing = asyncio.create_task(backlog.write(asyncio.Event().wait()))
            await asyncio.sleep(0)
            for _ in range(num_deltas):
                backlog.grow()
            await writing
        return backlog

    calls = [asyncio.create_task(stream(num_deltas)) for num_deltas in (9, 8, 4)]
    done, left = await asyncio.wait(calls, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert done == {calls[0]}
    assert isinstance(calls[0].exception(), TimeoutError)
    assert bounds.num_deltas == 12
    for call in left:
        call.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert (bounds.num_deltas, bounds.writing) == (0, {})


async def test_who_is_waited_for_the_longest_makes_room_for_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backpressure, "MAX_WRITING", 3)
    monkeypatch.setattr(backpressure, "MIN_WAIT_S", 0.0)
    bounds = BackpressureLimits(max_deltas=10, timeout_s=600)
    calls = []
    for _ in range(8):
        calls.append(asyncio.create_task(Backlog(bounds).write(asyncio.Event().wait())))
        await asyncio.sleep(0.01)
    assert [call.done() for call in calls] == [True] * 5 + [False] * 3
    for call in calls[5:]:
        call.cancel()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(end) for end in ends[:5]] == [TimeoutError] * 5


async def test_a_client_that_reads_late_but_in_time_gets_its_whole_answer():
    async with serving(answering()) as served, unread_by(served) as client:
        stream = await client.call("StreamGenerate", ask())
        await until(lambda: served.server._calls.num_calls == 1)
        await asyncio.sleep(0.2)
        client.read_on(stream)
        await until(lambda: stream in client.trailers)
        assert b"grpc-status\x010" in client.trailers[stream]
