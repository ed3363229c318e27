"""The gRPC service: each call is one request of the engine, and ends with it."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from batchserve.errors import (
    DuplicateRequestError,
    EngineFaultError,
    InvalidRequestError,
    UnavailableError,
    UnknownModelError,
)
from batchserve.server.convert import (
    from_generate_request,
    refuse_unknown_fields,
    to_generate_response,
    to_model_info,
    to_stream_responses,
    with_path,
)
from batchserve.server.status import abort
from batchserve.types import Delta
from batchserve.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import grpc
    from google.protobuf.message import Message

    from batchserve.engine.async_engine import AsyncEngine
    from batchserve.types import RequestOutput

T = TypeVar("T")
# That a call was cancelled may be heard a little later than its client's next call with the same id: it takes a few
# threads' turns, which take longer on a busy machine. So these are counted, not seconds.
CANCEL_TURNS, CANCEL_TURN_S = 6, 0.002
SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerationServicer:
    """Every method of the contract (protos/batchserve/v1/generation.proto).

    Answers with UNAVAILABLE until `open` and from `close` on.
    """

    def __init__(self, version: str) -> None:
        self._version = version
        self._engine: AsyncEngine | None = None
        self._refusal = "the server is warming up"
        self.num_calls = 0  # that have come, answered or not
        self.failed_calls = Counter[str]()  # by reason
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def open(self, engine: AsyncEngine) -> None:
        """From now on requests go to this engine."""
        self._engine = engine

    def close(self, reason: str) -> None:
        """From now on requests are refused; those in flight go on."""
        self._engine = None
        self._refusal = reason

    async def wait_idle(self) -> None:
        """Returns once no call is being answered: the engine may be done before a slow client has read it all."""
        await self._is_idle.wait()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GenerateResponse:
        """One answer, whole. Cancelling the call cancels this task, which aborts the request."""
        async with self._answering(context, request):
            engine = self._opened()
            arguments = from_generate_request(request, engine.info.max_model_len)

            async def answer() -> RequestOutput:
                return await engine.generate(**arguments._asdict(), deadline_s=context.time_remaining())

            return to_generate_response(await _once_free(answer))

    async def StreamGenerate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, pb.StreamGenerateResponse]
    ) -> None:
        """One answer as it is made.

        Writes instead of yielding: a cancelled call then raises inside this coroutine, so that `aclosing` frees the
        request at once. An async generator left suspended at a yield would wait for the garbage collector.
        """
        async with self._answering(context, request):
            engine = self._opened()
            arguments = from_generate_request(request, engine.info.max_model_len)

            async def answer() -> bool:
                events = engine.stream(**arguments._asdict(), deadline_s=context.time_remaining())
                is_finished = False
                async with aclosing(events):
                    async for event in events:
                        for message in to_stream_responses(event):
                            await context.write(message)
                        is_finished = isinstance(event, Delta) and event.finish_reason is not None
                return is_finished

            if not await _once_free(answer):
                raise EngineFaultError("the engine's stream ended without a finish reason")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelInfoResponse:
        """What is being served."""
        async with self._answering(context, request):
            info = self._opened().info
            refuse_unknown_fields(request)
            if request.model not in ("", info.name):
                raise UnknownModelError(request.model, info.name)
            return to_model_info(info, self._version)

    def _opened(self) -> AsyncEngine:
        if self._engine is None:
            raise UnavailableError(self._refusal)
        return self._engine

    @asynccontextmanager
    async def _answering(self, context: grpc.aio.ServicerContext[Any, Any], request: Message) -> AsyncIterator[None]:
        """One call: counted while it lasts, and ended with the status of whatever is raised inside."""
        self._num_open += 1
        self.num_calls += 1
        self._is_idle.clear()
        try:
            yield
        except InvalidRequestError as error:
            await abort(context, with_path(error, request), self.failed_calls)
        except Exception as error:
            await abort(context, error, self.failed_calls)
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._is_idle.set()


async def _once_free(answer: Callable[[], Awaitable[T]]) -> T:
    """The answer to a request whose id another has that may be cancelled already. Raises DuplicateRequestError."""
    for _ in range(CANCEL_TURNS):
        try:
            return await answer()
        except DuplicateRequestError:  # before anything is said
            await asyncio.sleep(CANCEL_TURN_S)
    return await answer()
