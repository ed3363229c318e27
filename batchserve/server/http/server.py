"""The HTTP server: uvicorn on the server's own event loop, with the routes of app.py."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from batchserve.errors import ConfigError
from batchserve.hosts import join_address
from batchserve.server.http.app import make_app
from batchserve.server.http.front import Front
from batchserve.server.http.guard import HostGuard
from batchserve.server.http.limits import BoundedProtocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchserve.config import ServerConfig
    from batchserve.server.health import ServingStatus
    from batchserve.server.metrics_text import MetricsText
    from batchserve.server.open_calls import OpenCalls

KEEP_ALIVE_S = 75
BACKLOG = 1024
END_TIMEOUT_S = 1  # for connections to close, after all calls have ended


class HttpServer:
    """Call bind(), then stop(). Requests are refused before the calls have an engine, and when it drains."""

    def __init__(
        self, config: ServerConfig, version: str, calls: OpenCalls, status: ServingStatus, metrics: MetricsText
    ) -> None:
        self._config = config
        front = Front(calls, version, config.tool_call_parser)
        app = make_app(front, HostGuard(config.host), status, metrics)
        options = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # below that it logs what any client can cause
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=END_TIMEOUT_S,
        )
        options.load()
        if config.tls_certificate is not None:
            options.ssl = _tls(config)
        self._server = _Server(options)
        self._serving: asyncio.Task[None] | None = None

    async def bind(self) -> str:
        """Starts listening. Returns HOST:PORT with the actual port. Raises ConfigError."""
        host, port = self._config.host, self._config.http_port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            reason = f"{error.strerror}; --http-port sets another one, --no-http serves gRPC alone"
            raise ConfigError(f"host:http_port = {join_address(host, port)}: cannot listen there ({reason})") from error
        # Connections inherit it. asyncio sets it only for sockets that name their protocol, which these do not; without
        # it, each stream after a connection's first would stand still for 40 ms after its headers.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.setblocking(False)
        self._serving = asyncio.create_task(self._server.serve([listening]))
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0)
        return join_address(host, int(listening.getsockname()[1]))

    async def stop(self) -> None:
        """Closes all connections and stops listening."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._serving = None


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the life cycle of the whole server has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _tls(config: ServerConfig) -> ssl.SSLContext:
    """Returns the context of a server with a certificate. gRPC's side has checked the files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(str(config.tls_certificate), config.tls_key)
    if config.tls_client_ca is not None:
        context.load_verify_locations(config.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
