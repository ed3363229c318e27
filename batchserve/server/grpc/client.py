"""A small gRPC client for the command line and the demo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from batchserve.errors import BatchserveError
from batchserve.server.grpc.servicer import SERVICE_NAME
from batchserve.server.grpc.tls import ClientTls, client_credentials
from batchserve.v1 import generation_pb2 as pb
from batchserve.v1 import generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType
    from typing import Self


class RemoteError(BatchserveError):
    """A non-OK status from the server. `code` is its gRPC name, `reason` the ErrorInfo's reason ("" without one)."""

    def __init__(self, code: str, reason: str, message: str) -> None:
        self.code = code
        self.reason = reason
        super().__init__(f"{code}: {message}")


class GenerationClient:
    """A channel to one server; an async context manager. Every method raises RemoteError for a non-OK status."""

    def __init__(self, target: str, tls: ClientTls | None = None, key: str | None = None) -> None:
        """tls: None connects without encryption. key: sent with every call, if there is one.

        Raises ConfigError for files that cannot be used.
        """
        self._metadata = None if key is None else (("authorization", f"Bearer {key}"),)
        # Otherwise gRPC uses the environment's http_proxy even for loopback connections.
        options = [("grpc.enable_http_proxy", 0)]
        if tls is None:
            self._channel = grpc.aio.insecure_channel(target, options=options)
        else:
            self._channel = grpc.aio.secure_channel(target, client_credentials(tls), options=options)
        self._stub: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def wait_until_serving(self) -> None:
        """Waits until the server listens and its health is SERVING. Bound the wait with asyncio.timeout."""
        call = self._health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), wait_for_ready=True)
        try:
            async for answer in call:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            raise _remote_error(error) from error
        finally:
            call.cancel()
        raise RemoteError("UNAVAILABLE", "", "the health watch ended before the service was serving")

    async def model_info(self) -> pb.GetModelInfoResponse:
        """Returns the server's description of its model."""
        try:
            info: pb.GetModelInfoResponse = await self._stub.GetModelInfo(
                pb.GetModelInfoRequest(), metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _remote_error(error) from error
        return info

    async def generate(self, request: pb.GenerateRequest, timeout_s: float | None = None) -> pb.GenerateResponse:
        """Returns the complete answer."""
        try:
            response: pb.GenerateResponse = await self._stub.Generate(
                request, timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _remote_error(error) from error
        return response

    async def stream(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.StreamGenerateResponse, None]:
        """Yields the events of one answer. Closing the generator cancels the call."""
        call = self._stub.StreamGenerate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise _remote_error(error) from error
        finally:
            call.cancel()


def _remote_error(error: grpc.aio.AioRpcError) -> RemoteError:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # has what it needs: code, details, metadata
    reason = ""
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            reason = info.reason
    return RemoteError(error.code().name, reason, error.details() or "no details")
