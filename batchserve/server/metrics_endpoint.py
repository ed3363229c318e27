"""The HTTP endpoint for Prometheus metrics and the serving status."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from batchserve.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from batchserve.hosts import join_address
from batchserve.server.error_table import code_of
from batchserve.server.http.errors import HttpRefusal
from batchserve.server.http.guard import HostGuard
from batchserve.server.metrics_text import PLAIN_TEXT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchserve.server.health import ServingStatus
    from batchserve.server.keys import KeyStore
    from batchserve.server.metrics_text import MetricsText

logger = logging.getLogger(__name__)
REQUEST_TIMEOUT_S = 30.0
METHODS = ("GET", "HEAD")


class MetricsEndpoint:
    """Serves /metrics and /healthz from its own thread until closed. Port 0 picks a free port. Raises ConfigError.

    With keys, /metrics needs an admin's.
    """

    def __init__(self, host: str, port: int, metrics: MetricsText, status: ServingStatus, keys: KeyStore) -> None:
        self._metrics, self._status, self._keys = metrics, status, keys
        self._guard = HostGuard(host)
        try:
            self._server = _HttpServer((host, port), self)
        except (OSError, OverflowError) as error:  # OverflowError: port number out of range
            raise ConfigError(
                f"host:metrics_port = {join_address(host, port)}: cannot listen there ({error})"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="batchserve-metrics", daemon=True
        )
        self._thread.start()
        self.address = join_address(host, self._server.server_address[1])

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(
        self, path: str, accept: str, authorization: str | None = None, names: Mapping[str, str] | None = None
    ) -> tuple[int, str, bytes]:
        """Returns (status, content type, body) for a path. names: the headers host and origin."""
        try:
            self._guard.check(names or {})
        except HttpRefusal as refusal:
            return refusal.status, PLAIN_TEXT, f"{refusal}\n".encode()
        if path == "/metrics":
            try:
                self._keys.caller(authorization).check_figures("/metrics")
            except (UnauthenticatedError, PermissionDeniedError) as error:
                return code_of(error).value, PLAIN_TEXT, f"{error}\n".encode()
            return self._metrics.read(accept)
        if path == "/healthz":
            trouble = self._status.trouble
            status = HTTPStatus.OK if trouble is None else HTTPStatus.SERVICE_UNAVAILABLE
            return status, PLAIN_TEXT, f"{trouble or 'serving'}\n".encode()
        return HTTPStatus.NOT_FOUND, PLAIN_TEXT, b"not found: there are /metrics and /healthz\n"


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 128  # the default is five: a sixth simultaneous connection waits for a second
    daemon_threads = True

    def __init__(self, address: tuple[str, int], endpoint: MetricsEndpoint) -> None:
        # A numeric address has one address family. A host name gets the first family that it resolves to.
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self.endpoint = endpoint
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Binds without http.server's host name look-up, which may take seconds."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs at debug level: a client that hangs up or does not send HTTP is not a server error."""
        logger.debug("metrics: a connection of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Handles one connection in its own thread. A client that sends nothing times out."""

    server: _HttpServer
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "batchserve", ""

    def handle(self) -> None:
        with suppress(TimeoutError):
            super().handle()

    def parse_request(self) -> bool:
        """Refuses methods other than GET and HEAD as not allowed. http.server would call them unsupported."""
        if not super().parse_request():
            return False
        if self.command not in METHODS:
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, PLAIN_TEXT, b"method not allowed: GET or HEAD\n")
            self.close_connection = True  # the request's body is left unread
            return False
        return True

    def do_GET(self) -> None:
        """Answers GET, and HEAD without the body."""
        path = self.path.partition("?")[0]
        accept, authorization = self.headers.get("Accept", ""), self.headers.get("Authorization")
        names = {name: value for name in ("host", "origin") if (value := self.headers.get(name)) is not None}
        self._send(*self.server.endpoint.answer(path, accept, authorization, names))

    do_HEAD = do_GET

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", ", ".join(METHODS))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        logger.debug("metrics: " + format, *arguments)
