"""The engine loop: takes messages, runs steps, sends replies. One thread runs it, in this process or in another."""

from __future__ import annotations

import logging
import queue
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from batchserve.engine.grammar_queue import GrammarQueue
from batchserve.engine.messages import (
    Abort,
    Add,
    ClearScope,
    Compiled,
    Done,
    End,
    Events,
    Failed,
    Message,
    Reply,
    Watch,
)
from batchserve.engine.step_watch import StepWatch
from batchserve.errors import BatchserveError, EngineFaultError
from batchserve.native.pages import HeapTrimmer
from batchserve.types import Delta

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.engine.engine_core import Event
    from batchserve.request import DraftScope, Request
    from batchserve.startup.build import BuiltEngine

    _TicketEvent = tuple[int, Delta | BatchserveError]

logger = logging.getLogger(__name__)
LULL_S = 1.0  # idle time before the integrity check


class EngineLoop:
    """Runs an engine core until End. Any thread may put messages into `inbox`. run()'s thread calls `send`."""

    def __init__(self, built: BuiltEngine, draft_cache: str | None, send: Callable[[Reply], None]) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._built = built
        self._core = built.core
        self.metrics = built.core.metrics
        self._draft_cache = draft_cache
        self._send = send
        self._tickets: dict[Request, int] = {}  # of all requests in flight
        self._requests: dict[int, Request] = {}  # the inverse of _tickets
        self._lost: list[Request] = []  # their events cannot be sent; aborted after the current step
        self._grammars = GrammarQueue(built.grammars, built.info.vocab_size, self.inbox.put)
        self._is_ending = False
        self._is_sound = True
        self._heap = HeapTrimmer()
        self._core.emit = self._emit

    def run(self) -> None:
        """Handles messages and runs steps until End or a fatal failure. Then saves the draft cache unless it failed."""
        try:
            self._core.executor.bind_thread()
            while self._goes_on():
                pass
        finally:
            if self._is_sound:
                self._save_drafts()
            with self.metrics.faults.contained("drafter.close", "the engine ends"):
                self._core.drafter.close()
            self._grammars.close()

    def _goes_on(self) -> bool:
        try:
            return self._turn()
        except Exception:
            logger.exception("the engine failed; every request in flight is ended")
            self._is_sound = self._fail_all()
            return self._is_sound and not self._is_ending

    def _turn(self) -> bool:
        """Handles one message, or runs one step if there is none. Returns False after End."""
        try:
            message = self.inbox.get_nowait() if self._core.has_work else self._next_message()
        except queue.Empty:
            self._core.step()
            self._abort_lost()
            self._heap.trim_if_due()
            return True
        if isinstance(message, End):
            self._is_ending = True
            with self.metrics.contained:
                self.metrics.unfinished(num_aborted=len(self._requests))
            self._core.abort_all()
            return False
        if isinstance(message, Add):
            try:
                request = message.request.begin()
            except Exception as error:
                self.metrics.faults.note("request", error, "it has failed")
                failed = EngineFaultError(f"request_id = {message.request.request_id!r}: it cannot begin")
                self._send(Events([(message.ticket, failed)]))
                return True
            self._tickets[request] = message.ticket
            self._requests[message.ticket] = request
            if request.sampling.grammar is None:
                self._core.add(request)
            else:
                self._grammars.add(message.ticket, request)
        elif isinstance(message, Compiled):
            self._add_compiled(message)
        elif isinstance(message, Abort):
            self._abort(message.ticket)
        elif isinstance(message, Watch):
            self._core.watch = StepWatch(self._send) if message.is_on else None
        else:
            self._send(Done(message.ticket, self._clear(message.scope) if isinstance(message, ClearScope) else None))
        return True

    def _add_compiled(self, message: Compiled) -> None:
        request = self._requests.get(message.ticket)
        if request is None:  # aborted in the meantime
            return
        if message.error is None:
            self._core.add(request)
        else:
            self._core.refuse(request, message.error)

    def _clear(self, scope: DraftScope) -> EngineFaultError | None:
        """Clears a draft scope. Returns the error for the caller if that fails."""
        try:
            self._core.clear_draft_scope(scope)
        except EngineFaultError as error:
            return error
        return None

    def _abort_lost(self) -> None:
        lost, self._lost = self._lost, []
        for request in lost:
            self._core.abort(request)

    def _next_message(self) -> Message:
        """Waits for a message. Checks integrity only in a lull, because a new message has to wait for the check."""
        try:
            return self.inbox.get(timeout=LULL_S)
        except queue.Empty:
            self._core.check_integrity()
        while True:
            with suppress(queue.Empty):
                return self.inbox.get(timeout=self._core.idle())

    def _abort(self, ticket: int) -> None:
        request = self._requests.get(ticket)
        if request is not None:
            self._forget(request)
            self._core.abort(request)

    def _forget(self, request: Request) -> None:
        del self._requests[self._tickets.pop(request)]

    def _emit(self, events: list[Event]) -> None:
        """Sends events to the clients. A request whose event cannot be sent is ended. The others are not affected."""
        told: list[_TicketEvent] = []
        for request, event in events:
            ticket = self._tickets.get(request)
            if ticket is None:  # lost in the current step
                continue
            if isinstance(event, BatchserveError) or event.finish_reason is not None:
                self._forget(request)
            told.append((ticket, event))
        self._send_events(told)

    def _send_events(self, told: list[_TicketEvent]) -> None:
        """Sends the events in one message. If that fails, sends them one by one: a single event may be the cause."""
        try:
            if told:
                self._send(Events(told))
        except Exception as error:
            if len(told) > 1:
                for each in told:
                    self._send_events([each])
                return
            ticket = told[0][0]
            self._send(Events([self._lose(ticket, self._requests.get(ticket), error)]))

    def _lose(self, ticket: int, request: Request | None, error: Exception) -> _TicketEvent:
        """Ends a request after the current step. Returns the event to send to its client instead."""
        self.metrics.faults.note("stream", error, "the request has failed")
        if request is not None and ticket in self._requests:
            self._forget(request)
            self._lost.append(request)
        return ticket, EngineFaultError("the answer cannot be handed over; the request was ended")

    def _fail_all(self) -> bool:
        """Ends every request in flight with an error. Returns False if the core cannot continue afterwards."""
        is_consistent = True
        try:
            with self.metrics.contained:
                self.metrics.unfinished(num_failed=len(self._requests))
            self._tickets.clear()
            self._requests.clear()
            self._lost.clear()
            self._core.abort_all()
            self._core.check_integrity()
            self._core.executor.check_device()
        except Exception:
            logger.exception("the engine cannot be brought back to a consistent state")
            is_consistent = False
        self._send(Failed(EngineFaultError("the engine failed; the request was ended"), is_consistent))
        return is_consistent

    def _save_drafts(self) -> None:
        if self._draft_cache is None:
            return
        try:
            self._built.save_drafts(Path(self._draft_cache))
        except (BatchserveError, OSError) as error:  # all answers have been sent; only drafts are lost
            logger.error("draft cache: cannot be saved to %s: %s", self._draft_cache, error)
        except Exception:
            logger.exception("draft cache: cannot be saved to %s", self._draft_cache)
