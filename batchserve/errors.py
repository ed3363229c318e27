"""Domain exceptions. Nothing here depends on gRPC: only `server/` turns them into status codes."""

from __future__ import annotations

import errno
from typing import Any


class BatchserveError(Exception):
    """Base class of every error that this package raises on purpose.

    `reason` is a stable UPPER_SNAKE_CASE word that programs may match on.
    """

    reason: str = "INTERNAL"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the attributes, as an error may cross processes and not every error is built from its message."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[BatchserveError], args: tuple[object, ...], attributes: dict[str, object]) -> BatchserveError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class ConfigError(BatchserveError):
    """The engine cannot be built with these options."""

    reason = "INVALID_CONFIG"


class UnsupportedModelError(BatchserveError):
    """The model would give wrong answers, so it is refused."""

    reason = "UNSUPPORTED_MODEL"


class InvalidRequestError(BatchserveError):
    """An argument of a request is out of bounds. The message names the argument, the value and the bound.

    `field` is the argument's name in Python. The server gives its clients the path in their message instead.
    """

    def __init__(self, reason: str, field: str, value: object, bound: str) -> None:
        self.reason = reason
        self.field = field
        self.value = value
        self.bound = bound
        super().__init__(f"{field} = {shortened(value)}: must be {bound}")


def invalid(field: str) -> str:
    """Returns the reason for an argument out of bounds: INVALID_MAX_TOKENS for "max_tokens"."""
    return f"INVALID_{field.upper()}"


class UnknownModelError(BatchserveError):
    """The request names a model that is not served."""

    reason = "UNKNOWN_MODEL"

    def __init__(self, model: str, served: str) -> None:
        super().__init__(f"model = {shortened(model)}: not served here; the model being served is {served!r}")


class DuplicateRequestError(BatchserveError):
    """A request with this id is in flight."""

    reason = "DUPLICATE_REQUEST_ID"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request_id = {shortened(request_id)}: must be unique among the requests in flight")


class QueueFullError(BatchserveError):
    """There is no room for another running or waiting request. Try again later."""

    reason = "QUEUE_FULL"
    retry_after_s = 1.0

    def __init__(self, max_num_seqs: int, max_waiting: int) -> None:
        bound = f"at most max_num_seqs = {max_num_seqs} and max_waiting = {max_waiting} more"
        super().__init__(f"requests in flight = {max_num_seqs + max_waiting}: {bound}")


class UnavailableError(BatchserveError):
    """The server is warming up or draining."""

    reason = "UNAVAILABLE"
    retry_after_s = 2.0


class QuotaExceededError(BatchserveError):
    """A tenant has used up a limit of its key."""

    reason = "QUOTA_EXCEEDED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnauthenticatedError(BatchserveError):
    """A call without a key, or with one that is not known, where keys are needed."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(BatchserveError):
    """A call that its key does not allow."""

    reason = "PERMISSION_DENIED"


class DeadlineExceededError(BatchserveError):
    """The request's deadline passed before it finished."""

    reason = "DEADLINE_EXCEEDED"


class UnreadAnswerError(BatchserveError):
    """The client did not take its answer while it was generated, so the request was ended."""

    reason = "UNREAD_ANSWER"


class NonFiniteLogitsError(BatchserveError):
    """The model's numbers overflowed for this request, so its next token is undefined."""

    reason = "NON_FINITE_LOGITS"


class OutOfMemoryError(BatchserveError):
    """The system had no memory for a request's next step. Other requests go on."""

    reason = "OUT_OF_MEMORY"


class GrammarError(BatchserveError):
    """A request's grammar cannot be compiled, or has become too complex while its answer followed it."""

    reason = "INVALID_GRAMMAR"


class EngineFaultError(BatchserveError):
    """The engine failed, for this request alone or for all requests in flight, which then end with this error."""

    reason = "ENGINE_FAULT"


class ForkedProcessError(BatchserveError):
    """An engine was called in a fork of the process that made it. The engine's threads do not exist there."""

    reason = "FORKED_PROCESS"

    def __init__(self, what: str, made_in: int, called_in: int) -> None:
        super().__init__(
            f"{what}: made in process {made_in}, called in process {called_in}, which was forked from it; make it in "
            "the process that calls it, and start that by 'spawn' (multiprocessing) or without preloading (gunicorn)"
        )


def one_line(error: Exception) -> str:
    """Returns a third-party error's message in one line, or its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


# Messages, in lower case, of libraries that have no exception type for lack of memory.
NO_MEMORY = ("allocate memory", "out of memory", "bad_alloc", "start new thread", "failed to map segment")


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error, or one that it came from, says that the system has no memory left."""
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in chain:
        chain.append(found)
        found = found.__cause__ or found.__context__
    return any(
        isinstance(each, MemoryError)
        or (isinstance(each, OSError) and each.errno == errno.ENOMEM)
        or (isinstance(each, RuntimeError | ImportError) and any(word in str(each).lower() for word in NO_MEMORY))
        for each in chain
    )


def shortened(value: object, limit: int = 80) -> str:
    """Returns repr() of a value. If it is longer than `limit`, returns only its beginning, and its length."""
    try:
        text = repr(value[:limit] if isinstance(value, str) else value)  # a prompt may have megabytes
    except ValueError:  # an integer with more digits than Python prints
        text = f"<{type(value).__name__}>"
    size = len(value) if isinstance(value, str) else len(text)  # the size of a string is without its quotes
    return text if max(size, len(text)) <= limit else f"{text[:limit]}... ({size} characters)"
