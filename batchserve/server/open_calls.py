"""The calls in progress over all protocols, and the engine that they are for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from batchserve.engine.arguments import seconds_of
from batchserve.errors import EngineFaultError, UnavailableError
from batchserve.server.request_log import CallRecord
from batchserve.server.tenants import Tenants
from batchserve.server.tracing import CONTEXT_HEADERS
from batchserve.types import Started, check_priority

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from batchserve.engine.async_engine import AsyncEngine
    from batchserve.engine.backpressure import Backlog, BackpressureLimits
    from batchserve.server.keys import Caller, KeyStore
    from batchserve.server.tracing import Tracing
    from batchserve.types import Delta, GenerateCall

# A cancellation may reach the server slightly later than the client's next call with the same request id. It passes
# through several threads, which takes longer on a busy machine, so the server counts turns, not seconds.
CANCEL_TURNS, CANCEL_TURN_S = 6, 0.002


class OpenCalls:
    """What all protocols of one server share: its engine, or why there is none; keys and tenants; counts of calls;
    unread answers. stop_asked: set when a call, or a signal, asks for the server's end.
    """

    def __init__(self, unread: BackpressureLimits, keys: KeyStore, *, logs_prompts: bool = False) -> None:
        self.unread, self.keys, self.tenants = unread, keys, Tenants()
        self.num_calls = 0  # received, answered or not
        self.failed_calls = Counter[str]()  # by reason
        self.stop_asked = asyncio.Event()
        self.tracing: Tracing | None = None
        self.logs_prompts = logs_prompts
        self._engine: AsyncEngine | None = None
        self._refusal = "the server is warming up"
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def engine(self) -> AsyncEngine:
        """The engine that takes requests. Raises UnavailableError before `open` and from `close` on."""
        if self._engine is None:
            raise UnavailableError(self._refusal)
        return self._engine

    def open(self, engine: AsyncEngine) -> None:
        """Sends requests to this engine from now on."""
        self._engine = engine

    def close(self, reason: str) -> None:
        """Refuses requests from now on. Those in flight continue."""
        self._engine = None
        self._refusal = reason
        self.tenants.refuse_waiting(UnavailableError(reason))

    async def wait_idle(self) -> None:
        """Waits until no call is in progress. The engine may finish before a slow client has read its answer."""
        await self._is_idle.wait()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a call as in progress."""
        self._num_open += 1
        self.num_calls += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._is_idle.set()

    def record(self, method: str, peer: str, headers: Mapping[str, str], level: int = logging.INFO) -> CallRecord:
        """Returns the record of a new call. headers: HTTP's, or gRPC's metadata."""
        context = {name: headers[name] for name in CONTEXT_HEADERS if name in headers} if self.tracing else {}
        return CallRecord(method, peer, level, self.tracing, context, self.logs_prompts)

    async def events(
        self,
        caller: Caller,
        generation: GenerateCall,
        record: CallRecord,
        *,
        backlog: Backlog | None = None,
        is_whole: bool = False,
    ) -> AsyncGenerator[Started | Delta, None]:
        """Yields the engine's events, once the caller's limits let the request in. Raises what the engine raises, and
        QuotaExceededError. See AsyncEngine.events. record: of the call, is filled in.
        """
        engine = self.engine
        caller.check_priority(check_priority(generation.priority))
        deadline_s, begun_s = seconds_of(generation.deadline_s), time.monotonic()
        async with self.tenants.admitted(caller, generation.num_samples, deadline_s) as tenant:
            if deadline_s is not None:
                deadline_s -= time.monotonic() - begun_s
            generation = replace(generation, tenant=caller.tenant, deadline_s=deadline_s)
            record.admitted(generation.prompt)
            if caller.tokens_per_minute is not None:
                is_whole = False  # so that tokens are counted as they come, also those of calls that are given up
            num_open = generation.num_samples
            async with aclosing(engine.events(generation, backlog=backlog, is_whole=is_whole)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        record.started(event)
                        tenant.use(event.prompt_tokens, 0)
                    else:
                        record.received(event)
                        num_open -= event.finish_reason is not None
                        tenant.use(0, len(event.token_ids))
                    yield event
        if num_open:
            raise EngineFaultError("the engine's stream ended without a finish reason")

    async def wait_cancelled(self, request_id: str, caller: Caller) -> None:
        """Waits briefly for a cancelled call to release a request id."""
        for _ in range(CANCEL_TURNS):
            if not self.engine.has_request(request_id, caller.tenant):
                break
            await asyncio.sleep(CANCEL_TURN_S)
