"""Reads a stream of the OpenAI API (server-sent events) and notes when each token came."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from batchserve.errors import BatchserveError

if TYPE_CHECKING:
    from batchserve.bench.load_records import RequestRecord

DONE = b"[DONE]"
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


class StreamError(BatchserveError):
    """A stream that breaks the rules of its protocol. The message is short, so that failures can be counted by it."""

    reason = "MALFORMED_STREAM"


class EventReader:
    """Splits a stream into the data of its events."""

    def __init__(self) -> None:
        self._begun = b""  # a line whose end has not come
        self._data: list[bytes] = []  # of the event that has not ended

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yields the data of the events that end in this piece."""
        *lines, self._begun = (self._begun + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield data
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))


class OpenAiStream:
    """One answer of /v1/completions or /v1/chat/completions, which is written into a record."""

    def __init__(self, record: RequestRecord, now: Callable[[], float]) -> None:
        self._record, self._now = record, now
        self._events = EventReader()
        self._arrivals: list[tuple[float, int | None]] = []  # of each delta, with its tokens if the server tells
        self._num_tokens: int | None = None  # that the server has told of so far
        self._is_done = False

    def feed(self, piece: bytes) -> None:
        """Reads what has just arrived. Raises StreamError."""
        at_s = self._now()
        for data in self._events.feed(piece):
            if self._is_done:
                raise StreamError("event after [DONE]")
            if data.strip() == DONE:
                self._is_done = True
            else:
                self._add(at_s, _parsed(data))

    def settle(self) -> None:
        """Writes the tokens of the deltas into the record, also of a stream that has failed."""
        record = self._record
        counts = [count for _, count in self._arrivals if count is not None]
        if len(counts) == len(self._arrivals) and self._num_tokens is not None:
            record.deltas = [(at_s, count) for at_s, count in self._arrivals if count is not None]
            record.output_tokens = self._num_tokens
        else:
            record.counted_by = "text" if self._num_tokens is None else "answer"
            num_tokens = len(self._arrivals) if self._num_tokens is None else self._num_tokens
            record.deltas = spread([at_s for at_s, _ in self._arrivals], num_tokens)
            record.output_tokens = num_tokens

    def check_complete(self) -> None:
        """Raises StreamError if the end of the stream has not come."""
        if not self._is_done:
            raise StreamError("stream ended without [DONE]")
        if not self._record.finish_reason:
            raise StreamError("stream ended without a finish reason")

    def _add(self, at_s: float, event: dict[str, Any]) -> None:
        if event.get("error") is not None:
            raise StreamError(f"error in the stream{code_of(event)}")
        usage, before = event.get("usage"), self._num_tokens or 0
        if isinstance(usage, dict):
            self._record.prompt_tokens = _count(usage, "prompt_tokens")
            self._num_tokens = _count(usage, "completion_tokens")
        choices = event.get("choices")
        if not choices:
            return
        choice = choices[0] if isinstance(choices, list) else None
        if not isinstance(choice, dict):
            raise StreamError("malformed event")
        if isinstance(usage, dict):
            count = (self._num_tokens or 0) - before
            if count > 0:
                self._arrivals.append((at_s, count))
        elif _has_text(choice):
            self._arrivals.append((at_s, None))
        if choice.get("finish_reason") is not None:
            self._record.finish_reason = str(choice["finish_reason"])
        self._record.ended_s = at_s


def spread(times_s: list[float], num_tokens: int) -> list[tuple[float, int]]:
    """Shares tokens evenly among deltas that came at these times, the first one included, which makes the TTFT.

    Deltas that get none are left out.
    """
    num = len(times_s)
    ends = [-(-i * num_tokens // num) for i in range(num + 1)] if num else []  # rounded up
    shares = [end - start for start, end in pairwise(ends)]
    return [(at_s, share) for at_s, share in zip(times_s, shares, strict=True) if share]


def code_of(body: object) -> str:
    """Returns ": CODE" of an error's body, its type if it has no code, or nothing."""
    error = body.get("error") if isinstance(body, dict) else None
    code = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
    return f": {str(code)[:60]}" if code else ""


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise StreamError("malformed event") from None
    if not isinstance(event, dict):
        raise StreamError("malformed event")
    return event


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    if type(value) is not int or value < 0:
        raise StreamError("malformed usage")
    return value


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(name) for name in TEXT_FIELDS)
    return bool(choice.get("text"))
