"""Who makes the gRPC call that a task answers: the interceptor finds out, the servicer looks."""

from __future__ import annotations

from contextvars import ContextVar

from batchserve.server.keys import Caller

CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 - it is frozen
