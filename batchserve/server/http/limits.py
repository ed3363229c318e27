"""Bounds on what HTTP clients may make the server hold: connections, headers, bodies, and how slowly they may send."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from batchserve.server.http.errors import HttpRefusal, body_of

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CONNECTIONS = 1024
MAX_HEADER_BYTES = 16 << 10  # of a request's line and headers, as over gRPC
HEADER_TIMEOUT_S = 30.0  # from a request's first byte to the end of its headers; from a connection's first moment, too
BODY_TIMEOUT_S = 30.0
LINGER_S = 1.0
MAX_BODY_BYTES, BODY_BYTES_PER_TOKEN = 4 << 20, 64  # what parses in some 50 ms; more where the context is longer
MAX_BODIES_BYTES = 64 << 20  # of all requests that are being read
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
ABORT = "batchserve.abort"  # in a request's scope: closes its connection at once


class Bodies:
    """Counts the bytes of all bodies that are being read."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[Body]:
        body = Body(self)
        try:
            yield body
        finally:
            self.num_bytes -= body.num_bytes


class Body:
    """Counts the bytes of one body."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.num_bytes = 0

    def grow(self, num_bytes: int, most: int) -> None:
        """Raises HttpRefusal if there are more bytes than a body, or all bodies, may have."""
        self.num_bytes += num_bytes
        self._bodies.num_bytes += num_bytes
        if self.num_bytes > most:
            raise too_large(self.num_bytes, most)
        if self._bodies.num_bytes > MAX_BODIES_BYTES:
            message = f"the bodies that are being read have {MAX_BODIES_BYTES} bytes already; try again later"
            raise HttpRefusal(503, "BODIES_TOO_LARGE", message, {"retry-after": "1"})


def too_large(num_bytes: int, most: int) -> HttpRefusal:
    return HttpRefusal(413, "BODY_TOO_LARGE", f"the body has {num_bytes} bytes or more; at most {most} are accepted")


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which has no bounds of its own on connections, on headers and on how long these take."""

    _num_received = 0  # bytes since headers were last waited for
    _num_header_bytes = 0
    _waiting: asyncio.TimerHandle | None = None
    _refusal: HttpRefusal | None = None
    _is_over = False  # refused: what still comes is forgotten

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            message = f"the server has {MAX_CONNECTIONS} connections already; try again later"
            self._refuse(HttpRefusal(503, "TOO_MANY_CONNECTIONS", message))
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_over or self.transport.is_closing():
            return
        self._num_received += len(data)
        if self._waiting is not None and self._num_received > 2 * MAX_HEADER_BYTES + len(data):
            self._refuse(_headers_too_large())  # one header without an end, which the parser would keep
            return
        if self.cycle is None or self.cycle.response_complete:
            data = _without_upgrade(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = 0
        if self._waiting is None:
            self._expect_headers()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Called for what the parser, or a callback of it, refuses."""
        self._refuse(self._refusal or HttpRefusal(400, "MALFORMED_HTTP", msg))

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refusal = _headers_too_large()
            raise self._refusal  # the parser stops, and send_400_response is called

    def _expect_headers(self) -> None:
        self._num_received = 0
        self._waiting = self.loop.call_later(HEADER_TIMEOUT_S, self._time_out)

    def _time_out(self) -> None:
        message = f"the request's headers were not there after {HEADER_TIMEOUT_S:g} s"
        self._refuse(HttpRefusal(408, "SLOW_REQUEST", message))

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _refuse(self, refusal: HttpRefusal) -> None:
        """Sends an error's response and closes the connection. A connection whose client sends nothing just closes."""
        self._stop_waiting()
        if self._num_received or refusal.status != 408:
            body = json.dumps(body_of(refusal, {})).encode()
            head = f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self._is_over = True
        if self.transport.can_write_eof():
            # Closed with bytes that nobody has read, the connection would be reset, and the response lost.
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """Removes an Upgrade header. Some clients offer HTTP/2 so (h2c); the parser would stop before the body, though the
    offer need not be taken.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"", head) + end + body


def _headers_too_large() -> HttpRefusal:
    return HttpRefusal(431, "HEADERS_TOO_LARGE", f"the request's headers have more than {MAX_HEADER_BYTES} bytes")


def abort_of(scope: Any) -> Any:
    """Returns what closes a request's connection at once."""
    return scope.get(ABORT, lambda: None)
