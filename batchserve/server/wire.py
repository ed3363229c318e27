"""Calls that bring no message of the protocol: INVALID_ARGUMENT with details.

For bytes that do not parse gRPC would say a bare UNKNOWN; a call without any message it would never end, neither a
half-closed one nor one that stays open, which has its own deadline here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from batchserve.errors import DeadlineExceededError, InvalidRequestError
from batchserve.server.status import abort

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Awaitable, Callable

    Behaviour = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]]


MESSAGE_TIMEOUT_S = 30.0


class MalformedRequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Guards the methods of one service, whose requests are single messages and whose handlers are coroutines."""

    def __init__(self, service: str, failed_calls: Counter[str]) -> None:
        self._prefix = f"/{service}/"
        self._failed_calls = failed_calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The method's handler, guarded if it is one of the service's."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler  # type: ignore[no-any-return]
        is_stream = handler.response_streaming
        make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.stream_unary_rpc_method_handler
        behaviour = handler.unary_stream if is_stream else handler.unary_unary
        guarded: Any = make(
            _refusing_malformed(behaviour, self._failed_calls),
            request_deserializer=_returning_errors(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return guarded  # type: ignore[no-any-return]


def _returning_errors(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def wrapped(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return wrapped


def _refusing_malformed(behaviour: Behaviour, failed_calls: Counter[str]) -> Behaviour:
    async def wrapped(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with asyncio.timeout(MESSAGE_TIMEOUT_S):  # Python 3.11's wait_for may lose a cancellation
                request = await context.read()
        except TimeoutError:  # nothing else would ever end it
            what = f"the call's message was not there, or not all of it, after {MESSAGE_TIMEOUT_S:g} s"
            await abort(context, DeadlineExceededError(what), failed_calls)
        if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
            missing = InvalidRequestError("MISSING_MESSAGE", "request", None, "one message")
            await abort(context, missing, failed_calls)
        if isinstance(request, DecodeError):
            bound = "bytes that parse as the method's request message"
            malformed = InvalidRequestError("MALFORMED_MESSAGE", "request", "<bytes>", bound)
            await abort(context, malformed, failed_calls)
        return await behaviour(request, context)

    return wrapped
