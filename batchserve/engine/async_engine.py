"""The asyncio side of the engine: streams in front, one thread with the core behind."""

from __future__ import annotations

import asyncio
import logging
import numbers
import queue
import threading
import time
import uuid
from collections.abc import Sized
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from batchserve.engine.build import BuiltEngine, build_engine
from batchserve.engine.engine_core import Event
from batchserve.engine.output_collector import OutputCollector
from batchserve.errors import (
    BatchserveError,
    DeadlineExceededError,
    DuplicateRequestError,
    EngineFaultError,
    InvalidRequestError,
    QueueFullError,
    UnavailableError,
    UnknownModelError,
)
from batchserve.types import Delta, ModelInfo, RequestOutput, SamplingParams, SpeculationParams, Started

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from batchserve.config import EngineConfig
    from batchserve.metrics import EngineMetrics
    from batchserve.request import Request

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
LULL_S = 1.0  # of nothing to do: then the books are checked
INLINE_SIZE = 4096  # characters, or token ids: shorter prompts are looked at on the loop, a thread would take longer


@dataclass(slots=True, eq=False)
class _Stream:
    """A request in flight, as the loop sees it. The queue is bounded by the context: one event a step."""

    request: Request | None = None
    events: asyncio.Queue[Delta | BatchserveError] = field(default_factory=asyncio.Queue)


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request


@dataclass(frozen=True, slots=True)
class _Abort:
    request: Request


@dataclass(frozen=True, slots=True, eq=False)
class _ClearScope:
    name: str
    done: asyncio.Future[None]  # belongs to the loop


_Message = _Add | _Abort | _ClearScope


