"""`batchserve serve` as a process: start-up, signals, exit status."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.server.harness import Client, ask, failure_of, read_all

START_TIMEOUT_S = 180
NO_DRAFTER = ("--drafter", "none")  # whose compiling, in a process of its own, takes as long as the rest of a start
END_TIMEOUT_S = 60
Process = asyncio.subprocess.Process
Launch = Callable[..., AbstractAsyncContextManager[tuple[Process, Client]]]


@asynccontextmanager
async def _cli(*arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "batchserve.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
def launch(tiny_model: dict[str, Path]) -> Launch:
    """A server process with a tiny llama, ready."""

    @asynccontextmanager
    async def start(*flags: str) -> AsyncIterator[tuple[Process, Client]]:
        model = ("--model", str(tiny_model["llama"]), "--dtype", "float32", "--kv-cache-memory", "32MiB")
        async with _cli("serve", "--port", "0", "--http-port", "0", *model, *flags) as process:
            assert process.stdout is not None
            async with asyncio.timeout(START_TIMEOUT_S):
                line = (await process.stdout.readline()).decode().strip()
            assert line.startswith("listening on 127.0.0.1:")
            client = Client(line.removeprefix("listening on "))
            try:
                yield process, client
            finally:
                await client.channel.close()

    return start


async def test_streams_without_an_end_leave_no_trace_behind(launch: Launch):
    async with launch(*NO_DRAFTER) as (process, client):
        watch = client.health.Watch(health_pb2.HealthCheckRequest(service=""))
        await watch.read()
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        reflection = stub.ServerReflectionInfo()
        for _ in range(2):
            await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            assert (await reflection.read()).list_services_response.service
        process.terminate()
        assert await reflection.read() is grpc.aio.EOF
        async with asyncio.timeout(END_TIMEOUT_S):
            assert await process.wait() == 0
        assert process.stderr is not None
        assert b"Traceback" not in await process.stderr.read()


async def test_sigterm_drains(launch: Launch):
    async with launch() as (process, client):
        assert await client.health_of() == "SERVING"
        call = aiter(client.stub.StreamGenerate(ask(max_tokens=300)))
        await anext(call)
        process.terminate()
        rest = [message.WhichOneof("event") async for message in call]
        assert rest[-1] == "finished"
        async with asyncio.timeout(END_TIMEOUT_S):
            assert await process.wait() == 0
        assert (await failure_of(client.generate(ask()))).code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_during_the_warm_up_ends_the_process_at_once(number: signal.Signals):
    async with _cli("serve", "--port", "0", "--http-port", "0") as process:
        assert process.stderr is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            while b"warming up" not in await process.stderr.readline():
                pass
            process.send_signal(number)
            assert await process.wait() == -number


async def test_ctrl_c_drains_too_and_requests_that_outlast_it_are_ended(launch: Launch):
    async with launch("--drain-timeout-s", "0", "--max-num-seqs", "1", *NO_DRAFTER) as (process, client):
        calls = [aiter(client.stub.StreamGenerate(ask(max_tokens=500))) for _ in range(8)]
        for call in calls:
            assert (await anext(call)).WhichOneof("event") == "started"
        # These may come before, while and after the others are ended: all are refused.
        late = [client.generate(ask()) for _ in range(100)]
        process.send_signal(signal.SIGINT)
        failures = await asyncio.gather(*(failure_of(read_all(call)) for call in calls), *map(failure_of, late))
        assert {failed.code for failed in failures} == {grpc.StatusCode.UNAVAILABLE}
        async with asyncio.timeout(END_TIMEOUT_S):
            assert await process.wait() == 0
