"""Servers: one with a fake engine, one with a real engine and a tiny random model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from batchserve.config import EngineConfig, MiB
from batchserve.engine.async_engine import AsyncEngine
from batchserve.server_config import ServerConfig
from tests.server.fakes import FakeEngine
from tests.server.harness import LOOPBACK, Served, core_of, serving

Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
async def fake() -> AsyncIterator[Served]:
    """A server with a fake engine."""
    engine: Any = FakeEngine()
    async with serving(engine) as served:
        yield served


@pytest.fixture
def serve_tiny(tiny_model: dict[str, Path]) -> Serve:
    """Makes a server with a tiny llama in fp32; at its end nothing may be leaked.

    `step_s`: a step's least time. `server`: how it listens.
    `is_sound=False`: the engine is to fail for good, so that its books need not agree.
    """

    @asynccontextmanager
    async def make(
        step_s: float = 0.0, is_sound: bool = True, server: ServerConfig = LOOPBACK, **options: Any
    ) -> AsyncIterator[Served]:
        config = EngineConfig(
            **{
                "model": str(tiny_model["llama"]),
                "dtype": "float32",
                "kv_cache_memory": 32 * MiB,
                "wait_for_drafter": True,
                **options,
            }
        )
        engine = await AsyncEngine.start(config)
        _slow_down(engine, step_s)
        async with serving(engine, server) as served:
            yield served
            await served.settle()
        if is_sound:
            assert_nothing_leaked(engine)

    return make


@pytest.fixture
async def bundled() -> AsyncIterator[Served]:
    """A server with the bundled model in fp32. Drafts are of one length: steps do not depend on what time they take."""
    config = EngineConfig(dtype="float32", kv_cache_memory=64 * MiB, wait_for_drafter=True, decoding_length=8)
    engine = await AsyncEngine.start(config)
    async with serving(engine) as served:
        yield served
        await served.settle()
    assert_nothing_leaked(engine)


@pytest.fixture
async def tiny(serve_tiny: Serve) -> AsyncIterator[Served]:
    """A server with a tiny llama and the default options."""
    async with serve_tiny() as served:
        yield served


def _slow_down(engine: AsyncEngine, step_s: float) -> None:
    """Make every step last at least this long, so that an answer's time has a lower bound on any machine."""
    step = core_of(engine).step

    def slow_step() -> None:
        time.sleep(step_s)
        step()

    if step_s > 0:
        core_of(engine).step = slow_step


def assert_nothing_leaked(engine: AsyncEngine) -> None:
    """After shutdown: no request, no K/V memory in use, and the books agree."""
    core = core_of(engine)
    core.check_integrity()
    allocator = core.executor.allocator
    assert not core.has_work
    assert allocator.free_tokens == allocator.total_tokens
    assert engine.num_in_flight == 0
    assert engine._closed is not None
    assert engine._closed.reason == "UNAVAILABLE", "the engine found itself inconsistent"
