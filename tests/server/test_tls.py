"""gRPC over TLS, and with certificates that clients must show."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from batchserve.errors import ConfigError
from batchserve.server.grpc.client import GenerationClient, RemoteError
from batchserve.server.grpc.tls import ClientTls, client_credentials, server_credentials
from batchserve.server_config import ServerConfig
from tests.server.fakes import FakeEngine
from tests.server.harness import serving


class Files:
    """PEM files of an authority, of a server at the loopback addresses, of a client, and of strangers."""

    def __init__(self, folder: Path) -> None:
        ca, other = trustme.CA(), trustme.CA()
        self.ca, self.other_ca = str(folder / "ca.pem"), str(folder / "other.pem")
        ca.cert_pem.write_to_path(self.ca)
        other.cert_pem.write_to_path(self.other_ca)
        self.server = self._pair(folder / "server", ca.issue_cert("127.0.0.1", "localhost"))
        self.client = self._pair(folder / "client", ca.issue_cert("client@example.org"))
        self.stranger = self._pair(folder / "stranger", other.issue_cert("client@example.org"))
        self.text = str(folder / "text.pem")
        Path(self.text).write_text("no certificate")

    def _pair(self, path: Path, issued: trustme.LeafCert) -> tuple[str, str]:
        chain, key = path.with_suffix(".pem"), path.with_suffix(".key")
        chain.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return str(chain), str(key)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


def server_config(files: Files, **more: Any) -> ServerConfig:
    chain, key = files.server
    return ServerConfig(port=0, http_port=0, drain_timeout_s=10.0, tls_certificate=chain, tls_key=key, **more)


async def name_of(address: str, tls: ClientTls | None) -> str:
    async with GenerationClient(address, tls) as client, asyncio.timeout(20):
        return str((await client.model_info()).model)


async def test_a_server_with_a_certificate(files: Files) -> None:
    engine: Any = FakeEngine()
    async with serving(engine, server_config(files)) as served:
        assert await name_of(served.address, ClientTls(files.ca)) == engine.info.name
        assert await name_of(served.address, ClientTls(files.ca, *files.stranger)) == engine.info.name  # not asked for
        for refused in (None, ClientTls(files.other_ca), ClientTls()):
            with pytest.raises(RemoteError, match="UNAVAILABLE"):
                await name_of(served.address, refused)


async def test_a_server_that_asks_for_certificates(files: Files) -> None:
    engine: Any = FakeEngine()
    async with serving(engine, server_config(files, tls_client_ca=files.ca)) as served:
        assert await name_of(served.address, ClientTls(files.ca, *files.client)) == engine.info.name
        for refused in (ClientTls(files.ca), ClientTls(files.ca, *files.stranger), None):
            with pytest.raises(RemoteError, match="UNAVAILABLE"):
                await name_of(served.address, refused)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda f: {"tls_certificate": f.server[0]}, "tls_certificate, tls_key: must be given together"),
        (lambda f: {"tls_key": f.server[1]}, "tls_certificate, tls_key: must be given together"),
        (lambda f: {"tls_client_ca": f.ca}, "tls_client_ca = .*: must be with tls_certificate and tls_key"),
        (lambda f: {"tls_certificate": f.server[0], "tls_key": ""}, "tls_key = '': must not be empty"),
        (lambda f: {"tls_certificate": f.text, "tls_key": f.server[1]}, "tls_certificate = .*text.pem.*in PEM"),
        (lambda f: {"tls_certificate": f.server[0], "tls_key": f.text}, "tls_certificate = .*server.pem.*in PEM"),
        (lambda f: {"tls_certificate": f.server[0], "tls_key": f.client[1]}, "with the key of the first in tls_key"),
        (lambda f: {"tls_certificate": f.ca + "x", "tls_key": f.server[1]}, "cannot be read .No such file"),
        (
            lambda f: {"tls_certificate": f.server[0], "tls_key": f.server[1], "tls_client_ca": f.text},
            "tls_client_ca = .*text.pem.*must be certificates in PEM",
        ),
    ],
)
def test_files_that_cannot_be_used(options: Callable[[Files], dict[str, str]], message: str, files: Files) -> None:
    with pytest.raises(ConfigError, match=message):
        server_credentials(ServerConfig(**options(files)))  # type: ignore[arg-type]


@pytest.mark.faults
def test_files_of_a_client_that_cannot_be_used(files: Files) -> None:
    for bad, message in (
        ({"ca": files.text}, "tls_ca = .*must be certificates in PEM"),
        ({"certificate": files.client[0]}, "certificate, key: must be given together"),
        ({"certificate": files.client[0], "key": files.server[1]}, "tls_certificate = .*in PEM"),
    ):
        with pytest.raises(ConfigError, match=message):
            client_credentials(ClientTls(**bad))


async def test_the_command_line(files: Files) -> None:
    engine: Any = FakeEngine()
    engine.go_on.set()

    async def status_of(*flags: str) -> tuple[int | None, str]:
        command = ["-m", "batchserve", "generate", "--prompt", "hello", "--max-tokens", "4", *flags]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
        _, said = await process.communicate()
        return process.returncode, said.decode()

    shown = ("--tls-certificate", files.client[0], "--tls-key", files.client[1])
    async with serving(engine, server_config(files, tls_client_ca=files.ca)) as served:
        target = ("--server", served.address, "--tls-ca", files.ca)
        assert (await status_of(*target, *shown))[0] == 0
        assert (await status_of(*target))[0] == 1
    assert await status_of("--tls-ca", files.ca) == (
        2,
        "batchserve: --tls, --tls-ca, --tls-certificate, --tls-key: must be with --server\n",
    )
