"""Logs one line per call: the method, how the call ended, how long it took; prompts and answers only if asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from batchserve.errors import shortened
from batchserve.types import MAX_REQUEST_ID_CHARS, Chat, Usage

if TYPE_CHECKING:
    from batchserve.server.tracing import Tracing
    from batchserve.types import Delta, FinishReason, Prompt, Started, Timing

logger = logging.getLogger(__name__)


def _added(one: Usage | None, other: Usage | None) -> Usage | None:
    if one is None or other is None:
        return one or other
    return Usage(**{name: count + getattr(other, name) for name, count in asdict(one).items()})


@dataclass(slots=True)
class CallRecord:
    """The log fields of one call, filled in while the call is answered.

    trace_context: the caller's traceparent and tracestate. begun_ns, arrival_ns: wall-clock time of the call's begin,
    and of the request's arrival at the engine. has_texts: prompt and answer are logged, too.
    """

    method: str
    peer: str
    level: int = logging.INFO
    tracing: Tracing | None = None
    trace_context: Mapping[str, str] = field(default_factory=dict)
    has_texts: bool = False
    request_id: str = ""
    tenant: str = ""
    prompt_tokens: int | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    begun_ns: int = field(default_factory=time.time_ns)
    arrival_ns: int = 0
    _prompts: list[object] = field(default_factory=list)
    _answer: list[str] = field(default_factory=list)
    _begun_s: float = field(default_factory=time.monotonic)

    def asked(self, request_id: str) -> None:
        """Sets the client's request id. It is not validated yet, so a long one is shortened."""
        is_sound = len(request_id) <= MAX_REQUEST_ID_CHARS
        self.request_id = request_id if is_sound else shortened(request_id, MAX_REQUEST_ID_CHARS)

    def admitted(self, prompt: Prompt) -> None:
        """The request goes to the engine now."""
        self.arrival_ns = time.time_ns()
        if self.has_texts:
            self._prompts.append([*map(dict, prompt.messages)] if isinstance(prompt, Chat) else prompt)

    def started(self, event: Started) -> None:
        self.request_id = self.request_id or event.request_id
        self.prompt_tokens = (self.prompt_tokens or 0) + event.prompt_tokens

    def received(self, delta: Delta) -> None:
        """Sets the result, from the last delta. Counts of several prompts and samples add up; times are of the last."""
        if self.has_texts:
            self._answer.append(delta.text)
        if delta.finish_reason is not None:
            self.request_id, self.finish_reason = self.request_id or delta.request_id, delta.finish_reason
            self.usage, self.timing = _added(self.usage, delta.usage), delta.timing

    def log(self, status: str, reason: str = "") -> None:
        """Logs that the call has ended with this status, and traces it. reason: the error's reason."""
        if logger.isEnabledFor(self.level):
            logger.log(self.level, "request", extra=self._fields(status, reason))
        if self.tracing is not None:
            self.tracing.ended(self, status, reason)

    def _fields(self, status: str, reason: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"method": self.method, "peer": self.peer, "status": status}
        if reason:
            fields["reason"] = reason
        if self.tenant:
            fields["tenant"] = self.tenant
        if self.request_id:
            fields["request_id"] = self.request_id
        if self.finish_reason is not None:
            fields["finish_reason"] = self.finish_reason.value
        if self.usage is not None:
            fields |= asdict(self.usage)
        elif self.prompt_tokens is not None:
            fields["prompt_tokens"] = self.prompt_tokens
        if self.timing is not None:
            fields |= {"queue_s": round(self.timing.queue_s, 6), "ttft_s": round(self.timing.first_token_s, 6)}
        fields["total_s"] = round(time.monotonic() - self._begun_s, 6)
        if self._prompts:
            fields["prompt"] = self._prompts[0] if len(self._prompts) == 1 else self._prompts
            fields["answer"] = "".join(self._answer)
        return fields
