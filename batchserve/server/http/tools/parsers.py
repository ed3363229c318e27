"""The formats in which models write calls of tools."""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from batchserve.server.http.tools.json_calls import JsonCall, JsonScanner
from batchserve.server.http.tools.pieces import CallArguments, CallBegin, Piece, Text, new_call_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchserve.server.http.tools.pieces import ToolParser


class _Parser(ABC):
    """A parser as a machine: each state takes what it can of the text that has come, and names the next state."""

    def __init__(self) -> None:
        self._held = ""
        self._state: Callable[[], Iterator[Piece]] = self._begin

    def feed(self, text: str) -> Iterator[Piece]:
        self._held += text
        before = None
        while before != (self._held, self._state):  # until a state can do nothing with what there is
            before = self._held, self._state
            yield from self._state()

    def end(self) -> Iterator[Piece]:
        if self._held:
            yield Text(self._held)
            self._held = ""

    @abstractmethod
    def _begin(self) -> Iterator[Piece]:
        """The first state."""

    def _plain(self) -> Iterator[Piece]:
        """The state of what is only text."""
        if self._held:
            yield Text(self._held)
            self._held = ""

    def _text_before(self, marker: str) -> Iterator[Piece]:
        """Yields the text before a marker; holds back what may become one. Held text then begins with the marker."""
        at = self._held.find(marker)
        if at < 0:
            kept = next((n for n in range(len(marker) - 1, 0, -1) if self._held.endswith(marker[:n])), 0)
            at = len(self._held) - kept
        if text := self._held[:at]:
            self._held = self._held[at:]
            yield Text(text)


class _JsonParser(_Parser):
    """A parser of calls that are JSON objects. `_after` is the state after one of them."""

    _call: JsonCall
    _prefix = ""  # the text in front of the call, which is given back if it is none

    def _read_call(self) -> Iterator[Piece]:
        text, self._held = self._held, ""
        after = self._after
        for piece in self._call.feed(text):
            if isinstance(piece, Text):
                after, piece = self._begin, Text(self._prefix + piece.text)
            yield piece
        if self._call.rest is not None:
            self._held, self._state = self._call.rest, after

    def _enter(self, prefix: str) -> None:
        self._call, self._prefix, self._state = JsonCall(), prefix, self._read_call

    def end(self) -> Iterator[Piece]:
        if self._state == self._read_call and not self._call.has_begun:
            self._held = self._prefix + self._call.raw + self._held
        yield from super().end()

    @abstractmethod
    def _after(self) -> Iterator[Piece]:
        """The state after a call."""


class HermesParser(_JsonParser):
    """<tool_call>{...}</tool_call>, anywhere in the text, any number of times: Hermes, Qwen."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def _begin(self) -> Iterator[Piece]:
        yield from self._text_before(self.OPEN)
        if self._held.startswith(self.OPEN):
            self._held, self._state = self._held.removeprefix(self.OPEN), self._open

    def _open(self) -> Iterator[Piece]:
        stripped = self._held.lstrip()
        if not stripped:
            return
        if stripped.startswith("{"):
            prefix, self._held = self.OPEN + self._held.removesuffix(stripped), stripped
            self._enter(prefix)
        else:
            yield Text(self.OPEN)
            self._state = self._begin

    def _after(self) -> Iterator[Piece]:
        """Drops the closing tag, and white space between calls."""
        stripped = self._held.lstrip()
        if stripped.startswith(self.CLOSE):
            self._held, self._state = stripped.removeprefix(self.CLOSE), self._between
        elif not self.CLOSE.startswith(stripped):
            self._state = self._between
        yield from ()

    def _between(self) -> Iterator[Piece]:
        stripped = self._held.lstrip()
        if stripped.startswith(self.OPEN) or (stripped and not self.OPEN.startswith(stripped)):
            self._held = stripped if stripped.startswith(self.OPEN) else self._held
            self._state = self._begin
        yield from ()

    def end(self) -> Iterator[Piece]:
        if self._state == self._open:
            self._held = self.OPEN + self._held
        if self._state in (self._after, self._between) and self.CLOSE.startswith(self._held.strip()):
            self._held = ""
        yield from super().end()


class Llama3Parser(_JsonParser):
    """{"name": ..., "parameters": {...}}, several joined by semicolons, from the answer's beginning: Llama 3."""

    TAG = "<|python_tag|>"

    def _begin(self) -> Iterator[Piece]:
        stripped = self._held.lstrip()
        if stripped.startswith(self.TAG):
            stripped = stripped.removeprefix(self.TAG).lstrip()
        elif self.TAG.startswith(stripped):
            return
        if stripped.startswith("{"):
            prefix, self._held = self._held.removesuffix(stripped), stripped
            self._enter(prefix)
        elif stripped:
            self._state = self._plain
        yield from ()

    def _after(self) -> Iterator[Piece]:
        stripped = self._held.lstrip(" \t\r\n;,")
        if stripped.startswith("{"):
            self._held = stripped
            self._enter("")
        elif stripped:
            self._state = self._plain
        yield from ()

    def end(self) -> Iterator[Piece]:
        if self._state == self._after:
            self._held = ""  # nothing but separators
        yield from super().end()


