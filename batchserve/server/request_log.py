"""Logs one line per call: the method, how the call ended and how long it took. Never logs prompts or answers."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from batchserve.errors import shortened
from batchserve.types import MAX_REQUEST_ID_CHARS

if TYPE_CHECKING:
    from batchserve.types import Delta, FinishReason, RequestOutput, Started, Timing, Usage

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CallRecord:
    """The log fields of one call, filled in while the call is answered."""

    method: str
    peer: str
    level: int = logging.INFO
    request_id: str = ""
    tenant: str = ""
    prompt_tokens: int | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    _begun_s: float = field(default_factory=time.monotonic)

    def asked(self, request_id: str) -> None:
        """Sets the client's request id. It is not validated yet, so a long one is shortened."""
        is_sound = len(request_id) <= MAX_REQUEST_ID_CHARS
        self.request_id = request_id if is_sound else shortened(request_id, MAX_REQUEST_ID_CHARS)

    def started(self, event: Started) -> None:
        self.request_id, self.prompt_tokens = event.request_id, event.prompt_tokens

    def finished(self, answer: Delta | RequestOutput) -> None:
        """Sets the result, from the last delta of a stream or a complete answer."""
        self.request_id, self.finish_reason = answer.request_id, answer.finish_reason
        self.usage, self.timing = answer.usage, answer.timing

    def log(self, status: str, reason: str = "") -> None:
        """Logs that the call has ended with this status. reason: the error's reason."""
        if not logger.isEnabledFor(self.level):
            return
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
        logger.log(self.level, "request", extra=fields)
