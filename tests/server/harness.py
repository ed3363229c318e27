"""A server in this process, with a client that speaks to it over a loopback port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from batchserve.engine.async_engine import AsyncEngine
from batchserve.engine.engine_core import EngineCore
from batchserve.engine.engine_thread import EngineThread
from batchserve.server.grpc.servicer import SERVICE_NAME
from batchserve.server.lifecycle import GenerationServer
from batchserve.server_config import ServerConfig
from batchserve.v1 import generation_pb2 as pb
from batchserve.v1 import generation_pb2_grpc

LOOPBACK = ServerConfig(port=0, http_port=0, drain_timeout_s=10.0)


@dataclass(frozen=True)
class Failed:
    """A non-OK status, unpacked."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    domain: str = ""
    field: str = ""
    value: str = ""
    bound: str = ""
    violations: tuple[tuple[str, str], ...] = ()
    retry_after_s: float | None = None


def unpack(error: grpc.aio.AioRpcError) -> Failed:
    """The status with its details."""
    found: dict[str, Any] = {}
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            found |= {"reason": info.reason, "domain": info.domain, **info.metadata}
        elif detail.Unpack(bad):
            found["violations"] = tuple((v.field, v.description) for v in bad.field_violations)
        elif detail.Unpack(retry):
            found["retry_after_s"] = retry.retry_delay.ToNanoseconds() / 1e9
    return Failed(error.code(), error.details() or "", **found)


class Client:
    """One channel to one server."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(
            address, options=[("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    async def health_of(self, service: str = SERVICE_NAME) -> str:
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def generate(self, request: pb.GenerateRequest, timeout: float | None = None) -> pb.GenerateResponse:
        return await self.stub.Generate(request, timeout=timeout)

    async def stream(
        self, request: pb.GenerateRequest, timeout: float | None = None
    ) -> list[pb.StreamGenerateResponse]:
        """All messages of a stream, whose shape is checked: started, delta*, finished, which each sample has."""
        messages = [message async for message in self.stub.StreamGenerate(request, timeout=timeout)]
        kinds = [message.WhichOneof("event") for message in messages]
        assert kinds[0] == "started"
        assert kinds[-1] == "finished"
        assert set(kinds[1:-1]) <= {"delta", "finished"}
        assert kinds.count("finished") == max(1, request.sampling_params.n)
        return messages


async def failure_of(call: Awaitable[Any]) -> Failed:
    """The status of a call that must fail."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return unpack(error)
    raise AssertionError("the call succeeded")


async def read_all(call: AsyncIterator[Any]) -> list[Any]:
    """What is left of a stream."""
    return [message async for message in call]


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Returns once it is true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


def tokens_of(messages: list[pb.StreamGenerateResponse]) -> list[int]:
    """The answer that a stream delivered."""
    return [token for message in messages for token in message.delta.token_ids]


def ask(*token_ids: int, max_tokens: int | None = 8, **fields: Any) -> pb.GenerateRequest:
    """A greedy request that goes on to max_tokens."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids or (5, 7, 9)),
        sampling_params=pb.SamplingParams(temperature=0.0),
        stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )
    request.MergeFrom(pb.GenerateRequest(**fields))
    return request


def core_of(engine: AsyncEngine) -> EngineCore:
    """What is behind an engine that runs in a thread."""
    back = engine._host
    assert isinstance(back, EngineThread)
    return back._loop._core


@dataclass(frozen=True)
class Served:
    """A server, what is behind it, and a client."""

    server: GenerationServer
    engine: AsyncEngine
    client: Client
    address: str

    @property
    def url(self) -> str:
        """Where the same engine is served over HTTP."""
        return f"http://{self.server.http_address}"

    async def settle(self) -> None:
        """Returns once no call is being answered; nothing may be in flight then."""
        await self.server._calls.wait_idle()
        assert self.engine.num_in_flight == 0


@asynccontextmanager
async def serving(engine: AsyncEngine, config: ServerConfig = LOOPBACK) -> AsyncIterator[Served]:
    """A warm server with this engine; drained at the end."""
    server = GenerationServer(config, "test")
    address = await server.bind()
    await server.open(engine)
    client = Client(address)
    try:
        yield Served(server, engine, client, address)
    finally:
        await client.channel.close()
        await server.drain()
