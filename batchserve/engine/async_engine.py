"""The asyncio side of the engine. The engine loop runs in a thread or in a separate process."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Unpack

from batchserve.engine.arguments import INLINE_SIZE, run_off_loop, seconds_of, size_of
from batchserve.engine.engine_process import EngineProcess
from batchserve.engine.engine_thread import EngineThread, build_here
from batchserve.engine.input_processor import qualified_id
from batchserve.engine.messages import Abort, Add, ClearScope, Done, End, Events, Message, Ping, Reply, Seen
from batchserve.engine.output_collector import collected
from batchserve.engine.stream import Stream
from batchserve.engine.watchers import StepWatchers
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
from batchserve.forks import OwnerProcess
from batchserve.types import (
    Delta,
    GenerateCall,
    ModelInfo,
    RequestOutput,
    SamplingParams,
    SpeculationParams,
    Started,
    check_tenant,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from batchserve.config import EngineConfig
    from batchserve.engine.backpressure import Backlog
    from batchserve.engine.host import EngineHost
    from batchserve.engine.launch import LaunchedProcess
    from batchserve.metrics import MetricsSource
    from batchserve.request import NewRequest
    from batchserve.runner.compiled_tokenizer import AnyTokenizer
    from batchserve.startup.build import BuiltEngine
    from batchserve.types import CallOptions, Prompt


class AsyncEngine:
    """An engine of the running asyncio loop. Call all methods there; requests on another loop raise RuntimeError."""

    def __init__(self, engine: BuiltEngine | EngineProcess, config: EngineConfig) -> None:
        """A built engine runs in a thread next to the loop."""
        self._host: EngineHost
        if isinstance(engine, EngineProcess):
            self._host = engine
        else:
            self._host = EngineThread(engine, config.draft.draft_cache)
        self._processor, self._info = self._host.processor, self._host.info
        self._maker = OwnerProcess("AsyncEngine")
        self._loop = asyncio.get_running_loop()
        self._places = config.max_num_seqs, config.max_waiting
        # Checking a grammar may take seconds; requests without one do not wait for it.
        self._grammar_thread = ThreadPoolExecutor(1, "batchserve-grammar-checks")
        self._tickets = itertools.count()
        self._streams: dict[int, Stream] = {}  # by ticket
        self._ids: dict[str, int] = {}  # request id to ticket
        self._asked: dict[int, asyncio.Future[None]] = {}  # by ticket; resolved by Done
        self._closed: BatchserveError | None = None  # shared, so each raise gets a fresh traceback
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._has_failed = asyncio.Event()
        self.watchers = StepWatchers(self._host.send)
        self._host.start(self._on_reply)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        on_progress: Callable[[str], None] | None = None,
        *,
        own_process: bool = False,
        launched: LaunchedProcess | None = None,
    ) -> AsyncEngine:
        """Loads and warms up the model in a thread. Raises ConfigError, UnsupportedModelError.

        own_process: runs the engine in its own process, with a separate interpreter (docs/performance.md). launched:
        that process, if it was started before.
        On return the drafter may still be compiling (unless `wait_for_drafter`). Until it is done there are no drafts.
        """
        if config.has_hub_model:  # before heavy imports, and once for all processes
            from batchserve.runner.hub import with_local_model

            config = await asyncio.to_thread(with_local_model, config)
        make: Callable[..., BuiltEngine | EngineProcess] = build_here
        if own_process:
            make = partial(EngineProcess, launched=launched)
        making = asyncio.get_running_loop().run_in_executor(None, make, config, on_progress)
        try:
            return cls(await asyncio.shield(making), config)
        except asyncio.CancelledError:
            making.add_done_callback(_kill)
            raise

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def tokenizer(self) -> AnyTokenizer | None:
        return self._processor.facts.tokenizer

    @property
    def metrics(self) -> MetricsSource:
        return self._host.metrics

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    def has_request(self, request_id: str, tenant: str = "") -> bool:
        return qualified_id(request_id, tenant) in self._ids

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> AsyncGenerator[Started | Delta, None]:
        """Yields one Started, then Deltas. The last Delta has finish_reason, usage and timing set. See GenerateCall.

        Raises a BatchserveError at any point. Closing the generator (aclose(), or cancelling the task that iterates
        it) aborts the request within one step; use contextlib.aclosing.
        """
        return self.events(GenerateCall(prompt, params, **options))

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> RequestOutput:
        """Like stream(), but returns the complete output. Cancelling the awaiting task aborts the request."""
        return await self.answer(GenerateCall(prompt, params, **options))

    async def answer(self, call: GenerateCall) -> RequestOutput:
        """Implements generate()."""
        return await collected(self.events(call, is_whole=True))

    async def events(
        self, call: GenerateCall, *, backlog: Backlog | None = None, is_whole: bool = False
    ) -> AsyncGenerator[Started | Delta, None]:
        """Implements stream(). backlog: counts Deltas that are not taken yet. is_whole: one Delta with everything."""
        arrival_s = time.monotonic()
        if not isinstance(call.request_id, str):
            raise InvalidRequestError("INVALID_REQUEST_ID", "request_id", call.request_id, "a string")
        deadline_s = seconds_of(call.deadline_s)
        request_id = call.request_id or uuid.uuid4().hex
        own_id = qualified_id(request_id, check_tenant(call.tenant))
        self._check_admission(request_id, own_id, call.model)
        streams = [self._open(own_id)]  # before the first await, so that no other request gets this id
        try:
            if deadline_s is not None and deadline_s <= 0:
                raise DeadlineExceededError("deadline passed before the request was queued")
            deadline_s = None if deadline_s is None else arrival_s + deadline_s
            token_ids = await run_off_loop(size_of(call.prompt), self._processor.tokenize, call.prompt)
            requests = await self._new_requests(call, request_id, token_ids, arrival_s, deadline_s, is_whole)
            self._check_open()
            if requests[0].sampling.logits_processors and isinstance(self._host, EngineProcess):
                value, bound = requests[0].sampling.logits_processors, "empty: the engine is a process of its own"
                raise InvalidRequestError("INVALID_LOGITS_PROCESSORS", "logits_processors", value, bound)
            if len(requests) > sum(self._places):
                bound = f"at most {sum(self._places)}: max_num_seqs and max_waiting together"
                raise InvalidRequestError("INVALID_N", "n", len(requests), bound)
            self.check_room(len(requests) - 1)
            forks = enumerate(requests[1:], 1)
            streams += [self._open(each.request_id, streams[0], index) for index, each in forks]
            for stream, request in zip(streams, requests, strict=True):
                stream.is_handed_over, stream.backlog = True, backlog
                self._host.send(Add(stream.ticket, request))
            yield Started(request_id, len(token_ids), list(token_ids))
            num_open = len(streams)
            while num_open:
                event = await streams[0].events.get()
                if isinstance(event, BatchserveError):
                    raise event.with_traceback(None)
                if backlog is not None:
                    backlog.shrink()
                event.request_id = request_id
                yield event
                num_open -= event.finish_reason is not None
        finally:
            for stream in streams:
                self._forget(stream)

    async def _new_requests(
        self,
        call: GenerateCall,
        request_id: str,
        token_ids: list[int],
        arrival_s: float,
        deadline_s: float | None,
        is_whole: bool,
    ) -> list[NewRequest]:
        """Returns the requests of a call, checked: in a thread if that takes long."""
        params = SamplingParams() if call.params is None else call.params
        speculation = SpeculationParams() if call.speculation is None else call.speculation
        arguments = (request_id, token_ids, params, speculation, arrival_s, deadline_s, call.priority, is_whole)
        make = partial(self._processor.new_requests, tenant=call.tenant)
        if not isinstance(params, SamplingParams) or self._processor.knows_grammar(params):
            references = speculation.references if isinstance(speculation, SpeculationParams) else ()
            return await run_off_loop(sum(map(len, references)), make, *arguments)
        try:
            async with asyncio.timeout(None if deadline_s is None else deadline_s - time.monotonic()):
                return await run_off_loop(INLINE_SIZE + 1, make, *arguments, thread=self._grammar_thread)
        except TimeoutError:
            raise DeadlineExceededError("deadline passed before the request was queued") from None

    async def drain(self, timeout_s: float) -> bool:
        """Refuses requests with UnavailableError, also those still being tokenised. Waits for the others to end.

        Returns True if all ended in time.
        """
        self._maker.check()
        self._closed = self._closed or UnavailableError("the server is draining: it takes no new requests")
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        return self._is_empty.is_set()

    async def wait_failed(self) -> None:
        """Waits until the engine has failed for good. From then on it refuses everything with EngineFaultError."""
        self._maker.check()
        await self._has_failed.wait()

    async def clear_draft_scope(self, draft_scope: str = "", tenant: str = "") -> None:
        """Clears what the requests of a draft scope have shared ("": the default scope). Returns once it is done.

        Requests in flight keep drafts from their own text. Raises InvalidRequestError and what new requests raise.
        """
        self._check_loop()
        scope = self._processor.resolve_scope(SpeculationParams(draft_scope=draft_scope).draft_scope, tenant)
        self._check_open()
        if scope is None:  # a private scope shares nothing
            return
        await self._ask(lambda ticket: ClearScope(ticket, scope))

    def isolate_default_scope(self) -> None:
        """Makes requests without a draft scope share nothing from now on, unless the configuration names a scope."""
        self._processor = self._processor.with_isolated_default_scope()

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids that a prompt has. Raises InvalidRequestError. add_special_tokens: to a text."""
        make = partial(self._processor.tokenize, add_special_tokens=add_special_tokens)
        return await run_off_loop(size_of(prompt), make, prompt)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids. Raises InvalidRequestError."""
        make = partial(self._processor.detokenize, skip_special_tokens=skip_special_tokens)
        return await run_off_loop(len(token_ids), make, token_ids)

    async def ping(self) -> None:
        """Waits until the engine takes a message, which it does between steps. Raises what new requests raise."""
        self._check_loop()
        self._check_open()
        await self._ask(Ping)

    async def _ask(self, message_with: Callable[[int], Message]) -> None:
        """Sends a message and waits until the engine has handled it."""
        ticket, done = next(self._tickets), self._loop.create_future()
        self._asked[ticket] = done
        self._host.send(message_with(ticket))
        try:
            await done
        finally:
            self._asked.pop(ticket, None)

    async def shutdown(self) -> None:
        """Ends every request in flight with UnavailableError. Waits for the engine to save the draft cache and end.

        Repeated calls are harmless.
        """
        self._maker.check()
        self._closed = UnavailableError("the server is shutting down")
        for stream in self._streams.values():
            stream.events.put_nowait(self._closed)
        self._host.send(End())
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._processor.grammars.close)
        await asyncio.to_thread(self._host.join)
        self._end_asked(self._closed)

    def kill(self) -> None:
        """Kills an engine that runs in its own process. Its draft cache is not saved."""
        self._maker.check()
        self._host.kill()
        self._processor.grammars.close()

    def _check_loop(self) -> None:
        """Raises an error on another loop or in a forked process, where no answer would ever arrive."""
        self._maker.check()
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("an AsyncEngine belongs to the asyncio loop that it was started on")

    def _check_admission(self, request_id: str, own_id: str, model: str) -> None:
        self._check_loop()
        self._check_open()
        if model and model != self._info.name:
            raise UnknownModelError(model, self._info.name)
        if own_id in self._ids:
            raise DuplicateRequestError(request_id)
        self.check_room()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed.with_traceback(None)

    def check_room(self, count: int = 1) -> None:
        """Raises QueueFullError if so many further requests have no room."""
        if len(self._streams) + count > sum(self._places):
            raise QueueFullError(*self._places)

    def _open(self, request_id: str, first: Stream | None = None, index: int = 0) -> Stream:
        """Opens a request's stream. first: that of the first sample of the same prompt; index: of this one."""
        stream = Stream(request_id, next(self._tickets), index=index)
        if first is not None:
            stream.events = first.events
        self._streams[stream.ticket] = stream
        self._ids[request_id] = stream.ticket
        self._is_empty.clear()
        return stream

    def _close(self, stream: Stream) -> None:
        del self._streams[stream.ticket], self._ids[stream.request_id]
        if not self._streams:
            self._is_empty.set()

    def _forget(self, stream: Stream) -> None:
        """Releases the request id. Aborts the request if it has not ended."""
        if stream.ticket in self._streams:
            self._close(stream)
            if stream.is_handed_over:
                self._host.send(Abort(stream.ticket))

    def _on_reply(self, reply: Reply) -> None:
        """Called in a thread of the engine."""
        self._loop.call_soon_threadsafe(self._take, reply)

    def _take(self, reply: Reply) -> None:
        """Handles a reply, on the loop."""
        if isinstance(reply, Events):
            self._dispatch(reply)
        elif isinstance(reply, Seen):
            self.watchers.take(reply)
        elif isinstance(reply, Done):
            done = self._asked.get(reply.ticket)
            if done is not None and not done.done():
                done.set_result(None) if reply.error is None else done.set_exception(reply.error)
        else:
            self._end_streams(reply.error, reply.is_consistent)

    def _dispatch(self, reply: Events) -> None:
        """Hands events to their streams. A request's last event releases its id at once."""
        for ticket, event in reply.events:
            stream = self._streams.get(ticket)
            if stream is None:  # closed in the meantime
                continue
            if stream.index and isinstance(event, Delta):
                event.index = stream.index
            stream.events.put_nowait(event)
            if not isinstance(event, Delta) or event.finish_reason is not None:
                self._close(stream)
            if stream.backlog is not None and isinstance(event, Delta):
                stream.backlog.grow()

    def _end_streams(self, error: EngineFaultError, is_consistent: bool) -> None:
        """Ends every request that was handed over, whether or not the core has taken it."""
        for stream in self._streams.values():
            if stream.is_handed_over:
                stream.events.put_nowait(error)
        self._end_asked(error)
        if not is_consistent:
            self._closed = EngineFaultError("the engine has failed and takes no requests; restart the server")
            self._has_failed.set()

    def _end_asked(self, error: BatchserveError) -> None:
        for done in self._asked.values():
            if not done.done():
                done.set_exception(error.with_traceback(None))


def _kill(made: asyncio.Future[BuiltEngine | EngineProcess]) -> None:
    """Kills an engine process whose start was cancelled."""
    engine = None if made.cancelled() or made.exception() is not None else made.result()
    if isinstance(engine, EngineProcess):
        engine.kill()