class AsyncEngine:
    """One engine thread beside the running asyncio loop. All methods are called on that loop."""

    def __init__(self, built: BuiltEngine, config: EngineConfig) -> None:
        self._built = built
        self._core, self._processor, self._info = built.core, built.processor, built.info
        self._draft_cache = config.draft.draft_cache
        self._loop = asyncio.get_running_loop()
        self._places = config.max_num_seqs, config.max_waiting
        self._streams: dict[str, _Stream] = {}
        self._clearing: set[asyncio.Future[None]] = set()
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._closed: BatchserveError | None = None  # raised with a fresh traceback each time: it is shared
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._has_failed = asyncio.Event()
        self._core.emit = self._emit
        self._thread = threading.Thread(target=self._run, name="batchserve-engine", daemon=True)
        self._thread.start()

    @classmethod
    async def start(cls, config: EngineConfig, on_progress: Callable[[str], None] | None = None) -> AsyncEngine:
        """Load and warm the model in a thread; raises ConfigError, UnsupportedModelError.

        The drafter may still be compiling then (unless `wait_for_drafter`): requests go without drafts meanwhile.
        """
        built = await asyncio.to_thread(build_engine, config, on_progress, is_serving=True)
        return cls(built, config)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def metrics(self) -> EngineMetrics:
        return self._core.metrics

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        model: str = "",
        speculation: SpeculationParams | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Started | Delta, None]:
        """One Started, then Deltas; the last has finish_reason, usage and timing set. `deadline_s` is from now. Of
        two requests the one of higher `priority` (-1000..1000) comes first.

        Raises a BatchserveError at any point. Closing the generator (aclose(), or cancelling the task that iterates
        it) aborts the request within one step; use contextlib.aclosing.
        """
        arrival_s = time.monotonic()
        if not isinstance(request_id, str):
            raise InvalidRequestError("INVALID_REQUEST_ID", "request_id", request_id, "a string")
        deadline_s = _seconds(deadline_s)
        request_id = request_id or uuid.uuid4().hex
        self._check_door(request_id, model)
        stream = self._streams[request_id] = _Stream()  # taken before the first await: no one else gets this id
        self._is_empty.clear()
        try:
            if deadline_s is not None and not deadline_s > 0:  # NaN, too
                raise DeadlineExceededError("deadline passed before the request was queued")
            deadline_s = None if deadline_s is None else arrival_s + deadline_s
            size = len(prompt) if isinstance(prompt, Sized) else 0
            token_ids = await _beside_loop(size, self._processor.tokenize, prompt)
            references = speculation.references if isinstance(speculation, SpeculationParams) else ()
            request = await _beside_loop(
                sum(map(len, references)),
                self._processor.make_request,
                request_id,
                token_ids,
                SamplingParams() if params is None else params,
                SpeculationParams() if speculation is None else speculation,
                arrival_s,
                deadline_s,
                priority,
            )
            if self._closed is not None:
                raise self._closed.with_traceback(None)
            stream.request = request
            self._inbox.put(_Add(request))
            yield Started(request_id, len(token_ids), list(token_ids))
            while True:
                event = await stream.events.get()
                if isinstance(event, BatchserveError):
                    raise event.with_traceback(None)
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self._forget(request_id, stream)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        model: str = "",
        speculation: SpeculationParams | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """The same, whole. Cancelling the awaiting task aborts the request."""
        stream = self.stream(
            prompt,
            params,
            request_id=request_id,
            model=model,
            speculation=speculation,
            deadline_s=deadline_s,
            priority=priority,
        )
        collector = OutputCollector([])
        async with aclosing(stream):
            async for event in stream:
                if isinstance(event, Started):
                    collector = OutputCollector(event.prompt_token_ids)
                else:
                    collector.add(event)
        return collector.output()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse requests with UnavailableError, those that are still being tokenised, too, and wait for the others.

        Returns whether all ended in time.
        """
        self._closed = self._closed or UnavailableError("the server is draining: it takes no new requests")
        if self._is_empty.is_set():  # Python 3.11's wait_for times out at 0 without looking
            return True
        try:
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def wait_failed(self) -> None:
        """Returns once the engine has failed for good: from then on it refuses everything with EngineFaultError."""
        await self._has_failed.wait()

    async def clear_draft_scope(self, name: str = "") -> None:
        """Forget what the requests of a draft scope have shared; empty is the default scope. Returns once it is done.

        Requests in flight keep drafts from their own text. Raises InvalidRequestError, and what a new request would.
        """
        scope = self._processor.resolve_scope(SpeculationParams(draft_scope=name).draft_scope)
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        if scope is None:  # shares nothing
            return
        done: asyncio.Future[None] = self._loop.create_future()
        self._clearing.add(done)
        self._inbox.put(_ClearScope(scope, done))
        try:
            await done
        finally:
            self._clearing.discard(done)

    async def shutdown(self) -> None:
        """End every request in flight with UnavailableError and join the engine thread; then save the draft cache.

        Harmless when repeated.
        """
        self._closed = UnavailableError("the server is shutting down")
        for stream in self._streams.values():
            stream.events.put_nowait(self._closed)
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        self._end_clearing(self._closed)
        path, self._draft_cache = self._draft_cache, None
        if path is not None and not self._has_failed.is_set():
            await asyncio.to_thread(self._save_drafts, Path(path))
        await asyncio.to_thread(self._core.drafter.close)

    def _save_drafts(self, path: Path) -> None:
        try:
            self._built.save_drafts(path)
        except (BatchserveError, OSError):  # the answers have all been given; drafts are only lost
            logger.exception("draft cache: cannot be saved to %s", path)

    def _check_door(self, request_id: str, model: str) -> None:
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        if model and model != self._info.name:
            raise UnknownModelError(model, self._info.name)
        if request_id in self._streams:
            raise DuplicateRequestError(request_id)
        if len(self._streams) >= sum(self._places):
            raise QueueFullError(*self._places)

    def _forget(self, request_id: str, stream: _Stream) -> None:
        """Give the id back; abort the request if it has not ended."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            if stream.request is not None:
                self._inbox.put(_Abort(stream.request))
        if not self._streams:
            self._is_empty.set()

    def _dispatch(self, events: list[Event]) -> None:
        """On the loop: hand events to their streams; a terminal one frees the id at once."""
        for request, event in events:
            stream = self._streams.get(request.request_id)
            if stream is None or stream.request is not request:  # gone since
                continue
            stream.events.put_nowait(event)
            if not isinstance(event, Delta) or event.finish_reason is not None:
                del self._streams[request.request_id]
        if not self._streams:
            self._is_empty.set()

    def _end_streams(self, error: EngineFaultError, is_consistent: bool) -> None:
        """On the loop: end every request that has been handed over, whether the core had taken it yet or not."""
        for stream in self._streams.values():
            if stream.request is not None:
                stream.events.put_nowait(error)
        self._end_clearing(error)
        if not is_consistent:
            self._has_failed.set()

    def _end_clearing(self, error: BatchserveError) -> None:
        for done in self._clearing:
            if not done.done():
                done.set_exception(error.with_traceback(None))

    def _cleared(self, done: asyncio.Future[None]) -> None:
        if not done.done():
            done.set_result(None)

    # ---- the engine thread ----

    def _emit(self, events: list[Event]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._dispatch, events)
        except RuntimeError:  # the loop was closed without shutdown(): nobody listens any more
            logger.warning("event loop closed; %d events dropped", len(events))

    def _run(self) -> None:
        self._core.runner.bind_thread()
        is_going_on = True
        while is_going_on:
            try:
                is_going_on = self._turn()
            except Exception:
                logger.exception("the engine failed; every request in flight is ended")
                is_going_on = self._fail_all()

    def _turn(self) -> bool:
        """One message, or one step where there is none; False after the last."""
        try:
            message = self._inbox.get_nowait() if self._core.has_work else self._next_message()
        except queue.Empty:
            self._core.step()
            return True
        if message is None:
            self._core.abort_all()
            return False
        if isinstance(message, _Add):
            self._core.add(message.request)
        elif isinstance(message, _ClearScope):
            self._core.clear_draft_scope(message.name)
            with suppress(RuntimeError):  # the loop was closed without shutdown(): nobody waits any more
                self._loop.call_soon_threadsafe(self._cleared, message.done)
        else:
            self._core.abort(message.request)
        return True

    def _next_message(self) -> _Message | None:
        """Waits for it. Whoever comes while the books are checked would wait for that, so it is done in a lull."""
        try:
            return self._inbox.get(timeout=LULL_S)
        except queue.Empty:
            self._core.check_integrity()
            return self._inbox.get()

    def _fail_all(self) -> bool:
        """End every request in flight with an error; False, for good, if the core cannot go on afterwards."""
        error = EngineFaultError("the engine failed; the request was ended")
        is_consistent = True
        try:
            self._core.abort_all()
            self._core.check_integrity()
            self._core.runner.check_device()
        except Exception:
            logger.exception("the engine cannot be brought back to a consistent state")
            is_consistent = False
            self._closed = EngineFaultError("the engine has failed and takes no requests; restart the server")
        with suppress(RuntimeError):  # the loop was closed without shutdown(): nobody listens any more
            self._loop.call_soon_threadsafe(self._end_streams, error, is_consistent)
        return is_consistent


def _seconds(deadline_s: object) -> float | None:
    """A deadline as a float, which may be infinite. Raises InvalidRequestError for what is no number, or too large."""
    if deadline_s is None:
        return None
    with suppress(OverflowError):
        if isinstance(deadline_s, numbers.Real):
            return float(deadline_s)
    raise InvalidRequestError("INVALID_DEADLINE", "deadline_s", deadline_s, "a number of seconds")


async def _beside_loop(size: int, call: Callable[..., _T], *arguments: object) -> _T:
    """What the call returns; in a thread where there is so much to look at that the loop would wait for it."""
    if size > INLINE_SIZE:
        return await asyncio.to_thread(call, *arguments)
    return call(*arguments)
