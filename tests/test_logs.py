"""The log: one record a line, whatever a caller has sent."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from batchserve.logs import JsonFormatter, TextFormatter, adopt_library_loggers, configure_logging, log_format

pytestmark = pytest.mark.faults
FORGED = 'x" status=OK\n2026-01-01 00:00:00 INFO batchserve: forged\x1b[31m\u2028\x85'


def logged(formatter: logging.Formatter, message: str, *arguments: object, **options: object) -> str:
    stream = io.StringIO()
    logger, handler = logging.Logger("test.logs"), logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    logger.error(message, *arguments, **options)
    return stream.getvalue()


def test_json_has_the_extra_fields_flat_and_a_traceback_in_one_line():
    try:
        raise ValueError(FORGED)
    except ValueError:
        extra = {"request_id": FORGED, "total_s": 0.5, "bad": float("nan"), "reason": None, "status": "OK"}
        text = logged(JsonFormatter(), "said %s", FORGED, extra=extra, exc_info=True)
    assert len(text.splitlines()) == 1
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["level"] == "error"
    assert record["logger"] == "test.logs"
    assert record["message"] == f"said {FORGED}"
    assert record["timestamp"].endswith("Z")
    assert {name: record[name] for name in extra} == {**extra, "bad": "nan"}
    assert "ValueError" in record["exception"]


def test_extra_fields_cannot_take_the_place_of_the_records_own():
    record = json.loads(logged(JsonFormatter(), "real", extra={"level": "debug", "logger": "else", "timestamp": 0}))
    assert (record["message"], record["level"], record["logger"]) == ("real", "error", "test.logs")


def test_no_text_forges_a_line_or_a_field():
    text = logged(TextFormatter(), "said %s", FORGED, extra={"request_id": FORGED, "status": "REFUSED"})
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    assert text.endswith(" status=REFUSED\n")
    assert 'request_id="x\\" status=OK\\n' in text


@contextmanager
def bare_root() -> Iterator[logging.Logger]:
    """The root logger as a new process has it; pytest gives it handlers before each test's own code."""
    root, level = logging.getLogger(), logging.getLogger().level
    handlers, root.handlers = root.handlers, []
    try:
        yield root
    finally:
        root.handlers = handlers
        root.setLevel(level)
        logging.getLogger("batchserve").setLevel(logging.NOTSET)
        logging.captureWarnings(False)


def test_libraries_with_handlers_of_their_own_log_alike():
    library = logging.getLogger("huggingface_hub")
    kept = library.handlers[:], library.propagate
    try:
        library.addHandler(logging.StreamHandler())
        library.propagate = False
        with bare_root():
            adopt_library_loggers()
            assert not library.propagate, "another program's logging is left alone"
            configure_logging(logging.DEBUG, "json")
            adopt_library_loggers()
            assert (library.handlers, library.propagate) == ([], True)
    finally:
        library.handlers, library.propagate = kept


def test_levels_and_formats():
    with bare_root() as root:
        configure_logging(logging.DEBUG, "json")
        assert log_format() == "json"
        assert logging.getLogger("batchserve.any").isEnabledFor(logging.DEBUG)
        assert not logging.getLogger("numba").isEnabledFor(logging.DEBUG), "libraries say too much then"
        configure_logging(logging.ERROR)
        assert log_format() == "text"
        assert len(root.handlers) == 1
        assert not logging.getLogger("batchserve.any").isEnabledFor(logging.WARNING)
        assert root.handlers[0].level == logging.ERROR
