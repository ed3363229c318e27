"""The gRPC service. Each generation call runs one engine request and ends with it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchserve.engine.backpressure import Backlog
from batchserve.engine.output_collector import collected
from batchserve.errors import (
    InvalidRequestError,
    UnknownModelError,
    UnreadAnswerError,
)
from batchserve.server.grpc.answers import to_generate_response, to_model_info, to_stats, to_stream_responses
from batchserve.server.grpc.caller import CALLER, metadata_of
from batchserve.server.grpc.convert import (
    check_num_tokens,
    from_generate_request,
    from_tokenize_request,
    with_path,
)
from batchserve.server.grpc.status import abort
from batchserve.server.keys import Caller
from batchserve.server.open_calls import OpenCalls
from batchserve.server.request_log import CallRecord
from batchserve.types import GenerateCall
from batchserve.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc
    from google.protobuf.message import Message

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
SERVICE_NAME: str = SERVICE.full_name


class GenerationServicer:
    """Implements every method of protos/batchserve/v1/generation.proto.

    Unary methods write their answer as well, because the server cannot tell whether the client reads an answer that a
    method returns. The interceptor (wire.py) has found out who calls.
    """

    def __init__(self, version: str, calls: OpenCalls) -> None:
        self._version = version
        self._calls = calls

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, pb.GenerateResponse]
    ) -> None:
        """Answers with the complete output. Cancelling the call cancels this task, which aborts the request."""
        async with self._answering(context, request, "Generate") as call:
            asked = await self._accepted(request, call)
            output = await collected(self._calls.events(call.caller, asked, call.record, is_whole=True))
            await call.write(to_generate_response(output))

    async def StreamGenerate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, pb.StreamGenerateResponse]
    ) -> None:
        """Streams an answer as it is generated.

        It writes messages instead of yielding them. A cancelled call then raises inside this coroutine, and `aclosing`
        frees the request at once. An async generator suspended at a yield would wait for the garbage collector.
        """
        async with self._answering(context, request, "StreamGenerate") as call:
            asked = await self._accepted(request, call)
            async with aclosing(self._calls.events(call.caller, asked, call.record, backlog=call.backlog)) as events:
                async for event in events:
                    for message in to_stream_responses(event):
                        await call.write(message)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, pb.GetModelInfoResponse]
    ) -> None:
        """Answers with the description of the served model."""
        async with self._answering(context, request, "GetModelInfo") as call:
            call.record.level = logging.DEBUG
            info = self._calls.engine.info
            if request.model not in ("", info.name):
                raise UnknownModelError(request.model, info.name)
            await call.write(to_model_info(info, self._version))

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[Any, pb.TokenizeResponse]
    ) -> None:
        """Answers with the token ids of a text or a chat."""
        async with self._answering(context, request, "Tokenize") as call:
            call.record.level = logging.DEBUG
            engine = self._calls.engine
            is_whole = request.add_special_tokens if request.HasField("add_special_tokens") else True
            token_ids = await engine.tokenize(from_tokenize_request(request), add_special_tokens=is_whole)
            await call.write(pb.TokenizeResponse(token_ids=token_ids, max_model_len=engine.info.max_model_len))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, pb.DetokenizeResponse]
    ) -> None:
        """Answers with the text of token ids."""
        async with self._answering(context, request, "Detokenize") as call:
            call.record.level = logging.DEBUG
            engine = self._calls.engine
            check_num_tokens(len(request.token_ids), engine.info.max_model_len)
            ids, is_skipping = [*request.token_ids], request.skip_special_tokens
            await call.write(pb.DetokenizeResponse(text=await engine.detokenize(ids, skip_special_tokens=is_skipping)))

    async def GetStats(
        self, request: pb.GetStatsRequest, context: grpc.aio.ServicerContext[Any, pb.GetStatsResponse]
    ) -> None:
        """Answers with the engine's load and counters. Waits for the engine's process for a few seconds at most."""
        async with self._answering(context, request, "GetStats") as call:
            call.record.level = logging.DEBUG
            call.caller.check_figures("GetStats")
            await call.write(to_stats(await asyncio.to_thread(self._calls.engine.metrics.reading)))

    async def ClearDraftScope(
        self, request: pb.ClearDraftScopeRequest, context: grpc.aio.ServicerContext[Any, pb.ClearDraftScopeResponse]
    ) -> None:
        """Clears what the requests of one of the caller's draft scopes have shared."""
        async with self._answering(context, request, "ClearDraftScope") as call:
            await self._calls.engine.clear_draft_scope(request.draft_scope, call.caller.tenant)
            await call.write(pb.ClearDraftScopeResponse())

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, pb.DrainResponse]) -> None:
        """Ends the server as SIGTERM does, once this call is answered."""
        async with self._answering(context, request, "Drain") as call:
            call.caller.check_admin("Drain")
            await call.write(pb.DrainResponse())
            self._calls.stop_asked.set()

    async def _accepted(self, request: pb.GenerateRequest, call: Call) -> GenerateCall:
        """Returns what the engine is asked."""
        call.record.asked(request.request_id)
        max_model_len = self._calls.engine.info.max_model_len
        asked = from_generate_request(request, max_model_len, call.context.time_remaining())
        await self._calls.wait_cancelled(request.request_id, call.caller)
        return asked

    @asynccontextmanager
    async def _answering(
        self, context: grpc.aio.ServicerContext[Any, Any], request: Message, method: str
    ) -> AsyncIterator[Call]:
        """Counts and logs one call. An error raised inside ends the call with the error's status."""
        caller = CALLER.get()
        record = self._calls.record(method, context.peer(), metadata_of(context))
        record.tenant = caller.tenant
        call = Call(context, caller, record, Backlog(self._calls.unread))
        with self._calls.counted():
            try:
                with call.backlog:
                    yield call
                call.record.log("OK")
            except InvalidRequestError as error:
                await abort(context, with_path(error, request), self._calls.failed_calls, call.record)
            except Exception as error:
                await abort(context, error, self._calls.failed_calls, call.record)
            except asyncio.CancelledError:
                call.record.log("CANCELLED")
                raise


@dataclass(slots=True)
class Call:
    """A call in progress."""

    context: grpc.aio.ServicerContext[Any, Any]
    caller: Caller
    record: CallRecord
    backlog: Backlog
    _has_begun: bool = False

    async def write(self, message: Message) -> None:
        """Sends a message. Raises UnreadAnswerError if the client does not read it, or leaves too much unread."""
        try:
            if not self._has_begun:
                # Sent separately: if this metadata were given up together with the first message, gRPC could send no
                # status later. This write also blocks if the client does not read its connection at all.
                await self.backlog.write(self.context.send_initial_metadata(()))
                self._has_begun = True
            await self.backlog.write(self.context.write(message))
        except TimeoutError:
            raise UnreadAnswerError("the client does not take its answer; the request was ended") from None
