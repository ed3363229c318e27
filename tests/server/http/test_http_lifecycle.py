"""HTTP while the server starts, fails, drains and is not read; and over TLS."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from batchserve.errors import EngineFaultError, NonFiniteLogitsError, OutOfMemoryError, QueueFullError
from batchserve.server.lifecycle import GenerationServer
from batchserve.server_config import ServerConfig
from tests.server.fakes import FakeEngine
from tests.server.harness import LOOPBACK, ask, serving, until
from tests.server.http.raw import post, request, send
from tests.server.test_tls import Files

PROMPT = {"prompt": [1, 2, 3], "max_tokens": 8}


async def test_before_the_engine_is_there_and_while_it_drains():
    server = GenerationServer(LOOPBACK, "test")
    await server.bind()
    url = f"http://{server.http_address}"
    assert (await request(url, "/health")).status == 200
    ready = await request(url, "/ready")
    assert (ready.status, ready.json) == (503, {"status": "warming up"})
    early = await post(url, "/v1/completions", PROMPT)
    assert (early.status, early.headers["retry-after"], early.error["code"]) == (503, "2", "unavailable")
    assert b"failed_calls" in (await request(url, "/metrics")).body
    engine: Any = FakeEngine()
    await server.open(engine)
    assert (await request(url, "/ready")).status == 200
    waiting = asyncio.create_task(post(url, "/v1/completions", {**PROMPT, "stream": True}))
    await until(lambda: engine.num_in_flight == 1)
    draining = asyncio.create_task(server.drain())
    await until(lambda: server._status.trouble == "draining")
    assert (await request(url, "/ready")).json == {"status": "draining"}
    assert (await request(url, "/health")).status == 200
    assert (await post(url, "/v1/completions", PROMPT)).status == 503
    engine.go_on.set()  # what was in flight comes to its end
    assert (await waiting).events[-2]["choices"][0]["finish_reason"] == "length"
    assert await draining
    with pytest.raises(OSError):  # noqa: PT011 - refused, or reset
        await request(url, "/health")


async def test_no_event_waits_for_the_client_to_confirm_the_one_before():
    engine: Any = FakeEngine()
    async with serving(engine) as served:
        host, _, port = served.server.http_address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        http: Any = served.server._http
        connections = http._server.server_state.connections
        await until(lambda: connections)
        (connection,) = connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


async def test_a_full_queue_is_said_before_the_body_is_looked_at():
    engine: Any = FakeEngine()

    def full() -> None:
        raise QueueFullError(4, 256)

    engine.check_room = full
    async with serving(engine) as served:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            answer = await post(served.url, path, b"no JSON")
            assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (429, "queue_full", "1")
        assert (await post(served.url, "/tokenize", b"no JSON")).status == 400


async def test_drain_ends_what_does_not_end_by_itself():
    engine: Any = FakeEngine()
    async with serving(engine, ServerConfig(port=0, http_port=0, drain_timeout_s=0.05)) as served:
        waiting = asyncio.create_task(post(served.url, "/v1/completions", {**PROMPT, "stream": True}))
        await until(lambda: engine.num_in_flight == 1)
        assert not await served.server.drain()
    *_, last, done = (await waiting).events
    assert (last["error"]["code"], last["error"]["type"], done) == ("unavailable", "server_error", "[DONE]")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFullError(4, 256), 429, "queue_full"),
        (OutOfMemoryError("no memory"), 429, "out_of_memory"),
        (NonFiniteLogitsError("not finite"), 500, "non_finite_logits"),
        (EngineFaultError("a\nTraceback: secret"), 500, "engine_fault"),
        (RuntimeError("secret"), 500, "internal"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
async def test_errors_of_the_engine(error: Exception, status: int, code: str):
    engine: Any = FakeEngine()
    engine.error = error
    engine.go_on.set()
    async with serving(engine) as served:
        whole = await post(served.url, "/v1/completions", PROMPT)
        streamed = await post(served.url, "/v1/completions", {**PROMPT, "stream": True})
        assert (whole.status, whole.error["code"]) == (status, code)
        assert ("retry-after" in whole.headers) == (code == "queue_full")
        assert streamed.status == 200  # it had begun
        assert streamed.events[-2:] == [whole.json, "[DONE]"]
        failed = await post(served.url, "/v1/completions", {**PROMPT, "prompt": [[1], [2]], "stream": True})
        assert failed.events[-2:] == [whole.json, "[DONE]"]
        assert b"secret" not in whole.body
        assert served.server._calls.failed_calls[code.upper()] == 3


@pytest.mark.parametrize("num_prompts", [1, 8])
async def test_a_stream_that_nobody_reads_is_ended(num_prompts: int):
    engine: Any = FakeEngine()

    async def events(call: Any, **_: Any) -> Any:
        from batchserve.types import Delta, Started

        yield Started("fake-id", 3)
        while True:
            yield Delta("fake-id", "a" * 100_000, [1])
            await asyncio.sleep(0)

    engine.events = events
    async with serving(engine, ServerConfig(port=0, http_port=0, unread_timeout_s=0.3)) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        body = json.dumps({**PROMPT, "prompt": [[1, 2, 3]] * num_prompts, "stream": True}).encode()
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
        await until(lambda: served.server._calls.failed_calls["UNREAD_ANSWER"] == 1)
        await served.server._calls.wait_idle()
        with suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        writer.close()
        assert (await request(served.url, "/health")).status == 200


async def test_requests_one_after_the_other_on_one_connection():
    engine: Any = FakeEngine()
    engine.go_on.set()
    async with serving(engine) as served:
        body = json.dumps(PROMPT).encode()
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        one = f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + body
        bad = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc"
        last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answers = await send(served.url, one + bad + one + last)
        text = answers.body.decode()
        assert (answers.status, text.count("HTTP/1.1 200 OK"), text.count("HTTP/1.1 415 ")) == (200, 2, 1)


async def test_tls_is_the_same_for_both(tmp_path: Path):
    files = Files(tmp_path)
    chain, key = files.server
    config = ServerConfig(port=0, http_port=0, tls_certificate=chain, tls_key=key, tls_client_ca=files.ca)
    engine: Any = FakeEngine()
    async with serving(engine, config) as served:
        url = served.url.replace("http://", "https://") + "/v1/models"

        def model(*shown: str) -> str:
            context = ssl.create_default_context(cafile=files.ca)
            if shown:
                context.load_cert_chain(*shown)
            with urllib.request.urlopen(url, context=context, timeout=10) as answer:
                return str(json.load(answer)["data"][0]["id"])

        assert await asyncio.to_thread(model, *files.client) == "fake"
        for refused in ((), files.stranger):
            with pytest.raises(OSError):  # noqa: PT011 - of the handshake, or of the first read
                await asyncio.to_thread(model, *refused)


async def test_without_http_there_is_only_grpc():
    engine: Any = FakeEngine()
    engine.go_on.set()
    async with serving(engine, ServerConfig(port=0, has_http=False)) as served:
        assert served.server.http_address is None
        assert (await served.client.generate(ask())).text == "ab"
