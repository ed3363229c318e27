"""Which error has which code and which details."""

from __future__ import annotations

import asyncio
import logging

import pytest
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2
from grpc._cython import cygrpc

from batchserve.errors import (
    BatchserveError,
    DeadlineExceededError,
    DuplicateRequestError,
    EngineFaultError,
    InvalidRequestError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    QueueFullError,
    UnavailableError,
    UnknownModelError,
)
from batchserve.server.error_table import MAX_MESSAGE_CHARS
from batchserve.server.grpc.status import is_worth_logging, to_status


class _Narrower(QueueFullError):
    """A subclass has its parent's code."""


@pytest.mark.parametrize(
    ("error", "code", "reason", "kinds"),
    [
        (InvalidRequestError("R", "f", 1, "b"), code_pb2.INVALID_ARGUMENT, "R", {"ErrorInfo", "BadRequest"}),
        (UnknownModelError("a", "b"), code_pb2.NOT_FOUND, "UNKNOWN_MODEL", {"ErrorInfo"}),
        (DuplicateRequestError("a"), code_pb2.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", {"ErrorInfo"}),
        (QueueFullError(2, 3), code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", {"ErrorInfo", "RetryInfo"}),
        (_Narrower(2, 3), code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", {"ErrorInfo", "RetryInfo"}),
        (UnavailableError("x"), code_pb2.UNAVAILABLE, "UNAVAILABLE", {"ErrorInfo", "RetryInfo"}),
        (DeadlineExceededError("x"), code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", {"ErrorInfo"}),
        (NonFiniteLogitsError("x"), code_pb2.INTERNAL, "NON_FINITE_LOGITS", {"ErrorInfo"}),
        (OutOfMemoryError("x"), code_pb2.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY", {"ErrorInfo"}),
        (EngineFaultError("x"), code_pb2.INTERNAL, "ENGINE_FAULT", {"ErrorInfo"}),
        (BatchserveError("x"), code_pb2.INTERNAL, "INTERNAL", {"ErrorInfo"}),
        (ZeroDivisionError("x"), code_pb2.INTERNAL, "INTERNAL", {"ErrorInfo"}),
    ],
)
def test_code_reason_and_details(error, code, reason, kinds):
    status = to_status(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (status.code, info.reason, info.domain) == (code, reason, "batchserve")
    assert {detail.TypeName().split(".")[-1] for detail in status.details} == kinds


def test_an_unexpected_error_says_nothing_of_itself():
    assert b"secret" not in to_status(RuntimeError("secret path")).SerializeToString()


def test_no_trace_on_the_wire():
    assert to_status(EngineFaultError("step failed\nTraceback (most recent call last):")).message == "step failed"


def test_statuses_fit_into_trailers():
    error = InvalidRequestError("R", "f", "x" * 5_000_000, "b" * 100_000)
    status = to_status(error)
    assert len(status.message) == MAX_MESSAGE_CHARS
    assert len(status.SerializeToString()) < 4096
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.metadata["value"].endswith("... (5000000 characters)")


def test_a_call_that_was_over_is_no_error_and_all_else_stays_one(caplog: pytest.LogCaptureFixture):
    named = logging.getLogger("test.grpc")
    named.addFilter(is_worth_logging)
    over = cygrpc.ExecuteBatchError("over"), asyncio.CancelledError("stopped"), DecodeError("no message")
    for error in (*over, cygrpc.InternalError("listener"), RuntimeError("handler")):
        try:
            raise error
        except BaseException:
            named.exception("raised: %s", error)
    named.error("without a trace")
    seen = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert seen == ["raised: listener", "raised: handler", "without a trace"]
