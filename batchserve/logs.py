"""Configures the log of a process: one record per line, as text or as JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = re.compile(r"[\w.:/\[\]%-]+", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class TextFormatter(logging.Formatter):
    """Time, level, logger and message, then extra fields as NAME=VALUE. A traceback has lines of its own.

    Control characters are escaped, so that text from a caller stays on the record's line.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = _CONTROL.sub(lambda match: json.dumps(match[0])[1:-1], super().formatMessage(record))
        return " ".join([line, *(f"{name}={_shown(value)}" for name, value in _extra(record).items())])


class JsonFormatter(logging.Formatter):
    """One JSON object: timestamp (UTC), level, logger, message, the record's extra fields, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "timestamp": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in _extra(record).items() if name not in fields}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = record.stack_info
        return json.dumps({name: _jsonable(value) for name, value in fields.items()})


LIBRARIES = ("transformers", "huggingface_hub")
CHATTY = ("httpx", "httpx2")  # log a line for each request to a hub
FORMATTERS: dict[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


def configure_logging(level: int = logging.INFO, log_format: str = "text") -> None:
    """Logs to standard error at this level or above, and other libraries at INFO or above. May be called again.

    If a program that uses this package has configured its own logging, that is left as it is.
    """
    root = logging.getLogger()
    for handler in _own_handlers():
        root.removeHandler(handler)
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[log_format]())
    handler.setLevel(level)  # the only limit for a library's logger with its own level
    root.addHandler(handler)
    root.setLevel(max(level, logging.INFO))
    logging.getLogger("batchserve").setLevel(level)
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    logging.captureWarnings(log_format == "json")


def log_format() -> str:
    """Returns this process's log format, to be passed to other processes."""
    return "json" if any(isinstance(handler.formatter, JsonFormatter) for handler in _own_handlers()) else "text"


def adopt_library_loggers() -> None:
    """Makes libraries that install their own handlers when imported log like everything else here."""
    if _own_handlers():
        for name in LIBRARIES:
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True


@contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """Yields a list that receives the messages of warnings that this package logs meanwhile."""
    found: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, logger = Noting(logging.WARNING), logging.getLogger("batchserve")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def _own_handlers() -> list[logging.Handler]:
    own = tuple(FORMATTERS.values())
    return [handler for handler in logging.getLogger().handlers if isinstance(handler.formatter, own)]


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _shown(value: object) -> str:
    """Returns the value's text. It is quoted, with non-ASCII characters escaped, unless it is plain."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _jsonable(value: object) -> object:
    """Returns the value, or its text if JSON cannot represent it, like NaN and infinities."""
    is_number = isinstance(value, int | float) and value == value and abs(value) != float("inf")
    return value if value is None or isinstance(value, str | bool) or is_number else str(value)
