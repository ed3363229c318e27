"""Makes responses of errors, in the shape of the OpenAI API."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from batchserve.errors import BatchserveError, InvalidRequestError, UnauthenticatedError
from batchserve.server.error_table import code_of, message_of, reason_of, retry_after_s

if TYPE_CHECKING:
    from collections.abc import Mapping

# Reasons that clients know by another name.
_CODES = {
    "CONTEXT_EXCEEDED": "context_length_exceeded",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "UNAUTHENTICATED": "invalid_api_key",
    "UNKNOWN_MODEL": "model_not_found",
}
_TYPES = {429: "rate_limit_error", 504: "timeout_error"}


class HttpRefusal(BatchserveError):
    """A request that HTTP itself does not allow: its method, headers or body."""

    def __init__(self, status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.headers = status, reason, headers or {}


class ClientGoneError(Exception):
    """The client has closed its connection before its request was complete."""


def status_of(error: Exception) -> int:
    """Returns the HTTP status of an error."""
    return error.status if isinstance(error, HttpRefusal) else code_of(error).value


def headers_of(error: Exception) -> dict[str, str]:
    """Returns the headers of an error's response: after which time a client may try again."""
    if isinstance(error, HttpRefusal):
        return {**error.headers}
    if isinstance(error, UnauthenticatedError):
        return {"www-authenticate": "Bearer"}
    seconds = retry_after_s(error)
    if seconds is None:
        return {}
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1e3))}


def body_of(error: Exception, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the body of an error's response. names: the fields that have another name over HTTP."""
    status, reason = status_of(error), reason_of(error)
    message, param = message_of(error), None
    if isinstance(error, InvalidRequestError):
        param = param_of(error.field, names)
        message = message.replace(error.field, param, 1)
    kind = _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": _CODES.get(reason, reason.lower())}}


def param_of(field: str, names: Mapping[str, str]) -> str:
    """Returns a field's path in the request's body."""
    name, bracket, index = field.partition("[")
    return names.get(name, name) + bracket + index
