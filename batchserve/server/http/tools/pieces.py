"""What an answer's text is made of: plain text, and calls of tools."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Text:
    """A part of the answer that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool begins."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the arguments of the call that has begun last, as JSON."""

    text: str


Piece = Text | CallBegin | CallArguments


class ToolParser(Protocol):
    """Finds the calls of tools in one answer, whose text it gets bit by bit."""

    def feed(self, text: str) -> Iterator[Piece]:
        """Yields what this text completes. What may still become part of a call is held back."""

    def end(self) -> Iterator[Piece]:
        """Yields what was held back, as plain text: the answer has ended."""


def new_call_id() -> str:
    """Returns a random id, in the form that all chat templates take: Mistral's want nine letters or digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))
