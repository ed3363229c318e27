"""One HTTP call: its body in, its response or its stream of events out, and its end in every case."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.datastructures import Headers

from batchserve.engine.backpressure import Backlog
from batchserve.errors import BatchserveError, InvalidRequestError, UnreadAnswerError
from batchserve.server.error_table import code_of, reason_of
from batchserve.server.http.errors import ClientGoneError, HttpRefusal, body_of, headers_of, status_of
from batchserve.server.http.fields import Fields
from batchserve.server.http.limits import (
    BODY_BYTES_PER_TOKEN,
    BODY_TIMEOUT_S,
    MAX_BODY_BYTES,
    abort_of,
    too_large,
)
from batchserve.server.keys import Caller
from batchserve.server.request_log import CallRecord
from batchserve.types import Started

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

    from starlette.types import Receive, Scope, Send

    from batchserve.server.http.guard import HostGuard
    from batchserve.server.http.limits import Bodies
    from batchserve.server.open_calls import OpenCalls
    from batchserve.types import Delta, GenerateCall

logger = logging.getLogger(__name__)
T = TypeVar("T")
STATUS_TIMEOUT_S = 5.0
INLINE_PARTS = 2000  # log probabilities and texts in a response, some milliseconds
DISCARD_TIMEOUT_S, MAX_DISCARDED_BYTES = 2.0, 16 << 20
JSON = "application/json"
DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}


class HttpCall:
    """A call in progress.

    names: how fields are called over HTTP whose names differ, for errors; the call's handler fills them in.
    names_events: its stream has events with names, as that of the Responses API.
    """

    def __init__(
        self, calls: OpenCalls, scope: Scope, receive: Receive, send: Send, record: CallRecord, backlog: Backlog
    ) -> None:
        self.record, self.backlog = record, backlog
        self.caller = Caller()  # until it is known
        self._calls = calls
        self.headers = Headers(scope=scope)
        self.path, self.path_params = scope["path"], scope.get("path_params", {})
        self.names: dict[str, str] = {}
        self.num_events, self.names_events = 0, False
        self._scope, self._receive, self._send = scope, receive, send
        self._is_read = scope["method"] in ("GET", "HEAD")  # which have no body
        self._has_begun = self._is_streaming = False

    async def fields(self, bodies: Bodies, most: int) -> Fields:
        """Reads the body, a JSON object. Raises HttpRefusal, InvalidRequestError, ClientGoneError."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            raise HttpRefusal(415, "UNSUPPORTED_MEDIA_TYPE", f"Content-Type is {kind[:100]!r}: must be {JSON}")
        with bodies.counted() as body:
            declared = self.headers.get("content-length", "")
            if declared.isdecimal() and int(declared) > most:
                raise too_large(int(declared), most)
            parts: list[bytes] = []
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    while not self._is_read:
                        parts.append(await self._next_part())
                        body.grow(len(parts[-1]), most)
            except TimeoutError:
                raise HttpRefusal(
                    408, "SLOW_REQUEST", f"the body was not there, or not all of it, after {BODY_TIMEOUT_S:g} s"
                ) from None
            return Fields(_parsed(b"".join(parts)))

    async def gone(self) -> None:
        """Returns when the client has closed its connection. What is left of the body is forgotten."""
        with suppress(ClientGoneError):
            while True:
                await self._next_part()

    def authenticate(self) -> None:
        """Finds out who calls. Raises UnauthenticatedError."""
        self.caller = self._calls.keys.caller(self.headers.get("authorization"))
        self.record.tenant = self.caller.tenant

    def events(self, generation: GenerateCall, is_streaming: bool) -> AsyncGenerator[Started | Delta, None]:
        """Yields the engine's events: each step's, or one of each whole sample. Raises what the engine raises."""
        backlog = self.backlog if is_streaming else None
        is_whole = not is_streaming
        return self._calls.events(self.caller, generation, self.record, backlog=backlog, is_whole=is_whole)

    async def answer(
        self, body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a whole response of JSON."""
        await self.answer_bytes(_json(body), JSON, status, headers)

    async def answer_made(self, make: Callable[[], Mapping[str, Any]], size: int) -> None:
        """Sends a whole response of JSON that is made of so many parts: in a thread, if they are many."""
        if size <= INLINE_PARTS:
            await self.answer(make())
        else:
            await self.answer_bytes(await asyncio.to_thread(lambda: _json(make())), JSON)

    async def answer_bytes(
        self, body: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a whole response."""
        await self._begin(status, {"content-type": content_type, "content-length": str(len(body)), **(headers or {})})
        await self._write(body if self._scope["method"] != "HEAD" else b"", has_more=False)

    async def event(self, data: Mapping[str, Any], name: str = "") -> None:
        """Sends an event of a stream (server-sent events). The first one begins the response."""
        if not self._has_begun:
            self._is_streaming = True
            await self._begin(200, EVENT_HEADERS)
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        head = f"event: {name}\n" if name else ""
        self.num_events += 1
        await self._write(f"{head}data: {text}\n\n".encode(errors="replace"), has_more=True)

    async def end_events(self, last: bytes = DONE) -> None:
        """Ends the stream."""
        await self._write(last, has_more=False)

    async def fail(self, error: Exception, failed_calls: dict[str, int]) -> None:
        """Ends the call with the error: a response of its own, the last event of a stream, or a closed connection."""
        if isinstance(error, ClientGoneError):
            self.record.log("CANCELLED")
            return
        if not isinstance(error, BatchserveError):
            logger.error("unexpected error while answering %s", self.record.peer, exc_info=error)
        failed_calls[reason_of(error)] += 1
        status = str(error.status) if isinstance(error, HttpRefusal) else code_of(error).name
        self.record.log(status, reason_of(error))
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                if isinstance(error, UnreadAnswerError):
                    raise TimeoutError
                await self._send_error(error)
        except ClientGoneError:
            return
        except TimeoutError:
            abort_of(self._scope)()
            await asyncio.sleep(0)  # so that uvicorn learns of it before the call returns

    async def _send_error(self, error: Exception) -> None:
        body = body_of(error, self.names)
        if not self._has_begun:
            # A body that was not read would be taken for the next request.
            headers = headers_of(error)
            if not await self._discarded():
                headers["connection"] = "close"
            await self.answer(body, status_of(error), headers)
        elif self.names_events:
            event = {"type": "error", **body["error"], "sequence_number": self.num_events}
            await self.event(event, name="error")
            await self.end_events(b"")
        elif self._is_streaming:
            await self.event(body)
            await self.end_events()
        else:
            raise TimeoutError

    async def _discarded(self) -> bool:
        """Reads what is left of the body and forgets it: a connection that is closed before would lose the response.

        Returns False if there is too much of it.
        """
        num_bytes = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                while not self._is_read and num_bytes <= MAX_DISCARDED_BYTES:
                    num_bytes += len(await self._next_part())
        return self._is_read

    async def _next_part(self) -> bytes:
        """Returns a part of the body. Raises ClientGoneError."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._is_read = True
            raise ClientGoneError
        self._is_read = not message.get("more_body", False)
        return bytes(message.get("body", b""))

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._has_begun = True
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _write(self, body: bytes, *, has_more: bool) -> None:
        """Raises UnreadAnswerError if the client does not read what it was sent, or leaves too much unread."""
        try:
            await self.backlog.write(self._send({"type": "http.response.body", "body": body, "more_body": has_more}))
        except TimeoutError:
            raise UnreadAnswerError("the client does not take its answer; the request was ended") from None


class Endpoint:
    """An ASGI application for one route. It counts, logs and ends each call; what it raises ends the call.

    answer: gets the call, and the fields of its body if has_body. needs_key: a key, where there are keys. needs_room: a
    place in the engine. level: of the log line of a call that succeeds.
    """

    def __init__(
        self,
        calls: OpenCalls,
        guard: HostGuard,
        bodies: Bodies,
        name: str,
        answer: Callable[..., Awaitable[None]],
        *,
        has_body: bool = True,
        needs_key: bool = True,
        needs_room: bool = False,
        level: int = logging.INFO,
    ) -> None:
        self._calls, self._guard, self._bodies = calls, guard, bodies
        self._name, self._answer, self._level = name, answer, level
        self._has_body, self._needs_key, self._needs_room = has_body, needs_key, needs_room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        peer = f"{client[0]}:{client[1]}" if client else ""
        record = self._calls.record(self._name, peer, Headers(scope=scope), self._level)
        call = HttpCall(self._calls, scope, receive, send, record, Backlog(self._calls.unread))
        with call.backlog:
            try:
                self._guard.check(call.headers)
                if self._needs_key:
                    call.authenticate()
                if self._needs_room:  # an overloaded server has no time for bodies that it cannot answer
                    self._calls.engine.check_room()
                arguments = [await call.fields(self._bodies, self._max_body_bytes())] if self._has_body else []
                with self._calls.counted():  # not before: a drain does not wait for slow senders
                    answering = self._answer(call, *arguments)
                    arguments.clear()  # a body may be large, and its answer long
                    await _unless_gone(answering, call)  # type: ignore[arg-type]
                record.log("OK")
            except Exception as error:
                await call.fail(error, self._calls.failed_calls)
            except asyncio.CancelledError:
                record.log("CANCELLED")
                raise

    def _max_body_bytes(self) -> int:
        return MAX_BODY_BYTES + BODY_BYTES_PER_TOKEN * self._calls.engine.info.max_model_len


async def _unless_gone(answering: Coroutine[Any, Any, None], call: HttpCall) -> None:
    """Awaits the answer. Raises ClientGoneError, after ending it, if the client goes away before it is complete."""
    answer, gone = asyncio.create_task(answering), asyncio.create_task(call.gone())
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientGoneError
        answer.result()
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode(errors="replace")


def _parsed(body: bytes) -> dict[str, Any]:
    """Returns the JSON object that a body holds. Raises InvalidRequestError."""
    is_collecting = gc.isenabled()
    gc.disable()  # a body of a million small lists would be looked through again and again
    try:
        found = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        head = body[:80].decode(errors="replace")
        raise InvalidRequestError("INVALID_JSON", "body", head, f"JSON ({error})") from None
    finally:
        if is_collecting:
            gc.enable()
    if not isinstance(found, dict):
        raise InvalidRequestError("INVALID_JSON", "body", found, "a JSON object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
