"""Which error has which code, for all protocols. No other module knows."""

from __future__ import annotations

import enum

from batchserve.errors import (
    BatchserveError,
    DeadlineExceededError,
    DuplicateRequestError,
    GrammarError,
    InvalidRequestError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    PermissionDeniedError,
    QueueFullError,
    QuotaExceededError,
    UnauthenticatedError,
    UnavailableError,
    UnknownModelError,
    UnreadAnswerError,
)

INTERNAL_MESSAGE = "internal error; the server's log has the details"
INTERNAL_REASON = "INTERNAL"
MAX_MESSAGE_CHARS = 1000


class Code(enum.Enum):
    """A google.rpc.Code by its name, with the status that HTTP has for it (google/rpc/code.proto)."""

    INVALID_ARGUMENT = 400
    UNAUTHENTICATED = 401
    PERMISSION_DENIED = 403
    NOT_FOUND = 404
    ALREADY_EXISTS = 409
    RESOURCE_EXHAUSTED = 429
    INTERNAL = 500
    UNAVAILABLE = 503
    DEADLINE_EXCEEDED = 504


_CODES: dict[type[BatchserveError], Code] = {
    InvalidRequestError: Code.INVALID_ARGUMENT,
    GrammarError: Code.INVALID_ARGUMENT,
    UnknownModelError: Code.NOT_FOUND,
    DuplicateRequestError: Code.ALREADY_EXISTS,
    UnauthenticatedError: Code.UNAUTHENTICATED,
    PermissionDeniedError: Code.PERMISSION_DENIED,
    QueueFullError: Code.RESOURCE_EXHAUSTED,
    QuotaExceededError: Code.RESOURCE_EXHAUSTED,
    UnreadAnswerError: Code.RESOURCE_EXHAUSTED,
    UnavailableError: Code.UNAVAILABLE,
    DeadlineExceededError: Code.DEADLINE_EXCEEDED,
    NonFiniteLogitsError: Code.INTERNAL,
    OutOfMemoryError: Code.RESOURCE_EXHAUSTED,
}


def code_of(error: Exception) -> Code:
    """Returns the code of an error; INTERNAL for those from outside this package."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), Code.INTERNAL)


def reason_of(error: Exception) -> str:
    """Returns the stable name of an error's kind."""
    return error.reason if isinstance(error, BatchserveError) else INTERNAL_REASON


def message_of(error: Exception) -> str:
    """Returns what a client is told. That of an error from outside this package reveals nothing about it."""
    if not isinstance(error, BatchserveError):
        return INTERNAL_MESSAGE
    # Only the first line: the rest could be the stack trace of an engine fault.
    return (str(error).splitlines() or [error.reason])[0][:MAX_MESSAGE_CHARS]


def retry_after_s(error: Exception) -> float | None:
    """Returns after how many seconds the call may succeed; None if it would fail again."""
    return error.retry_after_s if isinstance(error, QueueFullError | QuotaExceededError | UnavailableError) else None
