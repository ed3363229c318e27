"""Addresses of servers: how they are written, and whether other machines can reach them."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the host, by any of its addresses. False if it cannot be resolved."""
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    with suppress(ValueError):
        return _is_loopback_address(host)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(_is_loopback_address(str(address[0])) for *_, address in found)


def join_address(host: str, port: int) -> str:
    """Returns HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback_address(text: str) -> bool:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
