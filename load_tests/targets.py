"""Where a server is and how it is spoken to, from Locust's --host and the options."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from locust.exception import LocustError

from batchserve.errors import ConfigError
from batchserve.server.grpc.tls import ClientTls, client_credentials

if TYPE_CHECKING:
    import grpc

GRPC, HTTP, AUTO = "grpc", "http", "auto"
HTTP_SCHEMES = ("http://", "https://")
HOST_NAME = re.compile(r"[\w.-]+|\[[0-9A-Fa-f:.%\w]+\]", re.ASCII)  # or an IPv6 address
EXPECTED = "must be the server's HOST:PORT, such as 127.0.0.1:50051, or for HTTP http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """The address of a server's HTTP. port: None is the scheme's own."""

    host: str
    port: int | None
    is_tls: bool


def protocol_of(host: str, protocol: str) -> str:
    """Returns the protocol that was chosen; if it is auto, HTTP for a URL of HTTP, and gRPC otherwise."""
    if protocol != AUTO:
        return protocol
    return HTTP if host.startswith(HTTP_SCHEMES) else GRPC


def grpc_address(host: str) -> str:
    """Returns HOST:PORT of what may be written as a URL. Raises LocustError."""
    address = host.removeprefix("http://").removeprefix("grpc://").rstrip("/")
    name, _, port = address.rpartition(":")
    if not name or not HOST_NAME.fullmatch(name) or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        raise LocustError(f"host = {host!r}: {EXPECTED}")
    return address


def http_target(host: str, has_tls: bool) -> HttpTarget:
    """Returns the address of a URL, or of HOST:PORT. Raises LocustError."""
    if not host.startswith(HTTP_SCHEMES):
        host = f"{'https' if has_tls else 'http'}://{grpc_address(host)}"
    parts = urlsplit(host)
    try:
        name, port = parts.hostname, parts.port
    except ValueError:
        name, port = None, None
    if not name or parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise LocustError(f"host = {host!r}: {EXPECTED}")
    if has_tls and parts.scheme == "http":
        raise LocustError(f"host = {host!r}: must be https:// with --server-tls and the options of its files")
    return HttpTarget(name, port, parts.scheme == "https")


def has_tls(options: Any) -> bool:
    """True if the options ask for TLS."""
    return bool(options.server_tls or any(_tls_files(options)))


def grpc_credentials(options: Any) -> grpc.ChannelCredentials | None:
    """Returns what a channel connects with; None without TLS. Raises LocustError."""
    if not has_tls(options):
        return None
    try:
        return client_credentials(ClientTls(*_tls_files(options)))
    except ConfigError as error:
        raise LocustError(str(error)) from None


def https_context(options: Any) -> ssl.SSLContext:
    """Returns what an HTTPS connection is made with. Raises LocustError."""
    try:
        tls = ClientTls(*_tls_files(options))
        client_credentials(tls)  # which says what is wrong with a file
    except ConfigError as error:
        raise LocustError(str(error)) from None
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context


def _tls_files(options: Any) -> tuple[str | None, str | None, str | None]:
    return options.server_tls_ca, options.server_tls_certificate, options.server_tls_key
