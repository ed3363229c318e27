"""The metrics port: what it has an answer to, and whether the server is serving."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
from typing import Any

import pytest

from batchserve.errors import EngineFaultError
from batchserve.server.lifecycle import GenerationServer
from batchserve.server.metrics_text import _EngineCollector
from batchserve.server_config import ServerConfig
from tests.server.fakes import FakeEngine
from tests.server.harness import until

pytestmark = pytest.mark.faults
Answer = tuple[int, str]


def ask(address: str, path: str, method: str = "GET") -> Answer:
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read().decode()
        if method == "HEAD":
            assert body == ""
            assert int(answer.headers["Content-Length"]) > 0
        return answer.status, body.strip()
    finally:
        connection.close()


def say(address: str, data: bytes) -> bytes:
    """What comes back for these bytes."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


async def bound(**options: Any) -> tuple[GenerationServer, str]:
    server = GenerationServer(ServerConfig(port=0, http_port=0, metrics_port=0, **options), "test")
    await server.bind()
    assert server._endpoint is not None
    return server, server._endpoint.address


async def test_health_says_why_it_does_not_serve_and_metrics_are_there_all_the_time():
    server, address = await bound(stall_timeout_s=1.0, drain_timeout_s=5.0)
    engine: Any = FakeEngine()

    async def health() -> Answer:
        status, _ = await asyncio.to_thread(ask, address, "/metrics")
        assert status == 200
        return await asyncio.to_thread(ask, address, "/healthz")

    async def follows(word: str) -> Answer:
        async with asyncio.timeout(30):
            while word not in (answer := await health())[1]:  # noqa: ASYNC110 - an answer has no event
                await asyncio.sleep(0.05)
        return answer

    assert await health() == (503, "warming up")
    answers = asyncio.Event()
    engine.ping = answers.wait
    await server.open(engine)
    assert await health() == (200, "serving")
    assert (await follows("stalled"))[0] == 503
    answers.set()
    assert (await follows("serving"))[0] == 200
    engine.num_in_flight, engine.is_empty = 1, asyncio.Event()  # somebody is still being answered
    draining = asyncio.create_task(server.drain())
    assert (await follows("draining"))[0] == 503
    engine.is_empty.set()
    await draining


async def test_health_of_an_engine_that_has_failed():
    server, address = await bound()
    engine: Any = FakeEngine()
    await server.open(engine)
    engine.error = EngineFaultError("it is broken")
    engine.has_failed.set()
    assert server._watching is not None
    await server._watching
    status, body = await asyncio.to_thread(ask, address, "/healthz")
    assert (status, body.split(":")[0]) == (503, "failed")
    await server.drain()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *[
            ("GET", path, 404)
            for path in ("/", "/metrics/", "/metrics2", "/Metrics", "/healthz/x", "/favicon.ico", "/..")
        ],
        *[("GET", "/metrics?name=x", 200), ("HEAD", "/metrics", 200), ("HEAD", "/nothing", 404)],
        *[(method, "/metrics", 405) for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW")],
    ],
)
async def test_only_what_is_there_is_answered(method: str, path: str, status: int):
    server, address = await bound()
    assert (await asyncio.to_thread(ask, address, path, method))[0] == status
    await server.drain()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\r\n\r\n", b"\xff" * 100, b"GET\r\n\r\n", b"GET /metrics HTTP/9.9\r\n\r\n"),
        b"GET " + b"a" * 70_000 + b"\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc",
    ],
)
async def test_what_is_no_request_leaves_no_trace(
    data: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    server, address = await bound()
    with caplog.at_level(logging.INFO):
        answer = await asyncio.to_thread(say, address, data)
        assert b"200 OK" not in answer
        assert (await asyncio.to_thread(ask, address, "/healthz"))[0] == 503
        await server.drain()
    assert "Traceback" not in capfd.readouterr().err + caplog.text


@pytest.mark.parametrize(
    "version", ["abc", "1.0.x", "2.0.x", "1.0.0\r\n Injected: 1", "9" * 5000, "", "1.0.0", "0.0.4"]
)
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
async def test_any_accept_is_answered(kind: str, version: str, caplog: pytest.LogCaptureFixture):
    server, address = await bound()
    request = f"GET /metrics HTTP/1.0\r\nAccept: {kind};version={version}\r\n\r\n"
    head, _, body = (await asyncio.to_thread(say, address, request.encode())).partition(b"\r\n\r\n")
    await server.drain()
    assert b"200 OK" in head
    assert b"Injected" not in head
    assert b"failed_calls" in body
    assert "Traceback" not in caplog.text


async def test_a_fault_of_the_figures_is_logged_when_it_begins(caplog: pytest.LogCaptureFixture):
    server, address = await bound()
    assert server._endpoint is not None

    class Broken:
        def reading(self) -> Any:
            raise RuntimeError("it is broken")

    collectors = server._metrics._registry._collector_to_names
    broken: Any = Broken()
    collectors[_EngineCollector(broken, "model")] = []  # as it is once a sound one has broken
    for _ in range(3):
        assert await asyncio.to_thread(ask, address, "/metrics") == (500, "the figures cannot be read")
    await server.drain()
    assert caplog.text.count("Traceback") == 1


async def test_who_hangs_up_leaves_no_trace(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    server, address = await bound()
    assert server._endpoint is not None
    seen = []
    answer = server._endpoint.answer
    server._endpoint.answer = lambda *asked: (seen.append(asked), answer(*asked))[1]  # type: ignore[method-assign]
    host, port = address.rsplit(":", 1)
    for _ in range(5):
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset in place of an end
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        connection.close()
    await asyncio.to_thread(ask, address, "/metrics")
    await until(lambda: bool(seen))
    await server.drain()
    assert "Traceback" not in capfd.readouterr().err + caplog.text
