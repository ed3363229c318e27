"""The routes of the HTTP server."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from starlette.routing import Route, Router

from batchserve.server.http import service
from batchserve.server.http.call import Endpoint
from batchserve.server.http.chat import chat_completions
from batchserve.server.http.completions import completions
from batchserve.server.http.limits import Bodies
from batchserve.server.http.live import live
from batchserve.server.http.pages import PAGE, page
from batchserve.server.http.responses import responses

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import ASGIApp

    from batchserve.server.health import ServingStatus
    from batchserve.server.http.front import Front
    from batchserve.server.http.guard import HostGuard
    from batchserve.server.metrics_text import MetricsText


def make_app(front: Front, guard: HostGuard, status: ServingStatus, metrics: MetricsText) -> ASGIApp:
    """Returns the application."""
    bodies = Bodies()

    def route(path: str, answer: Callable[..., Awaitable[None]], *, level: int = logging.DEBUG) -> list[Route]:
        """Returns a route, and one that refuses other methods."""
        has_body = path in POSTED
        method = "POST" if has_body else "GET"
        endpoint = partial(
            Endpoint, front.calls, guard, bodies, level=level, needs_key=path not in OPEN, needs_room=path in GENERATING
        )
        return [
            Route(path, endpoint(path, answer, has_body=has_body), methods=[method]),
            Route(path, endpoint(path, partial(service.wrong_method, method), has_body=False)),
        ]

    routes = [
        *route("/v1/chat/completions", partial(chat_completions, front), level=logging.INFO),
        *route("/v1/completions", partial(completions, front), level=logging.INFO),
        *route("/v1/responses", partial(responses, front), level=logging.INFO),
        *route("/v1/models", partial(service.models, front)),
        *route("/v1/models/{model:path}", partial(service.model, front)),
        *route("/tokenize", partial(service.tokenize, front)),
        *route("/detokenize", partial(service.detokenize, front)),
        *route("/health", partial(service.health, status)),
        *route("/ready", partial(service.ready, status)),
        *route("/metrics", partial(service.metrics, metrics)),
        *route("/version", partial(service.version, front)),
        *route("/live", partial(live, front)),
        *(each for path in PAGE for each in route(path, page)),
        Route("/{path:path}", Endpoint(front.calls, guard, bodies, "unknown", service.not_found, has_body=False)),
    ]
    return Router(routes, redirect_slashes=False)  # without middleware: each endpoint ends its calls, also with errors


OPEN = ("/health", "/ready", *PAGE)  # also to those without a key: the page itself tells nothing
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
POSTED = (*GENERATING, "/tokenize", "/detokenize")
