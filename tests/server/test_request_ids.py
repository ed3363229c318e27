"""A request's id is free for its client's next call as soon as the call that had it is over, however that ended."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.server.conftest import Serve
from tests.server.harness import Served, ask, failure_of, read_all

pytestmark = pytest.mark.faults
TIMES = 60


async def reuse(served: Served, request_id: str) -> str:
    """The id that is answered where a call has the one before's."""
    answer = await served.client.generate(ask(max_tokens=2, request_id=request_id))
    return str(answer.request_id)


@pytest.mark.parametrize("num_messages", [0, 1, 3])
async def test_after_a_cancelled_stream(tiny: Served, num_messages: int):
    for time in range(TIMES):
        call: Any = tiny.client.stub.StreamGenerate(ask(max_tokens=400, request_id=f"id {time}"))
        messages = aiter(call)
        for _ in range(num_messages):
            await anext(messages)
        call.cancel()
        assert await reuse(tiny, f"id {time}") == f"id {time}"


async def test_after_a_cancelled_call_of_one_answer(tiny: Served):
    for time in range(TIMES):
        call = asyncio.ensure_future(tiny.client.generate(ask(max_tokens=400, request_id=f"id {time}")))
        await asyncio.sleep(0.001 * (time % 8))
        call.cancel()
        assert await reuse(tiny, f"id {time}") == f"id {time}"


async def test_after_an_end_an_error_and_a_deadline(serve_tiny: Serve):
    async with serve_tiny(step_s=0.002) as served:
        for time in range(20):
            name = f"id {time}"
            await served.client.stream(ask(max_tokens=3, request_id=name))
            assert await reuse(served, name) == name
            await failure_of(served.client.generate(ask(max_tokens=5000, request_id=name)))
            assert await reuse(served, name) == name
            late = await failure_of(served.client.stream(ask(max_tokens=400, request_id=name), timeout=0.02))
            assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await reuse(served, name) == name


async def test_an_id_of_a_call_that_goes_on_is_refused_at_once(serve_tiny: Serve):
    async with serve_tiny(step_s=0.05) as served:  # its end is seconds away
        request = ask(max_tokens=200, request_id="twice", speculation={"mode": "MODE_OFF"})
        call: Any = served.client.stub.StreamGenerate(request)
        await anext(aiter(call))
        async with asyncio.timeout(5):
            refused = await asyncio.gather(*(failure_of(served.client.generate(request)) for _ in range(20)))
        assert {failed.code for failed in refused} == {grpc.StatusCode.ALREADY_EXISTS}
        assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read_all(call)
