"""Domain errors -> google.rpc.Status. The only place that knows which error has which code."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from batchserve.errors import (
    BatchserveError,
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    QueueFullError,
    UnavailableError,
    UnknownModelError,
    UnreadAnswerError,
    shortened,
)

if TYPE_CHECKING:
    from collections import Counter

    from google.protobuf.message import Message

    from batchserve.server.request_log import CallRecord

logger = logging.getLogger(__name__)

DOMAIN = "batchserve"
INTERNAL = "INTERNAL"
# Statuses travel in HTTP/2 trailers, which peers bound to 8 KiB by default; past it the whole status is lost.
MAX_MESSAGE_CHARS = 1000
MAX_METADATA_CHARS = 200
STATUS_TIMEOUT_S = 2.0

_CODES: dict[type[BatchserveError], int] = {
    InvalidRequestError: code_pb2.INVALID_ARGUMENT,
    UnknownModelError: code_pb2.NOT_FOUND,
    DuplicateRequestError: code_pb2.ALREADY_EXISTS,
    QueueFullError: code_pb2.RESOURCE_EXHAUSTED,
    UnreadAnswerError: code_pb2.RESOURCE_EXHAUSTED,
    UnavailableError: code_pb2.UNAVAILABLE,
    DeadlineExceededError: code_pb2.DEADLINE_EXCEEDED,
    NonFiniteLogitsError: code_pb2.INTERNAL,
    OutOfMemoryError: code_pb2.RESOURCE_EXHAUSTED,
}


def to_status(error: Exception) -> status_pb2.Status:
    """The rich status of an error: always an ErrorInfo, and a BadRequest or a RetryInfo where it helps the client.

    An error that is not the package's own says nothing of itself on the wire.
    """
    if not isinstance(error, BatchserveError):
        info = _error_info(INTERNAL)
        return _status(code_pb2.INTERNAL, "internal error; the server's log has the details", info)
    # Only the first line: what follows it could be a trace that an engine fault carries along.
    message = (str(error).splitlines() or [error.reason])[0][:MAX_MESSAGE_CHARS]
    details: list[Message] = []
    if isinstance(error, InvalidRequestError):
        value = shortened(error.value, MAX_METADATA_CHARS)
        bound = error.bound[:MAX_METADATA_CHARS]
        details.append(_error_info(error.reason, field=error.field, value=value, bound=bound))
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    else:
        details.append(_error_info(error.reason))
    if isinstance(error, QueueFullError | UnavailableError):
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return _status(_code(error), message, *details)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, counts: Counter[str], record: CallRecord
) -> NoReturn:
    """End the call with the error's status, counted by its reason; what is not the package's own is logged with its
    trace.

    Raises CancelledError if there is nobody left to tell: gRPC's own InternalError says that the call is over, be it
    that its client has gone or that its deadline has passed, before `context` does. The same where the client does not
    take the status for STATUS_TIMEOUT_S: gRPC has it, and sends it when the client reads on.
    """
    if context.cancelled() or isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from error
    if not isinstance(error, BatchserveError):
        logger.error("unexpected error while answering %s", context.peer(), exc_info=error)
    reason = error.reason if isinstance(error, BatchserveError) else INTERNAL
    rich = to_status(error)
    status: Any = rpc_status.to_status(rich)
    counts[reason] += 1
    record.log(code_pb2.Code.Name(rich.code), reason)
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            await context.abort(status.code, status.details, status.trailing_metadata)
    except (grpc.aio.InternalError, TimeoutError) as gone:
        raise asyncio.CancelledError from gone


def is_worth_logging(record: logging.LogRecord) -> bool:
    """A filter for gRPC's own logger: False for calls that nobody is to be told of any more, and for bytes that are no
    message of health or reflection: any caller could fill the log.

    They were over before gRPC itself could send their last status, as where a deadline passes just then, or had no end
    of their own until the server stopped: health's Watch, reflection. That is nobody's error, but gRPC logs it as one,
    with a trace; `abort` sees only what is raised inside of a handler of ours.
    """
    kind = record.exc_info[0] if record.exc_info else None
    # Of the first kind gRPC exports the base only.
    is_over = kind is not None and (
        kind.__name__ == "ExecuteBatchError" or issubclass(kind, (asyncio.CancelledError, DecodeError))
    )
    if is_over:
        logger.debug("nobody is told of a call: %s", record.getMessage())
    return not is_over


def _code(error: BatchserveError) -> int:
    internal: int = code_pb2.INTERNAL
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), internal)


def _error_info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)


def _status(code: int, message: str, *details: Message) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status
