"""An engine whose step never ends: health says so, and says when it goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from batchserve.errors import ConfigError, EngineFaultError
from batchserve.server.grpc.servicer import SERVICE_NAME
from batchserve.server.stall_watch import watch_for_stalls
from batchserve.server_config import ServerConfig
from tests.server.harness import Served, ask, core_of, failure_of, serving

TIMEOUT_S = 0.2


class Answering:
    """An engine that answers while `is_alive` is set, with `error` where there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_alive = asyncio.Event()
        self.is_alive.set()
        self.num_pings = 0

    async def ping(self) -> None:
        self.num_pings += 1
        await self.is_alive.wait()
        if self.error is not None:
            raise self.error


@asynccontextmanager
async def watched(engine: Answering) -> AsyncIterator[asyncio.Queue[bool]]:
    """What is told of it."""
    told: asyncio.Queue[bool] = asyncio.Queue()
    watching = asyncio.create_task(watch_for_stalls(engine, TIMEOUT_S, told.put))  # type: ignore[arg-type]
    yield told
    assert not watching.done()
    watching.cancel()


@pytest.mark.parametrize("error", [None, EngineFaultError("mended, or not")])
async def test_nothing_is_told_of_an_engine_that_answers(error: Exception | None):
    engine = Answering(error)
    async with watched(engine) as told:
        await asyncio.sleep(3 * TIMEOUT_S)
        assert engine.num_pings > 5
        assert told.empty()


async def test_that_it_does_not_answer_is_told_once_and_so_is_that_it_does_again(caplog: pytest.LogCaptureFixture):
    engine = Answering()
    async with asyncio.timeout(20), watched(engine) as told:
        engine.is_alive.clear()
        assert await told.get() is False
        await asyncio.sleep(3 * TIMEOUT_S)
        assert told.empty(), "only an answer says that it is over"
        engine.is_alive.set()
        assert await told.get() is True
    messages = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert messages == ["the engine has not answered for 0.2 s: a step does not end", "the engine answers again"]


async def test_an_engine_that_fails_while_it_stands_still_is_not_said_to_go_on():
    engine = Answering(EngineFaultError("killed"))
    async with asyncio.timeout(20), watched(engine) as told:
        engine.is_alive.clear()
        assert await told.get() is False
        engine.is_alive.set()
        await asyncio.sleep(3 * TIMEOUT_S)
        assert told.empty()
        engine.error = None  # it was mended
        assert await told.get() is True


async def test_health_follows_a_step_that_does_not_end_though_nobody_waits_any_more(tiny: Served):
    core, may_go_on, is_stuck = core_of(tiny.engine), threading.Event(), threading.Event()
    step = core.step

    def stuck() -> None:
        is_stuck.set()
        may_go_on.wait(30)
        step()

    core.step = stuck  # type: ignore[method-assign]
    async with serving(tiny.engine, ServerConfig(port=0, http_port=0, stall_timeout_s=1.0)) as watched:
        watch = watched.client.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        seen: list[Any] = [(await watch.read()).status]
        await failure_of(watched.client.generate(ask(max_tokens=3), timeout=0.5))
        async with asyncio.timeout(20):
            seen.append((await watch.read()).status)
            assert is_stuck.is_set()
            await asyncio.sleep(0.5)
            assert await watched.client.health_of() == "NOT_SERVING"
            may_go_on.set()
            seen.append((await watch.read()).status)
        answer = await watched.client.generate(ask(max_tokens=3))
        assert len(answer.token_ids) == 3
        names = [health_pb2.HealthCheckResponse.ServingStatus.Name(status) for status in seen]
        assert names == ["SERVING", "NOT_SERVING", "SERVING"]


@pytest.mark.parametrize("seconds", [0, 0.5, float("inf")])
def test_the_time_is_bounded(seconds: float):
    with pytest.raises(ConfigError, match=r"stall_timeout_s = .*: must be finite and at least 1"):
        ServerConfig(stall_timeout_s=seconds)
