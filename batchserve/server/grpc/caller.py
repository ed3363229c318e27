"""Keeps the caller of the gRPC call that a task answers: the interceptor sets it, the servicer reads it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from batchserve.server.keys import Caller

if TYPE_CHECKING:
    import grpc

CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 - it is frozen


def metadata_of(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    """Returns a call's metadata that is text."""
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
