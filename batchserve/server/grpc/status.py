"""Makes a google.rpc.Status of an error."""

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

from batchserve.errors import BatchserveError, InvalidRequestError, shortened
from batchserve.server.error_table import code_of, message_of, reason_of, retry_after_s

if TYPE_CHECKING:
    from collections import Counter

    from google.protobuf.message import Message

    from batchserve.server.request_log import CallRecord

logger = logging.getLogger(__name__)

DOMAIN = "batchserve"
# A status is sent in HTTP/2 trailers, which peers limit to 8 KiB by default. A larger status is lost entirely.
MAX_METADATA_CHARS = 200
STATUS_TIMEOUT_S = 2.0


def to_status(error: Exception) -> status_pb2.Status:
    """Returns the rich status of an error: an ErrorInfo, plus a BadRequest or a RetryInfo where it helps the client."""
    message, reason = message_of(error), reason_of(error)
    details: list[Message] = []
    if isinstance(error, InvalidRequestError):
        value = shortened(error.value, MAX_METADATA_CHARS)
        bound = error.bound[:MAX_METADATA_CHARS]
        details.append(_error_info(reason, field=error.field, value=value, bound=bound))
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    else:
        details.append(_error_info(reason))
    if (seconds := retry_after_s(error)) is not None:
        delay = Duration()
        delay.FromNanoseconds(round(seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return _status(code_pb2.Code.Value(code_of(error).name), message, *details)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, counts: Counter[str], record: CallRecord
) -> NoReturn:
    """Ends the call with the error's status and counts the error's reason.

    Logs errors from outside this package with their trace. Raises CancelledError if the call is already over: gRPC's
    InternalError reports before `context` that the client has gone or the deadline has passed. Also raises it if the
    client does not read the status within STATUS_TIMEOUT_S. gRPC then sends the status when the client reads again.
    """
    if context.cancelled() or isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from error
    if not isinstance(error, BatchserveError):
        logger.error("unexpected error while answering %s", context.peer(), exc_info=error)
    reason = reason_of(error)
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
    """Filters gRPC's own logger. False for records of calls that are over, and of malformed messages.

    Any caller could fill the log with malformed health and reflection messages. A call is over if it ended before gRPC
    could send its last status, for example because the deadline passed at that moment, or if it only ends when the
    server stops (health's Watch, reflection). Neither is an error, but gRPC logs it as one, with a trace. `abort` sees
    only what is raised inside our own handlers.
    """
    kind = record.exc_info[0] if record.exc_info else None
    # Compared by name: gRPC exports only the base class of ExecuteBatchError.
    is_over = kind is not None and (
        kind.__name__ == "ExecuteBatchError" or issubclass(kind, (asyncio.CancelledError, DecodeError))
    )
    if is_over:
        logger.debug("nobody is told of a call: %s", record.getMessage())
    return not is_over


def _error_info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)


def _status(code: int, message: str, *details: Message) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status
