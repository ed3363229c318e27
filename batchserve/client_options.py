"""Options of commands that ask a running server: its address, encryption and the caller's key."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from batchserve.errors import ConfigError
from batchserve.options import DRAFT_OPTIONS, ENGINE_OPTIONS, flag_of

if TYPE_CHECKING:
    import argparse
    import ssl

    from batchserve.server.grpc.tls import ClientTls

KEY_VARIABLES = ("BATCHSERVE_API_KEY", "OPENAI_API_KEY")


def add_tls_flags(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--tls", action="store_true", help="speak TLS with the server, which the system must trust")
    parser.add_argument("--tls-ca", metavar="FILE", help="speak TLS, and trust the certificates in this file instead")
    parser.add_argument("--tls-certificate", metavar="FILE", help="show this certificate to the server")
    parser.add_argument("--tls-key", metavar="FILE", help="the key of --tls-certificate")


def add_key_flag(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="the key to send with each request; other users of the machine can see it here, but not in the "
        f"environment (default: {', or else '.join(KEY_VARIABLES)}, or none)",
    )


def client_tls(arguments: argparse.Namespace) -> ClientTls | None:
    """Returns how to speak TLS, None for not at all. Raises ConfigError."""
    files = arguments.tls_ca, arguments.tls_certificate, arguments.tls_key
    if not arguments.tls and not any(files):
        return None
    from batchserve.server.grpc.tls import ClientTls

    return ClientTls(*files)


def https_context(url: str, tls: ClientTls | None) -> ssl.SSLContext | None:
    """Returns the TLS of connections to a URL, None for what the system trusts. Raises ConfigError for one without."""
    if tls is None:
        return None
    if not url.startswith("https://"):
        raise ConfigError(f"url = {url!r}: must begin with https:// for TLS")
    from batchserve.server.grpc.tls import client_context

    return client_context(tls)


def api_key(arguments: argparse.Namespace) -> str | None:
    """Returns the key to send, None for none. Raises ConfigError, which does not hold the key."""
    variables = (os.environ.get(name) for name in KEY_VARIABLES)
    key: str | None = arguments.api_key if arguments.api_key is not None else next(filter(None, variables), None)
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise ConfigError("api_key: must be printable ASCII characters, at least one")
    return key


def check_address(name: str, target: str) -> None:
    """Raises ConfigError for an address with which gRPC would use a wrong port: 443 without a port, 1 for 65537."""
    host, _, port = target.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= 65535
    if not host or not is_port or (":" in host and not host.endswith("]")):
        raise ConfigError(f"{name} = {target!r}: must be HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051")


def refuse_engine_options(arguments: argparse.Namespace, flag: str) -> None:
    """Raises ConfigError for options that would be ignored, as the engine is the server's. flag: what names it."""
    given = [flag_of(name) for name in (*ENGINE_OPTIONS, *DRAFT_OPTIONS) if name in arguments]
    if given:
        raise ConfigError(f"{', '.join(given)}: must not be given with {flag}, whose engine has its own options")
