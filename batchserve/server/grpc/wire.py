"""Reads and checks request messages before the handlers get them.

A missing or malformed message gets INVALID_ARGUMENT with details. The sizes in a large message are checked before it is
parsed. Large messages to other services are refused. gRPC itself would answer bytes that do not parse with a bare
UNKNOWN. It would never end a call without a message, whether half-closed or open. An open one has a deadline here.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from batchserve.errors import BatchserveError, DeadlineExceededError, InvalidRequestError
from batchserve.server.grpc.caller import CALLER, metadata_of
from batchserve.server.grpc.convert import refuse_unknown_fields
from batchserve.server.grpc.status import abort
from batchserve.server.grpc.wire_sizes import SMALL_MESSAGE_BYTES, check_sizes, malformed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from google.protobuf.descriptor import ServiceDescriptor
    from google.protobuf.message import Message

    from batchserve.server.open_calls import OpenCalls

    Behaviour = Callable[[Message, grpc.aio.ServicerContext[Any, Any]], Awaitable[None]]


MESSAGE_TIMEOUT_S = 30.0
MAX_READING_BYTES = 1 << 30  # of all messages that are being read, each as large as one may be
MIN_READING = 16
HURRIED_S = 2.0
# The ids of a larger message are counted in a thread. NumPy lets the event loop run meanwhile.
MAX_BYTES_ON_LOOP = 1 << 20
MAX_OTHER_BYTES = 4 << 10  # for health and reflection messages, which hold one name each


@dataclass(slots=True)
class Reading:
    """The messages of one tenant that are being read. Once there are as many as may be, each has HURRIED_S left."""

    places: asyncio.Semaphore
    limits: set[asyncio.Timeout] = field(default_factory=set)

    @asynccontextmanager
    async def one(self, limit: asyncio.Timeout) -> AsyncIterator[None]:
        """Waits for a place."""
        if self.places.locked():
            soon_s = asyncio.get_running_loop().time() + HURRIED_S
            for other in self.limits:
                if not other.expired() and (other.when() or 0.0) > soon_s:
                    other.reschedule(soon_s)
        async with self.places:
            self.limits.add(limit)
            try:
                yield
            finally:
                self.limits.discard(limit)


class MalformedRequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Guards the methods of one service, whose requests are single messages and whose handlers write their answers.

    For other services it refuses large messages, because their handlers parse any message on the event loop.
    """

    def __init__(self, service: ServiceDescriptor, calls: OpenCalls, max_receive_bytes: int) -> None:
        # gRPC holds of each call no more than its flow control's window until somebody reads the message.
        most = max(MIN_READING, MAX_READING_BYTES // max_receive_bytes)
        self._reading = defaultdict[str, Reading](lambda: Reading(asyncio.Semaphore(most)))  # by tenant
        self._methods = service.methods_by_name
        self._prefix = f"/{service.full_name}/"
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the method's handler with the checks around it."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler  # type: ignore[return-value]  # a method that nobody has
        if not handler_call_details.method.startswith(self._prefix):
            return self._bounded(handler, handler_call_details.method)
        name = handler_call_details.method.removeprefix(self._prefix)
        guarded: Any = grpc.stream_stream_rpc_method_handler(
            self._handling(handler.unary_stream or handler.unary_unary, name, handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return guarded  # type: ignore[no-any-return]

    def _bounded(self, handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        """Wraps a handler of another service to refuse large and malformed messages."""
        parse = handler.request_deserializer

        def parsed(data: bytes) -> Message | InvalidRequestError:
            if len(data) > MAX_OTHER_BYTES:
                bound = f"at most {MAX_OTHER_BYTES} bytes"
                return InvalidRequestError("MESSAGE_TOO_LARGE", "request", f"{len(data)} bytes", bound)
            try:
                return parse(data)  # type: ignore[no-any-return]
            except DecodeError:
                return malformed()

        async def sound(message: Message | InvalidRequestError, context: Any) -> Message:
            if isinstance(message, InvalidRequestError):  # raised in `parsed` it would become a bare UNKNOWN
                await self._refuse(context, method, message)
            return message

        async def streamed(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for response in handler.stream_stream(each(requests, context), context):
                yield response

        async def each(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Message]:
            async for message in requests:
                yield await sound(message, context)

        async def single(message: Message | InvalidRequestError, context: Any) -> Any:
            return await (handler.unary_unary or handler.unary_stream)(await sound(message, context), context)

        if handler.request_streaming:
            replaced: dict[str, Any] = {"stream_stream": streamed}
        else:
            replaced = {"unary_stream" if handler.response_streaming else "unary_unary": single}
        bounded: grpc.RpcMethodHandler[Any, Any] = handler._replace(request_deserializer=parsed, **replaced)
        return bounded

    def _handling(self, behaviour: Behaviour, name: str, parse: Callable[[bytes], Message]) -> Any:
        async def wrapped(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            try:
                CALLER.set(self._calls.keys.caller(metadata_of(context).get("authorization")))
                data = await self._checked(context, name)
                message = parse(data)
                if len(data) <= SMALL_MESSAGE_BYTES:  # check_sizes has seen every field of a larger one
                    refuse_unknown_fields(message)
            except DecodeError:
                await self._refuse(context, name, malformed())
            except BatchserveError as error:
                await self._refuse(context, name, error)
            await behaviour(message, context)

        return wrapped

    async def _checked(self, context: grpc.aio.ServicerContext[Any, Any], name: str) -> bytes:
        """Reads the call's message. Returns its bytes, which are known to be fast to parse."""
        try:
            # Not wait_for: that of Python 3.11 may lose a cancellation.
            async with asyncio.timeout(MESSAGE_TIMEOUT_S) as limit, self._reading[CALLER.get().tenant].one(limit):
                data: Any = await context.read()
        except TimeoutError:  # nothing else would end the call
            what = f"the call's message was not there, or not all of it, after {MESSAGE_TIMEOUT_S:g} s"
            raise DeadlineExceededError(what) from None
        if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
            raise InvalidRequestError("MISSING_MESSAGE", "request", None, "one message")
        if len(data) > SMALL_MESSAGE_BYTES:
            arguments = data, self._methods[name].input_type, self._calls.engine.info.max_model_len
            if len(data) > MAX_BYTES_ON_LOOP:
                await asyncio.to_thread(check_sizes, *arguments)
            else:
                check_sizes(*arguments)
        return data  # type: ignore[no-any-return]

    async def _refuse(self, context: grpc.aio.ServicerContext[Any, Any], name: str, error: Exception) -> NoReturn:
        await abort(
            context, error, self._calls.failed_calls, self._calls.record(name, context.peer(), metadata_of(context))
        )
