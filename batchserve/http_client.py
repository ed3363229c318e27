"""A small HTTP/1.1 client for commands that ask OpenAI-compatible servers.

It spends little time on each piece of a stream, so that it can measure a server (docs/benchmarking.md). It follows no
redirects and uses no proxy.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httptools

from batchserve.errors import BatchserveError, ConfigError, one_line
from batchserve.hosts import join_address

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

OnBody = Callable[[bytes], None]


class HttpFailure(BatchserveError):
    """A request that got no whole HTTP response. The message is short, so that failures can be counted by it."""

    reason = "HTTP_FAILED"


class UnreachableError(HttpFailure):
    """No connection to the server could be made."""


class _StaleConnection(HttpFailure):
    """A kept connection that the server had closed before the request."""


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response. The names of headers are in lower case. body: empty if it went to `on_body`."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        """Returns the body as JSON data. Raises ValueError."""
        try:
            return json.loads(self.body)
        except RecursionError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """Where an OpenAI-compatible server is. base: the path before `/v1`."""

    host: str
    port: int
    base: str = ""
    has_tls: bool = False

    @classmethod
    def parse(cls, url: str) -> ServerUrl:
        """Parses http://HOST:PORT, with or without `/v1`. Raises ConfigError."""
        bound = "must be http://HOST:PORT or https://HOST:PORT, with or without /v1"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"url = {url!r}: {bound} ({error})") from None
        is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
        is_ascii = url.isascii() and not any(character.isspace() for character in url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain or not is_ascii or port == 0:
            raise ConfigError(f"url = {url!r}: {bound}")
        base = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.hostname, port or (443 if parts.scheme == "https" else 80), base, parts.scheme == "https")


class HttpClient:
    """Connections to one server; an async context manager. A connection is kept for later requests."""

    def __init__(self, url: ServerUrl, *, key: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        """key: sent as `Authorization: Bearer KEY`. tls: for https (None: trusts what the system trusts)."""
        self._url = url
        self._tls = (tls or ssl.create_default_context()) if url.has_tls else None
        self._idle: list[_Connection] = []
        headers = {"Host": join_address(url.host, url.port), "Accept": "*/*", "Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._idle:
            connection.abort()

    async def request(
        self, method: str, path: str, body: bytes | None = None, on_body: OnBody | None = None
    ) -> Response:
        """Returns a response. Raises HttpFailure.

        on_body: gets the pieces of a successful response's body as they arrive. What it raises ends the request.
        A kept connection that breaks before it brought anything is replaced once. Cancelling closes the connection.
        """
        length = "" if body is None else f"Content-Length: {len(body)}\r\n"
        request = f"{method} {self._url.base}{path} HTTP/1.1\r\n{self._head}{length}\r\n".encode() + (body or b"")
        while (connection := self._take()) is not None:
            try:
                return await self._exchange(connection, request, on_body)
            except _StaleConnection:
                pass
        return await self._exchange(await self._connect(), request, on_body)

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                connection.is_kept = True
                return connection
        return None

    async def _connect(self) -> _Connection:
        name = self._url.host if self._url.has_tls else None
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                _Connection, self._url.host, self._url.port, ssl=self._tls, server_hostname=name
            )
        except ConnectionRefusedError:
            raise UnreachableError("connection refused") from None
        except ssl.SSLError as error:
            raise UnreachableError(f"TLS handshake failed: {error.reason or one_line(error)}") from error
        except OSError as error:
            raise UnreachableError(f"cannot connect: {error.strerror or one_line(error)}") from error
        return connection

    async def _exchange(self, connection: _Connection, request: bytes, on_body: OnBody | None) -> Response:
        try:
            response = await connection.send(request, on_body)
        except BaseException:
            connection.abort()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return response


@dataclass(slots=True)
class _Parts:
    """The part of a response that has arrived."""

    headers: dict[str, str] = field(default_factory=dict)
    body: list[bytes] = field(default_factory=list)
    status: int = 0  # once the headers are complete


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time. Methods that begin with on_ are called by the parser."""

    def __init__(self) -> None:
        self.is_open = False
        self.is_kept = False  # from an earlier request
        self._waiting: asyncio.Future[Response] | None = None
        self._on_body: OnBody | None = None
        self._parts = _Parts()
        self._has_answered = False

    async def send(self, request: bytes, on_body: OnBody | None) -> Response:
        self._on_body, self._parts, self._has_answered = on_body, _Parts(), False
        self._parser = httptools.HttpResponseParser(self)
        self._waiting = asyncio.get_running_loop().create_future()
        if self.is_open:
            self._transport.write(request)
        else:
            self.connection_lost(None)
        return await self._waiting

    def abort(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():
            self.abort()  # nothing was asked
            return
        self._has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(HttpFailure("malformed HTTP response"))
        except httptools.HttpParserUpgrade:
            self._fail(HttpFailure("the server switched protocols"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        parts = self._parts
        has_length = "content-length" in parts.headers or "chunked" in parts.headers.get("transfer-encoding", "")
        if parts.status and not has_length and error is None:
            self._finish()  # its end is the connection's
        elif self.is_kept and not self._has_answered:
            self._fail(_StaleConnection("connection lost"))
        else:
            self._fail(HttpFailure("connection lost"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parts.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._parts.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._on_body is None or not 200 <= self._parts.status < 300:
            self._parts.body.append(body)
        elif self._waiting is not None and not self._waiting.done():
            try:
                self._on_body(body)
            except Exception as error:
                self._fail(error)

    def on_message_complete(self) -> None:
        if self._parts.status < 200:
            self._parts = _Parts()  # a notice that the response is yet to come
            return
        if not self._parser.should_keep_alive():
            self.is_open = False
            self._transport.close()
        self._finish()

    def _finish(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            parts = self._parts
            self._waiting.set_result(Response(parts.status, parts.headers, b"".join(parts.body)))

    def _fail(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