class ArrayParser(_JsonParser):
    """[{...}, {...}]: what the grammar of required calls lets a model write."""

    def _begin(self) -> Iterator[Piece]:
        stripped = self._held.lstrip(" \t\r\n,[")
        if stripped.startswith("{"):
            self._held = stripped
            self._enter("")
        elif stripped.startswith("]"):
            self._held, self._state = stripped[1:], self._plain
        elif stripped:
            self._state = self._plain
        yield from ()

    def _after(self) -> Iterator[Piece]:
        self._state = self._begin
        yield from ()

    def end(self) -> Iterator[Piece]:
        """Yields nothing: what is held is the beginning of a call that max_tokens has cut off."""
        yield from ()


class MistralParser(ArrayParser):
    """[TOOL_CALLS] and a list of objects, or a name, [ARGS] and an object for each call: Mistral."""

    TAG, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
    _named: JsonScanner | None = None

    def _begin(self) -> Iterator[Piece]:
        yield from self._text_before(self.TAG)
        if self._held.startswith(self.TAG):
            self._held, self._state = self._held.removeprefix(self.TAG), self._tagged

    def _tagged(self) -> Iterator[Piece]:
        stripped = self._held.lstrip()
        if stripped.startswith(("[", "{")):
            self._held, self._state = stripped, self._list
        elif "{" in stripped:
            head, _, rest = stripped.partition("{")
            name = head.partition(self.ID)[0].partition(self.ARGS)[0].strip()
            if not re.fullmatch(r"[\w.-]+", name):
                self._held, self._state = self.TAG + self._held, self._plain
                return
            yield CallBegin(new_call_id(), name)
            self._held, self._named, self._state = "{" + rest, JsonScanner(), self._arguments

    def _list(self) -> Iterator[Piece]:
        yield from super()._begin()

    def _after(self) -> Iterator[Piece]:
        self._state = self._list
        yield from ()

    def _arguments(self) -> Iterator[Piece]:
        assert self._named is not None
        text = self._held
        end = self._named.end_in(text)
        self._held = "" if end is None else text[end:]
        if end is not None:
            self._state = self._begin
        if part := text[:end]:
            yield CallArguments(part)

    def end(self) -> Iterator[Piece]:
        if self._state == self._tagged:
            self._held = self.TAG + self._held
        if self._state not in (self._list, self._read_call):
            yield from _Parser.end(self)


class PythonicParser(_Parser):
    """[f(x=1), g(y="z")], all of the answer: Llama 4 and others that write Python."""

    TAGS = ("<|python_start|>", "<|python_end|>")

    def _begin(self) -> Iterator[Piece]:
        stripped = self._held.lstrip()
        if stripped and not stripped.startswith("[") and not self.TAGS[0].startswith(stripped[: len(self.TAGS[0])]):
            self._state = self._plain
        yield from ()

    def end(self) -> Iterator[Piece]:
        text = self._held.strip().removeprefix(self.TAGS[0]).removesuffix(self.TAGS[1]).strip()
        if self._state == self._begin and (calls := _python_calls(text)):
            self._held = ""
            yield from calls
        yield from super().end()


class ArgumentsParser:
    """Nothing but the arguments of one call, whose name is known."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> Iterator[Piece]:
        if self._name is not None:
            yield CallBegin(new_call_id(), self._name)
            self._name = None
        if text:
            yield CallArguments(text)

    def end(self) -> Iterator[Piece]:
        yield from ()


PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
MARKERS = {"hermes": HermesParser.OPEN, "mistral": MistralParser.TAG}  # without which no call is found


def _python_calls(text: str) -> list[Piece]:
    """Returns the calls in a list of Python calls with keywords; none if it is anything else."""
    pieces: list[Piece] = []
    try:
        tree = ast.parse(text, mode="eval").body
        for call in tree.elts if isinstance(tree, ast.List) else ():
            if not isinstance(call, ast.Call) or call.args or None in [each.arg for each in call.keywords]:
                return []
            arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
            pieces.append(CallBegin(new_call_id(), ast.unparse(call.func)))
            pieces.append(CallArguments(json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return pieces
