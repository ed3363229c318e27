"""Encryption of gRPC: a server's certificate and key, and what a client trusts and shows."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from batchserve.errors import ConfigError, one_line
from batchserve.option_checks import check_tls

if TYPE_CHECKING:
    from batchserve.server_config import ServerConfig


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a client speaks to a server with TLS. ca: the file of certificates that it trusts (None: the system's).
    certificate, key: files of its own, for servers that ask for one.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        check_tls(self, "ca", "certificate", "key")


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Returns the credentials of a server with a certificate, None of one without. Raises ConfigError.

    gRPC itself would take files that do not fit together, and fail every handshake without a word.
    """
    if config.tls_certificate is None or config.tls_key is None:
        return None
    chain, key = _read("tls_certificate", config.tls_certificate), _read("tls_key", config.tls_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _check_pair(context, "tls_certificate", config.tls_certificate, config.tls_key)
    roots = _trusted(context, "tls_client_ca", config.tls_client_ca)
    return grpc.ssl_server_credentials([(key, chain)], roots, require_client_auth=roots is not None)


def client_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Returns what a client connects with over gRPC. Raises ConfigError."""
    client_context(tls)  # checks the files
    roots = None if tls.ca is None else _read("tls_ca", tls.ca)
    if tls.certificate is None or tls.key is None:
        return grpc.ssl_channel_credentials(roots)
    chain, key = _read("tls_certificate", tls.certificate), _read("tls_key", tls.key)
    return grpc.ssl_channel_credentials(roots, key, chain)


def client_context(tls: ClientTls) -> ssl.SSLContext:
    """Returns what a client connects with over HTTP. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if _trusted(context, "tls_ca", tls.ca) is None:
        context.load_default_certs()
    if tls.certificate is not None and tls.key is not None:
        _read("tls_certificate", tls.certificate)
        _read("tls_key", tls.key)
        _check_pair(context, "tls_certificate", tls.certificate, tls.key)
    return context


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} = {path!r}: cannot be read ({error.strerror})") from None


def _check_pair(context: ssl.SSLContext, name: str, certificate: str, key: str) -> None:
    def no_password() -> bytes:
        raise ConfigError(f"tls_key = {key!r}: must not be encrypted")

    try:
        context.load_cert_chain(certificate, key, password=no_password)
    except (ssl.SSLError, OSError) as error:
        what = "must be a certificate, or a chain of them, in PEM, with the key of the first in tls_key"
        raise ConfigError(f"{name} = {certificate!r}: {what} ({one_line(error)})") from None


def _trusted(context: ssl.SSLContext, name: str, path: str | None) -> bytes | None:
    """Returns the certificates in a file, None if there is none."""
    if path is None:
        return None
    found = _read(name, path)
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{name} = {path!r}: must be certificates in PEM ({one_line(error)})") from None
    return found
