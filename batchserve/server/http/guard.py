"""Keeps websites that a user visits from reaching a server on the user's own machine."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from batchserve.hosts import is_loopback
from batchserve.server.http.errors import HttpRefusal

if TYPE_CHECKING:
    from collections.abc import Mapping


class HostGuard:
    """Checks the Host and Origin headers of requests to a loopback address; elsewhere it lets all pass.

    A website whose name is made to resolve to 127.0.0.1 (DNS rebinding) sends its own name as Host. A website that
    sends requests across origins sends its own address as Origin.
    """

    def __init__(self, host: str) -> None:
        self._is_loopback = is_loopback(host)
        self._host = host

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises HttpRefusal."""
        if not self._is_loopback:
            return
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_own(host):  # browsers always send one
            message = f"Host is {host[:100]!r}: must name this machine, such as localhost or 127.0.0.1"
            raise HttpRefusal(403, "FOREIGN_HOST", message)
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            message = f"Origin is {origin[:100]!r}: must be absent or the server's own, http://{host}"
            raise HttpRefusal(403, "FOREIGN_ORIGIN", message)

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        # Not resolved: what an attacker's name resolves to is the attacker's choice.
        return name in ("localhost", "127.0.0.1", "::1", self._host.lower())
