"""The gRPC server: binds, tells its health, stops."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from batchserve.errors import ConfigError
from batchserve.hosts import join_address
from batchserve.server.grpc.health_services import HealthService, ReflectionService
from batchserve.server.grpc.servicer import SERVICE, SERVICE_NAME, GenerationServicer
from batchserve.server.grpc.status import is_worth_logging
from batchserve.server.grpc.tls import server_credentials
from batchserve.server.grpc.wire import MalformedRequestInterceptor
from batchserve.v1 import generation_pb2_grpc

if TYPE_CHECKING:
    from batchserve.server.open_calls import OpenCalls
    from batchserve.server_config import ServerConfig

# Time to send the last statuses after the requests have ended. Reflection streams never end by themselves.
FLUSH_GRACE_S = 1.0
MIN_PING_INTERVAL_MS = 5000
KEEPALIVE_MS = 60_000
MAX_METADATA_BYTES = 16 << 10
MOST_PENDING_CALLS = 1 << 20
GRPC_LOGGER = "grpc._cython.cygrpc"


class GrpcServer:
    """The service, with gRPC's health and reflection services beside it. It is NOT_SERVING until it is told else."""

    def __init__(self, config: ServerConfig, version: str, calls: OpenCalls) -> None:
        self._config = config
        logging.getLogger(GRPC_LOGGER).addFilter(is_worth_logging)
        self._health = HealthService()
        self._grpc = grpc.aio.server(
            interceptors=[MalformedRequestInterceptor(SERVICE, calls, config.max_receive_bytes)],
            options=_channel_arguments(config),
        )
        servicer = GenerationServicer(version, calls)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, self._grpc)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        if config.has_reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflecting = ReflectionService(names, self._health)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflecting, self._grpc)

    async def bind(self) -> str:
        """Starts listening. Returns HOST:PORT with the actual port. Raises ConfigError."""
        await self.tell(is_serving=False)
        wanted = join_address(self._config.host, self._config.port)
        credentials = server_credentials(self._config)
        try:
            if credentials is None:
                port = self._grpc.add_insecure_port(wanted)
            else:
                port = self._grpc.add_secure_port(wanted, credentials)
        except RuntimeError as error:
            reason = _why_not_bound(self._config.host, self._config.port) or error
            raise ConfigError(f"host:port = {wanted}: cannot listen there ({reason})") from error
        await self._grpc.start()
        return join_address(self._config.host, port)

    async def tell(self, *, is_serving: bool) -> None:
        """Publishes the health."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE_NAME):
            await self._health.set(service, status)

    async def tell_draining(self) -> None:
        """Publishes NOT_SERVING for good."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Ends the streams of health and reflection, and stops listening."""
        self._health.end()
        await self._grpc.stop(FLUSH_GRACE_S)


def _why_not_bound(host: str, port: int) -> str | None:
    """Returns the operating system's reason, which gRPC does not pass on. None if listening there works now."""
    try:
        family = socket.getaddrinfo(host, port)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return error.strerror
    return None


def _channel_arguments(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_receive_bytes),
        # By default gRPC refuses metadata at random if its size is between these two limits.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # On by default on Linux, where a second server on the same port would silently take half of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Above this number of pending calls gRPC cancels some at random. The server's own refusals give a reason.
        ("grpc.server.max_pending_requests", MOST_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING_CALLS),
        # A client whose machine or process has stopped answers no ping. Its calls end with the connection.
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        # By default gRPC sends GOAWAY to a client that pings more often than every five minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ]
