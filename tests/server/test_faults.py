"""The engine fails: every request in flight ends with INTERNAL, once; the server goes on if it can, and says if not."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from batchserve.errors import EngineFaultError
from batchserve.server import lifecycle
from batchserve.server_config import ServerConfig
from tests.server.conftest import Serve
from tests.server.harness import Client, Served, ask, core_of, failure_of


def _fail_once(served: Served, name: str) -> None:
    """The next call of one of the core's methods raises."""
    core: Any = core_of(served.engine)
    real = getattr(core, name)

    def failing(*arguments: Any) -> None:
        setattr(core, name, real)
        raise ZeroDivisionError("secret")

    setattr(core, name, failing)


async def _in_flight(served: Served, count: int) -> list[asyncio.Task[Any]]:
    """Streams that have had their first tokens: the core has them all."""
    calls = [aiter(served.client.stub.StreamGenerate(ask(max_tokens=400))) for _ in range(count)]
    for call in calls:
        assert (await anext(call)).WhichOneof("event") == "started"
        assert (await anext(call)).WhichOneof("event") == "delta"
    return [asyncio.create_task(failure_of(_rest(call))) for call in calls]


async def _rest(call: Any) -> list[Any]:
    return [message async for message in call]


@pytest.mark.parametrize("name", ["step", "add"])
async def test_a_failed_step_ends_the_requests_in_flight_and_the_next_ones_are_served(tiny: Served, name: str):
    wanted = (await tiny.client.generate(ask())).token_ids
    tasks = await _in_flight(tiny, 4)
    _fail_once(tiny, name)
    if name == "add":
        tasks.append(asyncio.create_task(failure_of(tiny.client.stream(ask()))))
    async with asyncio.timeout(20):
        failures = await asyncio.gather(*tasks)
    for failed in failures:
        assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_FAULT")
        assert "secret" not in failed.message
    assert (await tiny.client.generate(ask())).token_ids == wanted
    assert await tiny.client.health_of() == "SERVING"


async def test_an_engine_that_cannot_go_on_ends_everything_and_the_server_says_so(serve_tiny: Serve):
    async with serve_tiny(is_sound=False) as served:
        tasks = await _in_flight(served, 4)
        _fail_once(served, "abort_all")
        _fail_once(served, "step")
        async with asyncio.timeout(20):
            failures = await asyncio.gather(*tasks)
            assert {failed.reason for failed in failures} == {"ENGINE_FAULT"}
            assert (await failure_of(served.client.generate(ask()))).reason == "ENGINE_FAULT"
            await served.engine.wait_failed()
            await served.server._calls.wait_idle()
        assert await served.client.health_of() == "NOT_SERVING"


async def test_the_process_ends_with_an_error_when_its_engine_cannot_go_on(monkeypatch: pytest.MonkeyPatch):
    """A supervisor restarts what has ended, not what only says that it is unwell."""
    from tests.server.fakes import FakeEngine

    monkeypatch.setattr(lifecycle.signal, "signal", lambda number, handler: None)
    engine: Any = FakeEngine()
    announced: asyncio.Queue[str] = asyncio.Queue()

    async def start_engine() -> Any:
        return engine

    running = asyncio.create_task(
        lifecycle.serve(ServerConfig(port=0, http_port=0), "test", start_engine, announced.put_nowait)
    )
    address = (await announced.get()).removeprefix("listening on ")
    client = Client(address)
    assert await client.health_of() == "SERVING"
    engine.has_failed.set()
    async with asyncio.timeout(10):
        with pytest.raises(EngineFaultError):
            await running
    assert (await failure_of(client.generate(ask()))).code is grpc.StatusCode.UNAVAILABLE
    await client.channel.close()
