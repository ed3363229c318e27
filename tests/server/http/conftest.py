"""A server with the bundled model, for all tests of a module, and the OpenAI client that speaks to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import openai
import pytest_asyncio

from batchserve.config import EngineConfig, MiB
from batchserve.engine.async_engine import AsyncEngine
from tests.server.conftest import assert_nothing_leaked
from tests.server.harness import Served, serving


class Answer(NamedTuple):
    """A response as it came over the socket."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, "[DONE]" included."""
        found = [each.removeprefix("data: ") for each in self.body.decode().split("\n\n") if each]
        return [each if each == "[DONE]" else json.loads(each) for each in found]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    """A server with the bundled model in fp32. Drafts are of one length: steps do not depend on what time they take."""
    config = EngineConfig(dtype="float32", kv_cache_memory=64 * MiB, wait_for_drafter=True, decoding_length=8)
    engine = await AsyncEngine.start(config)
    async with serving(engine) as served:
        yield served
        await served.settle()
    assert_nothing_leaked(engine)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client
