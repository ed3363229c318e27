"""An HTTP/2 client that takes exactly as much as it says: gRPC's own reads ahead, whether its caller reads or not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from google.protobuf.message import Message

from batchserve.server.grpc.servicer import SERVICE_NAME

DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
HEADER_TABLE_SIZE, INITIAL_WINDOW_SIZE = 1, 4
LARGE_WINDOW = 1 << 30


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def _header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


@dataclass
class RawClient:
    """One connection, whose streams have a window of no bytes until `read_on`.

    A deaf one offers every window there is, and does not read its socket.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    num_streams: int = 0
    data: dict[int, bytes] = field(default_factory=dict)
    trailers: dict[int, bytes] = field(default_factory=dict)  # of ended streams, as they came
    following: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, address: str, is_deaf: bool = False) -> RawClient:
        host, port = address.rsplit(":", 1)
        client = cls(*await asyncio.open_connection(host, int(port)))
        # Without a table every trailer says its status in full.
        settings = {HEADER_TABLE_SIZE: 0, INITIAL_WINDOW_SIZE: LARGE_WINDOW if is_deaf else 0}
        payload = b"".join(kind.to_bytes(2) + value.to_bytes(4) for kind, value in settings.items())
        client.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0, payload))
        if is_deaf:
            client.writer.write(_frame(WINDOW_UPDATE, 0, 0, LARGE_WINDOW.to_bytes(4)))
        else:
            client.following = asyncio.create_task(client._follow())
        return client

    async def call(self, method: str, request: Message) -> int:
        """Ask, and leave the answer unread; the stream's number."""
        stream = 2 * self.num_streams + 1
        self.num_streams += 1
        path = f"/{SERVICE_NAME}/{method}".encode()
        names = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers"}
        headers = b"".join(_header(*item) for item in {**names, b"content-type": b"application/grpc"}.items())
        message = request.SerializeToString()
        body = b"\0" + len(message).to_bytes(4) + message
        self.writer.write(_frame(HEADERS, END_HEADERS, stream, headers) + _frame(DATA, END_STREAM, stream, body))
        await self.writer.drain()
        return stream

    def read_on(self, stream: int) -> None:
        """Take what is there of one stream."""
        self.writer.write(_frame(WINDOW_UPDATE, 0, stream, (1 << 20).to_bytes(4)))

    async def _follow(self) -> None:
        while header := await self.reader.read(9):
            header += await self.reader.readexactly(9 - len(header))
            kind, flags, stream = header[3], header[4], int.from_bytes(header[5:])
            payload = await self.reader.readexactly(int.from_bytes(header[:3]))
            if kind == PING and not flags & ACK:
                self.writer.write(_frame(PING, ACK, 0, payload))
            elif kind == DATA:
                self.data[stream] = self.data.get(stream, b"") + payload
            elif kind == HEADERS and flags & END_STREAM:
                self.trailers[stream] = payload

    async def close(self) -> None:
        self.writer.close()
        if self.following is not None:
            self.following.cancel()
            await asyncio.gather(self.following, return_exceptions=True)
