"""HTTP over a plain socket, so that a test decides about each byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

from tests.server.http.conftest import Answer

TIMEOUT_S = 20.0


async def request(url: str, path: str, method: str = "GET", body: Any = None, **headers: str) -> Answer:
    """Sends a request and returns the whole response. A body that is not bytes is sent as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    fields = {"Host": urlsplit(url).netloc, "Connection": "close", "Content-Length": str(len(data))}
    if body is not None:
        fields["Content-Type"] = "application/json"
    fields |= given
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return await send(url, f"{head}\r\n".encode() + data)


async def post(url: str, path: str, body: Any, **headers: str) -> Answer:
    return await request(url, path, "POST", body, **headers)


async def send(url: str, data: bytes, *, is_whole: bool = True) -> Answer:
    """Sends bytes and returns the response, which the server must end by closing the connection."""
    host = urlsplit(url)
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host.hostname, host.port)
        try:
            writer.write(data)
            if is_whole:
                await writer.drain()
            return parse(await reader.read())
        finally:
            writer.close()


def parse(data: bytes) -> Answer:
    """Splits a response. Chunks are joined."""
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while body:
            size, _, rest = body.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            body = rest[int(size, 16) + 2 :]
        body = b"".join(parts)
    return Answer(int(status.split()[1]), headers, body)
