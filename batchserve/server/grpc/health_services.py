"""gRPC's health and reflection services, whose streams end with the server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from batchserve.server.grpc.servicer import SERVICE_NAME
from batchserve.server.tasks import either

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


class HealthService(health.aio.HealthServicer):  # type: ignore[name-defined,misc]
    """gRPC's health service. Its watch streams end with the server: if gRPC cancelled them they would print a trace."""

    def __init__(self) -> None:
        super().__init__()
        self._is_over = asyncio.Event()

    async def List(self, request: Any, context: Any) -> health_pb2.HealthListResponse:
        """Returns the status of each service. gRPC's own version fails with a traceback in the log."""
        names = ("", SERVICE_NAME)
        statuses = {name: await self.Check(health_pb2.HealthCheckRequest(service=name), context) for name in names}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, context: Any) -> None:
        """Streams the current status and each later one."""
        await either(super().Watch(request, context), self.ended())

    def end(self) -> None:
        """Ends every watch stream."""
        self._is_over.set()

    async def ended(self) -> None:
        """Waits for end()."""
        await self._is_over.wait()


class ReflectionService(reflection.aio.ReflectionServicer):  # type: ignore[name-defined,misc]
    """gRPC's reflection service. Its streams end together with the watch streams, for the same reason."""

    def __init__(self, names: Sequence[str], watchers: HealthService) -> None:
        super().__init__(names)
        self._watchers = watchers

    async def ServerReflectionInfo(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Yields a response to each request."""
        async for response in super().ServerReflectionInfo(self._until_the_end(requests), context):
            yield response

    async def _until_the_end(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async def following() -> Any:
            return await anext(requests, None)

        while (request := await either(following(), self._watchers.ended())) is not None:
            yield request
