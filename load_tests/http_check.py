"""What a well-formed stream of the OpenAI API is, checked event by event."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchserve.v1 import generation_pb2 as pb
from load_tests.stream_check import StreamRecord, StreamShapeError, check_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

DONE = "[DONE]"
FINISH_REASONS = ("stop", "length")
SAME_IN_ALL = ("id", "object", "created", "model")
OBJECTS = {True: "chat.completion.chunk", False: "text_completion"}  # by whether it is a chat


class FailedInStreamError(Exception):
    """The server ended a stream that had begun with an error."""


def sse_data(parts: Iterable[bytes]) -> Iterator[str]:
    """Yields the data of each server-sent event of a body. Raises StreamShapeError.

    batchserve sends events of one line, `data: ...`; anything else is refused.
    """
    left = b""
    for part in parts:
        *events, left = (left + part).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: ") or b"\n" in event:
                raise StreamShapeError(f"an event that is not one line of data: {event[:80]!r}")
            try:
                yield event.removeprefix(b"data: ").decode()
            except UnicodeDecodeError:
                raise StreamShapeError(f"an event that is not UTF-8: {event[:80]!r}") from None
    if left:
        raise StreamShapeError(f"ended in the midst of an event: {left[:80]!r}")


def consume_http(
    body: Mapping[str, Any], parts: Iterable[bytes], clock: Callable[[], float], sent_s: float
) -> StreamRecord:
    """Reads a stream of chunks to its end: one choice's chunks, the usage, [DONE].

    body: of the request. parts: of the response's body. Raises StreamShapeError, FailedInStreamError, and whatever
    reading raises.
    """
    stream = _Stream(is_chat="messages" in body, record=StreamRecord(sent_s))
    for data in sse_data(parts):
        stream.take(data, clock())
    stream.record.ended_s = clock()
    if not stream.is_done:
        raise StreamShapeError("ended before [DONE]")
    check_counts(
        stream.record,
        max_tokens=body.get("max_tokens"),
        is_speculating=body["speculation"]["is_enabled"],
        is_cut_at_max=stream.finish_reason == "length",
        also={
            f"total_tokens {stream.total_tokens} = prompt_tokens + completion_tokens": (
                stream.total_tokens == stream.record.usage.prompt_tokens + stream.record.usage.completion_tokens
            ),
        },
    )
    return stream.record


@dataclass(slots=True)
class _Stream:
    """A stream as far as it has come."""

    is_chat: bool
    record: StreamRecord
    head: dict[str, Any] = field(default_factory=dict)  # what all chunks have alike
    has_role: bool = False
    finish_reason: str = ""
    has_usage: bool = False
    total_tokens: int = 0
    is_done: bool = False

    def take(self, data: str, at_s: float) -> None:
        """Takes in an event. Raises StreamShapeError, FailedInStreamError."""
        if self.is_done:
            raise StreamShapeError("an event after [DONE]")
        if data == DONE:
            if not self.has_usage:
                raise StreamShapeError("[DONE] before " + ("the usage" if self.finish_reason else "a finish reason"))
            self.is_done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise StreamShapeError(f"an event that is not JSON: {data[:80]!r}") from None
        if not isinstance(chunk, dict):
            raise StreamShapeError(f"an event that is not an object: {data[:80]!r}")
        if "error" in chunk:
            raise FailedInStreamError(error_text(chunk))
        self._check_head(chunk)
        choices = chunk.get("choices")
        if choices == []:
            self._take_usage(chunk.get("usage"))
        elif isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
            if chunk.get("usage") is not None:
                raise StreamShapeError("a usage before the last chunk")
            self._take_choice(choices[0], at_s)
        else:
            raise StreamShapeError(f"choices = {str(choices)[:80]}: must be a list of one, or empty")

    def _check_head(self, chunk: Mapping[str, Any]) -> None:
        head = {name: chunk.get(name) for name in SAME_IN_ALL}
        if not self.head:
            self.head = head
            if not head["id"] or not head["model"] or not isinstance(head["created"], int):
                raise StreamShapeError(f"a chunk without an id, a model or a time: {head}")
            if head["object"] != OBJECTS[self.is_chat]:
                raise StreamShapeError(f"object = {head['object']!r}: must be {OBJECTS[self.is_chat]!r}")
        elif head != self.head:
            raise StreamShapeError(f"a chunk of another stream: {head} after {self.head}")

    def _take_choice(self, choice: Mapping[str, Any], at_s: float) -> None:
        if self.finish_reason:
            raise StreamShapeError("a choice after its finish reason")
        if choice.get("index") != 0:
            raise StreamShapeError(f"index = {choice.get('index')!r}: must be 0")
        if self.is_chat:
            self._check_delta(choice.get("delta"))
        elif not isinstance(choice.get("text"), str):
            raise StreamShapeError(f"text = {choice.get('text')!r}: must be a text")
        token_ids = choice.get("token_ids", [])
        if not isinstance(token_ids, list) or not all(isinstance(token, int) for token in token_ids):
            raise StreamShapeError(f"token_ids = {str(token_ids)[:80]}: must be a list of integers")
        self.record.arrivals.append((at_s, len(token_ids)))
        reason = choice.get("finish_reason")
        if reason is not None and reason not in FINISH_REASONS:
            raise StreamShapeError(f"finish_reason = {reason!r}: must be one of {', '.join(FINISH_REASONS)}")
        self.finish_reason = reason or ""

    def _check_delta(self, delta: object) -> None:
        if not isinstance(delta, dict) or not isinstance(delta.get("content", ""), str):
            raise StreamShapeError(f"delta = {str(delta)[:80]}: must be an object with a text")
        if ("role" in delta) == self.has_role:
            raise StreamShapeError("a second role" if self.has_role else "a delta before the role")
        if not self.has_role and delta["role"] != "assistant":
            raise StreamShapeError(f"role = {delta['role']!r}: must be 'assistant'")
        self.has_role = True

    def _take_usage(self, usage: object) -> None:
        if not self.finish_reason or self.has_usage:
            raise StreamShapeError("a second usage" if self.has_usage else "a usage before the finish reason")
        self.has_usage = True
        found = usage if isinstance(usage, dict) else {}
        details = found.get("completion_tokens_details")
        counts = {name: found.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        for name in ("draft_tokens", "accepted_draft_tokens"):
            counts[name] = details.get(name) if isinstance(details, dict) else None
        if not all(isinstance(count, int) and count >= 0 for count in counts.values()):
            raise StreamShapeError(f"usage = {str(usage)[:200]}: must have the counts {', '.join(counts)}")
        self.total_tokens = counts.pop("total_tokens")
        self.record.usage = pb.Usage(**counts)


def error_text(body: object) -> str:
    """Returns the code and the message of an error's body."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return f"not an error of the OpenAI API: {str(body)[:200]}"
    return f"{error.get('code')}: {error.get('message')}"
