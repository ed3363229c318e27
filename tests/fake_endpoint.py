"""An HTTP server that answers as a test says, byte by byte."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


class Endpoint:
    """What a fake endpoint has seen, and where it is."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.num_connections = 0
        self.port = 0
        self.has_ended = asyncio.Event()  # a connection

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def endpoint(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Endpoint]:
    """Listens on loopback. Each connection is kept until the client closes it, or `answer` does."""
    seen, tasks = Endpoint(), set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.num_connections += 1
        task = asyncio.current_task()
        tasks.add(task)
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while not writer.is_closing():
                seen.asked.append(await _read(reader))
                await answer(seen.asked[-1], writer)
        writer.close()
        seen.has_ended.set()
        tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    seen.port = server.sockets[0].getsockname()[1]
    try:
        yield seen
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    line, *fields = head.strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    method, path, _ = line.split(" ")
    return Asked(method, path, headers, body)


def whole(status: int, body: Any, **headers: str) -> bytes:
    """A response with a length. A body that is not bytes is JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json", "Content-Length": str(len(data))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"HTTP/1.1 {status} Because\r\n{head}\r\n".encode() + data


def stream_head() -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(data: Any) -> bytes:
    return chunk(b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n")


def text(content: str, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    """The data of a delta of a completion."""
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish_reason}], **more}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def whole_stream(num_tokens: int = 3, num_prompt_tokens: int = 5) -> bytes:
    """A stream of deltas of one token each, whose usage comes last."""
    deltas = [text("a", "length" if i == num_tokens - 1 else None) for i in range(num_tokens)]
    last = {"choices": [], "usage": usage(num_prompt_tokens, num_tokens)}
    return stream_head() + b"".join(map(event, [*deltas, last, b"[DONE]"])) + chunk(b"")
