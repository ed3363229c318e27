"""What probes see of a server with keys, none of which they have: the table of docs/operations.md."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

from batchserve.errors import EngineFaultError
from batchserve.server.keys import add_key
from batchserve.server.lifecycle import GenerationServer
from batchserve.server_config import ServerConfig
from tests.deploy.files import DEPLOY
from tests.server.fakes import FakeEngine
from tests.server.harness import Client, until
from tests.server.http.raw import request

pytestmark = pytest.mark.faults
TIMEOUT_S = 30.0
WARMING_UP, SERVING, DRAINING, LOST = (
    ("NOT_SERVING", 503, 200),
    ("SERVING", 200, 200),
    ("NOT_SERVING", 503, 200),
    ("NOT_SERVING", 503, 503),
)


async def healthcheck(url: str) -> int:
    """The exit status of the container's health check."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(DEPLOY / "healthcheck.py")),
        env={"BATCHSERVE_READY_URL": url, "HTTP_PROXY": "http://127.0.0.1:9"},
        stdout=asyncio.subprocess.DEVNULL,
    )
    return await process.wait()


async def seen(address: str, http: str) -> tuple[str, int, int]:
    """gRPC's health, /ready and /health."""
    client = Client(address)
    try:
        return (
            await client.health_of(""),
            (await request(http, "/ready")).status,
            (await request(http, "/health")).status,
        )
    finally:
        await client.channel.close()


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    keys = tmp_path / "keys.yaml"
    add_key(keys, tenant="acme")
    return ServerConfig(port=0, http_port=0, keys=str(keys), stall_timeout_s=1.0, drain_timeout_s=20.0)


async def test_probes_from_the_start_to_the_end(config: ServerConfig):
    server, engine = GenerationServer(config, "test"), FakeEngine()
    address = await server.bind()
    http = f"http://{server.http_address}"
    assert (await seen(address, http), await healthcheck(f"{http}/ready")) == (WARMING_UP, 1)
    fake: Any = engine
    await server.open(fake)
    assert (await seen(address, http), await healthcheck(f"{http}/ready")) == (SERVING, 0)
    answers = asyncio.Event()
    fake.ping = answers.wait
    async with asyncio.timeout(TIMEOUT_S):
        while await seen(address, http) != LOST:  # noqa: ASYNC110 - it takes stall_timeout_s
            await asyncio.sleep(0.1)
        answers.set()
        while await seen(address, http) != SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    engine.num_in_flight, engine.is_empty = 1, asyncio.Event()  # somebody is still being answered
    draining = asyncio.create_task(server.drain())
    await until(lambda: server._status.trouble == "draining")
    assert (await seen(address, http), await healthcheck(f"{http}/ready")) == (DRAINING, 1)
    engine.is_empty.set()
    assert await draining
    assert await healthcheck(f"{http}/ready") == 1


async def test_probes_of_an_engine_that_has_failed(config: ServerConfig):
    server, engine = GenerationServer(config, "test"), FakeEngine()
    address = await server.bind()
    fake: Any = engine
    await server.open(fake)
    engine.error = EngineFaultError("it is broken")
    engine.has_failed.set()
    assert server._watching is not None
    await server._watching
    assert await seen(address, f"http://{server.http_address}") == LOST
    await server.drain()


async def test_the_health_check_over_tls(tmp_path: Path):
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    made = trustme.CA().issue_cert("example.org")
    made.private_key_pem.write_to_path(key)
    for blob in made.cert_chain_pems:
        blob.write_to_path(certificate, append=True)
    config = ServerConfig(port=0, http_port=0, tls_certificate=str(certificate), tls_key=str(key))
    server, engine = GenerationServer(config, "test"), FakeEngine()
    await server.bind()
    fake: Any = engine
    await server.open(fake)
    assert await healthcheck(f"https://{server.http_address}/ready") == 0
    assert await healthcheck(f"http://{server.http_address}/ready") == 1
    await server.drain()
