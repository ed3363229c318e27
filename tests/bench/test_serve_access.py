"""`bench serve` and `run-batch` against servers that ask for keys or speak TLS."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import trustme

from batchserve.cli import main
from batchserve.server.keys import add_key
from batchserve.server_config import ServerConfig
from tests.server.fakes import FakeEngine
from tests.server.harness import serving


async def call(*arguments: str) -> int:
    return await asyncio.to_thread(main, [*arguments])


@pytest.fixture
def engine() -> Any:
    engine: Any = FakeEngine()
    engine.go_on.set()
    return engine


def batch(tmp_path: Path) -> list[str]:
    given = tmp_path / "in.jsonl"
    body = {"prompt": "a", "max_tokens": 2}
    given.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}) + "\n")
    return [str(given), str(tmp_path / "out.jsonl")]


def taken(file: str) -> str:
    """What is in the file, which is gone afterwards."""
    text = Path(file).read_text()
    Path(file).unlink()
    return text


async def test_a_key_is_taken_from_the_command_or_the_environment(engine: Any, tmp_path: Path, monkeypatch: Any):
    file = tmp_path / "keys.yaml"
    key = add_key(file, tenant="a")
    for name in ("BATCHSERVE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    async with serving(engine, ServerConfig(port=0, http_port=0, drain_timeout_s=10.0, keys=str(file))) as served:
        for target in (("--grpc", served.address), ("--url", served.url)):
            bench = ("bench", "serve", *target, "--num-requests", "1")
            assert await call(*bench, "--api-key", key) == 0
            assert await call(*bench, "--model", "fake") == 1, "every request fails"
        for name in ("OPENAI_API_KEY", "BATCHSERVE_API_KEY"):
            monkeypatch.setenv(name, key)
            assert await call(*bench) == 0
            monkeypatch.delenv(name)
        files = batch(tmp_path)
        assert await call("run-batch", *files, "--url", served.url) == 1
        assert '"response":{"status_code":401,' in taken(files[1])
        assert await call("run-batch", *files, "--url", served.url, "--api-key", key) == 0
        assert engine.arguments["tenant"] == "a"


async def test_a_server_with_a_certificate(engine: Any, tmp_path: Path, capsys: Any):
    authority, ca, chain, key = trustme.CA(), *(tmp_path / name for name in ("ca.pem", "server.pem", "server.key"))
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(ca))
    chain.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    config = ServerConfig(port=0, http_port=0, drain_timeout_s=10.0, tls_certificate=str(chain), tls_key=str(key))
    async with serving(engine, config) as served:
        url = served.url.replace("http://", "https://")
        for target in (("--grpc", served.address), ("--url", url)):
            assert await call("bench", "serve", *target, "--num-requests", "1", "--tls-ca", str(ca)) == 0
        assert await call("bench", "serve", "--url", url, "--num-requests", "1") == 1
        assert "TLS handshake failed: CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err
        assert await call("run-batch", *batch(tmp_path), "--url", url, "--tls-ca", str(ca)) == 0
        assert await call("run-batch", *batch(tmp_path), "--url", served.url, "--tls-ca", str(ca)) == 2
        assert "must begin with https:// for TLS" in capsys.readouterr().err
