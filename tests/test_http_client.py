"""The HTTP client of commands: connections that are kept, responses of every kind, and servers that break the rules."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import pytest
import trustme

from batchserve.errors import ConfigError
from batchserve.http_client import HttpClient, HttpFailure, ServerUrl
from tests.fake_endpoint import Answer, Asked, chunk, endpoint, stream_head, whole


def always(*data: bytes, is_last: bool = False) -> Answer:
    """Answers with these pieces. is_last: and then closes the connection."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        for piece in data:
            writer.write(piece)
            await writer.drain()
        if is_last:
            writer.close()

    return answer


def client(url: str, **options: Any) -> HttpClient:
    return HttpClient(ServerUrl.parse(url), **options)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost", ServerUrl("localhost", 80)),
        ("https://example.org/v1/", ServerUrl("example.org", 443, "", has_tls=True)),
        ("http://[::1]:8000/api/v1", ServerUrl("::1", 8000, "/api")),
        ("http://127.0.0.1:8000/", ServerUrl("127.0.0.1", 8000)),
    ],
)
def test_urls(url: str, expected: ServerUrl):
    assert ServerUrl.parse(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost:8000", "ftp://x", "http://", "http://x:0", "http://x:70000", "http://x:y", "http://u:p@x"),
        *("http://x?a=b", "http://x#a", "http://x/a b", "http://x/\r\nHost: y", "http://ä", "http://[::1"),
    ],
)
def test_urls_that_are_refused(url: str):
    with pytest.raises(ConfigError, match="must be http://HOST:PORT"):
        ServerUrl.parse(url)


async def test_a_connection_is_kept_and_the_request_is_whole():
    async with endpoint(always(whole(200, {"a": 1}))) as server, client(f"{server.url}/base/v1", key="k") as http:
        for body in (b"{}", None):
            response = await http.request("POST", "/v1/x", body)
            assert (response.status, response.json(), response.is_success) == (200, {"a": 1}, True)
            assert response.headers["content-type"] == "application/json"
        assert server.num_connections == 1
        first = server.asked[0]
        assert (first.method, first.path, first.body) == ("POST", "/base/v1/x", b"{}")
        assert first.headers["authorization"] == "Bearer k"
        assert first.headers["host"] == f"127.0.0.1:{server.port}"
        assert "content-length" not in server.asked[1].headers


async def test_pieces_of_a_body_as_they_come():
    data = stream_head() + chunk(b"ab") + chunk(b"c") + chunk(b"")
    every_byte = [data[at : at + 1] for at in range(len(data))]
    async with endpoint(always(*every_byte)) as server, client(server.url) as http:
        pieces: list[bytes] = []
        response = await http.request("GET", "/", on_body=pieces.append)
        assert (b"".join(pieces), response.body) == (b"abc", b"")


@pytest.mark.parametrize(
    ("data", "is_last", "expected"),
    [
        (whole(404, b"no", Connection="close"), False, (404, b"no")),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end", True, (200, b"to the end")),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + whole(201, b"x"), False, (201, b"x")),
        (b"HTTP/1.1 204 None\r\n\r\n", False, (204, b"")),
    ],
)
async def test_responses(data: bytes, is_last: bool, expected: tuple[int, bytes]):
    async with endpoint(always(data, is_last=is_last)) as server, client(server.url) as http:
        for _ in range(2):
            response = await http.request("GET", "/")
            assert (response.status, response.body) == expected


@pytest.mark.faults
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "connection lost"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "connection lost"),
        (stream_head() + chunk(b"abc"), "connection lost"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "connection lost"),
        (b"SSH-2.0\r\n\r\n", "malformed HTTP response"),
        (stream_head() + b"zz\r\n", "malformed HTTP response"),
    ],
)
async def test_responses_that_are_not_whole(data: bytes, message: str):
    async with endpoint(always(data, is_last=True)) as server, client(server.url) as http:
        with pytest.raises(HttpFailure, match=f"^{message}$"):
            await http.request("GET", "/")


async def test_a_kept_connection_that_breaks_is_replaced_once():
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if server.num_connections == 1 and len(server.asked) == 2:
            writer.close()  # after the request has been read
        else:
            writer.write(whole(200, b"x"))

    async with endpoint(answer) as server, client(server.url) as http:
        for _ in range(2):
            assert (await http.request("POST", "/", b"{}")).body == b"x"
        assert (server.num_connections, len(server.asked)) == (2, 3)


async def test_what_on_body_raises_ends_the_request():
    def refuse(piece: bytes) -> None:
        raise KeyError(piece)

    async with endpoint(always(whole(200, b"x"))) as server, client(server.url) as http:
        with pytest.raises(KeyError, match="x"):
            await http.request("GET", "/", on_body=refuse)
        assert (await http.request("GET", "/")).body == b"x"


async def test_a_cancelled_request_closes_its_connection():
    has_come = asyncio.Event()

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        has_come.set()

    async with endpoint(answer) as server, client(server.url) as http:
        asking = asyncio.create_task(http.request("GET", "/"))
        await has_come.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(10):
            await server.has_ended.wait()


async def test_a_server_that_is_not_there():
    async with client("http://127.0.0.1:1") as http:
        with pytest.raises(HttpFailure, match="connection refused"):
            await http.request("GET", "/")


async def test_https():
    authority = trustme.CA()
    served, trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("127.0.0.1").configure_cert(served)
    authority.configure_trust(trusted)
    async with endpoint(always(whole(200, b"x")), served) as server:
        async with client(f"https://127.0.0.1:{server.port}", tls=trusted) as http:
            assert (await http.request("GET", "/")).body == b"x"
        async with client(f"https://127.0.0.1:{server.port}") as http:
            with pytest.raises(HttpFailure, match="TLS handshake failed: CERTIFICATE_VERIFY_FAILED"):
                await http.request("GET", "/")
