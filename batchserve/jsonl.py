"""Reads files of recorded requests: one JSON object per line, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from batchserve.errors import ConfigError


class Line(NamedTuple):
    """One object, its location (for messages), and how far the file has been read, in bytes."""

    fields: dict[str, Any]
    where: str
    num_bytes: int


def read_lines(path: Path, option: str = "") -> Generator[Line, None, None]:
    """Yields the objects of a file, without empty lines. A caller that may stop early closes it (contextlib.closing).

    Raises ConfigError, which names the file, the line, and the option that the file was given by, if it has a name.
    """
    num_bytes = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                num_bytes += len(line)
                if line.strip():
                    where = f"{path} line {number}"
                    yield Line(_object(line, where), where, num_bytes)
    except OSError as error:
        what = f"{option} = {str(path)!r}" if option else str(path)
        raise ConfigError(f"{what}: cannot be read: {error.strerror}") from error


def text_of(line: Line, name: str) -> str:
    """Returns a field that must be a text, possibly empty. Raises ConfigError."""
    if name not in line.fields:
        raise ConfigError(f"{line.where}: field {name!r} is missing")
    value = line.fields[name]
    if not _is_text(value):
        raise ConfigError(f"{line.where}: field {name!r} must be a text")
    return value


def references_of(line: Line) -> list[str]:
    """Returns the texts of "reference" or "references", if there are any. Raises ConfigError."""
    given = [name for name in ("reference", "references") if line.fields.get(name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{line.where}: fields 'reference' and 'references' must not both be given")
    references = line.fields[given[0]] if given else []
    if not isinstance(references, list) or not all(_is_text(text) for text in references):
        raise ConfigError(f"{line.where}: field {given[0]!r} must be a list of texts")
    return references


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: must be a JSON object, is {type(fields).__name__}")
    return fields


def _is_text(value: object) -> TypeGuard[str]:
    """True for text. JSON can also hold half a character (a lone surrogate), which no tokenizer takes."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
