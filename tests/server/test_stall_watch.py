"""An engine whose step never ends: health says so, and says when it goes on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from batchserve.config import ServerConfig
from batchserve.errors import ConfigError
from batchserve.metrics import MetricsReading
from batchserve.server.servicer import SERVICE_NAME
from batchserve.server.stall_watch import watch_for_stalls
from tests.server.harness import Served, ask, core_of, serving

TIMEOUT_S = 0.2


class Steps:
    """The number of steps that an engine of so many requests has done."""

    def __init__(self, num_in_flight: int) -> None:
        self.num_in_flight = num_in_flight
        self.count = 0.0
        self.metrics = self

    def reading(self) -> MetricsReading:
        return MetricsReading(values={"steps_total": self.count})


async def told(engine: Steps, is_stepping: bool) -> list[bool]:
    """What is told within some timeouts."""
    heard: list[bool] = []

    async def tell(is_serving: bool) -> None:
        heard.append(is_serving)

    watching = asyncio.create_task(watch_for_stalls(engine, TIMEOUT_S, tell))  # type: ignore[arg-type]
    for _ in range(80):
        engine.count += is_stepping
        await asyncio.sleep(TIMEOUT_S / 20)
    watching.cancel()
    return heard


@pytest.mark.parametrize(("num_in_flight", "is_stepping"), [(0, False), (0, True), (3, True)])
async def test_whoever_has_nothing_to_do_or_gets_on_does_not_stand_still(num_in_flight: int, is_stepping: bool):
    assert not await told(Steps(num_in_flight), is_stepping)


async def test_standing_still_is_told_once():
    assert await told(Steps(1), is_stepping=False) == [False]


async def test_health_follows_a_step_that_does_not_end_and_goes_on_behind_it(tiny: Served):
    core, may_go_on, is_stuck = core_of(tiny.engine), threading.Event(), threading.Event()
    step = core.step

    def stuck() -> None:
        is_stuck.set()
        may_go_on.wait(30)
        step()

    core.step = stuck  # type: ignore[method-assign]
    async with serving(tiny.engine, ServerConfig(port=0, stall_timeout_s=1.0)) as watched:
        watch = watched.client.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        seen = [(await watch.read()).status]
        answer = asyncio.create_task(watched.client.generate(ask(max_tokens=3)))
        async with asyncio.timeout(20):
            seen.append((await watch.read()).status)
            assert is_stuck.is_set()
            may_go_on.set()
            seen.append((await watch.read()).status)
        assert len((await answer).token_ids) == 3
        names: list[Any] = [health_pb2.HealthCheckResponse.ServingStatus.Name(status) for status in seen]
        assert names == ["SERVING", "NOT_SERVING", "SERVING"]


@pytest.mark.parametrize("seconds", [0, 0.5, float("inf")])
def test_the_time_is_bounded(seconds: float):
    with pytest.raises(ConfigError, match=r"stall_timeout_s = .*: must be finite and at least 1"):
        ServerConfig(stall_timeout_s=seconds)
