"""What a process logs, and how: one record a line, as text or as JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = re.compile(r"[\w.:/\[\]%-]+", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class TextFormatter(logging.Formatter):
    """Time, level, logger and message, then the record's extra fields as NAME=VALUE; a traceback has lines of its own.

    Whatever a caller has sent stays on the record's line: control characters are escaped.
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
CHATTY = ("httpx", "httpx2")  # a line for each request to a hub
FORMATTERS: dict[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


def configure_logging(level: int = logging.INFO, log_format: str = "text") -> None:
    """To standard error, from that level on; other libraries' records from INFO on at least. May be repeated.

    Where a program that uses this package has configured its own logging, that stays as it is.
    """
    root = logging.getLogger()
    for handler in _own_handlers():
        root.removeHandler(handler)
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[log_format]())
    handler.setLevel(level)  # a record of a library with a level of its own is stopped here alone
    root.addHandler(handler)
    root.setLevel(max(level, logging.INFO))
    logging.getLogger("batchserve").setLevel(level)
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    logging.captureWarnings(log_format == "json")


def log_format() -> str:
    """How this process logs: what another one has to be told to log alike."""
    return "json" if any(isinstance(handler.formatter, JsonFormatter) for handler in _own_handlers()) else "text"


def adopt_library_loggers() -> None:
    """Let libraries that have handlers of their own, once they are imported, log as everything else here does."""
    if _own_handlers():
        for name in LIBRARIES:
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True


def _own_handlers() -> list[logging.Handler]:
    own = tuple(FORMATTERS.values())
    return [handler for handler in logging.getLogger().handlers if isinstance(handler.formatter, own)]


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _shown(value: object) -> str:
    """A value without spaces, or quoted, with everything but ASCII escaped."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _jsonable(value: object) -> object:
    """The value, or its text where JSON has nothing like it: no number is NaN or infinite there."""
    is_number = isinstance(value, int | float) and value == value and abs(value) != float("inf")
    return value if value is None or isinstance(value, str | bool) or is_number else str(value)
