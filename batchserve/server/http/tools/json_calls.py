"""Reads calls that are written as JSON objects, piece by piece: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from batchserve.server.http.tools.pieces import CallArguments, CallBegin, Piece, Text, new_call_id

if TYPE_CHECKING:
    from collections.abc import Iterator

ARGUMENTS = ("arguments", "parameters")  # Llama calls them parameters
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_SPECIAL = re.compile(r'["{}\[\]\\]')


class JsonScanner:
    """Finds the end of a JSON object or list whose text comes bit by bit. Remembers its place."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_text = self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """Returns where in this text, which follows what was scanned before, the value ends; None if it goes on."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = _SPECIAL.search(text, at)
            if found is None:
                return None
            at, mark = found.end(), found[0]
            if mark == "\\":
                self._is_escaped = self._is_text
            elif mark == '"':
                self._is_text = not self._is_text
            elif not self._is_text:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return at
        return None


class JsonCall:
    """Reads one call. Its arguments are handed on as they come, if its name comes before them."""

    def __init__(self) -> None:
        self._raw = ""  # all of the object so far
        self._outer = JsonScanner()
        self._arguments: JsonScanner | None = None
        self._is_over = False  # the arguments
        self.rest: str | None = None  # the text after the object, once that has ended

    @property
    def has_begun(self) -> bool:
        """True once the call was handed on, so that it cannot be given back as text."""
        return self._arguments is not None

    @property
    def raw(self) -> str:
        return self._raw

    def feed(self, text: str) -> Iterator[Piece]:
        """Yields what this text completes. What is no call is yielded as Text."""
        end = self._outer.end_in(text)
        inner, self.rest = (text, None) if end is None else (text[:end], text[end:])
        self._raw += inner
        if self._arguments is not None:
            yield from self._read_arguments(inner)
        elif head := _HEAD.match(self._raw):
            name = _loaded(head[1])
            if isinstance(name, str) and name:
                self._arguments = JsonScanner()
                yield CallBegin(new_call_id(), name)
                yield from self._read_arguments(self._raw[head.end() :])
        if self.rest is not None and self._arguments is None:
            yield from whole_call(self._raw)

    def _read_arguments(self, text: str) -> Iterator[Piece]:
        assert self._arguments is not None
        if self._is_over:
            return
        end = self._arguments.end_in(text)
        self._is_over = end is not None
        if part := text[:end]:
            yield CallArguments(part)


def whole_call(text: str) -> Iterator[Piece]:
    """Yields the call that a complete JSON object is, with its fields in any order; or else the text."""
    found = _loaded(text)
    name = found.get("name") if isinstance(found, dict) else None
    arguments: Any = {}
    if isinstance(found, dict):
        arguments = next((found[key] for key in ARGUMENTS if key in found), {})
    arguments = _loaded(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        yield Text(text)
        return
    yield CallBegin(new_call_id(), name)
    yield CallArguments(json.dumps(arguments, ensure_ascii=False))


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
