"""The page at /: three files, without any resource from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchserve.server.http.call import HttpCall

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    # Nothing but these files and this server: not even what a prompt or an answer might smuggle in.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(call: HttpCall) -> None:
    """Answers with a file of the page."""
    name, kind = PAGE[call.path]
    await call.answer_bytes(_content(name), kind, headers=HEADERS)


@cache
def _content(name: str) -> bytes:
    return resources.files("batchserve.server.http").joinpath("page", name).read_bytes()
