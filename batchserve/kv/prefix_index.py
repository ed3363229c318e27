"""Which tokens the kept K/V of ended requests stands for, and whose it is. Torch-free."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

MOST_ENTRIES = 4096  # memory of the host, here for a copy of the tokens of each, and time
FEWEST_TOKENS = 16  # less is computed as quickly as it is found
TOKEN = np.dtype(np.int32)


class PrefixIndex:
    """Entries by handle, the least recently used first. Only the same scope's prompts ever match an entry.

    A scope's texts are sorted, as bytes: what has most of its beginning in common with a prompt is beside the place
    where that would stand.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Hashable, bytes]] = {}
        self._sorted: dict[Hashable, list[tuple[bytes, int]]] = {}  # (text, handle), by scope
        self._next_handle = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def add(self, scope: Hashable, token_ids: Sequence[int]) -> tuple[int, list[int]]:
        """A new entry's handle, and those that have gone for it: prefixes of it, and what is too many."""
        text = np.array(token_ids, TOKEN).tobytes()
        gone = self._prefixes_of(scope, text)
        for handle in gone:
            self.remove(handle)
        while len(self) >= MOST_ENTRIES:
            gone.append(next(iter(self)))
            self.remove(gone[-1])
        self._next_handle += 1
        self._entries[self._next_handle] = scope, text
        insort(self._sorted.setdefault(scope, []), (text, self._next_handle))
        return self._next_handle, gone

    def _prefixes_of(self, scope: Hashable, text: bytes) -> list[int]:
        """Handles of entries that the text begins with, the whole of it included; the longest first."""
        texts, found, end = self._sorted.get(scope, []), [], text
        # All of them stand before it. What stands there and is none shares only so much with it as they can have.
        while place := bisect_right(texts, (end, math.inf)):
            known, handle = texts[place - 1]
            length = _common_length(known, text) * TOKEN.itemsize
            if length == len(known):
                found.append(handle)
                length -= TOKEN.itemsize
            end = text[:length]
        return found

    def match(self, scope: Hashable, token_ids: Sequence[int]) -> tuple[int, int]:
        """(handle, tokens in common) of the entry that begins most like these; (0, 0) where none begins so at all."""
        text, texts = np.array(token_ids, TOKEN).tobytes(), self._sorted.get(scope, [])
        place = bisect_left(texts, (text,))
        best, length = 0, 0
        for known, handle in texts[max(0, place - 1) : place + 1]:
            if (found := _common_length(known, text)) > length:
                best, length = handle, found
        return (best, length) if length >= FEWEST_TOKENS else (0, 0)

    def use(self, handle: int) -> None:
        """The entry was used last, if there is one."""
        if handle:
            self._entries[handle] = self._entries.pop(handle)

    def remove(self, handle: int) -> None:
        scope, text = self._entries.pop(handle)
        texts = self._sorted[scope]
        del texts[bisect_left(texts, (text, handle))]
        if not texts:
            del self._sorted[scope]

    def of_scope(self, scope: Hashable) -> list[int]:
        return [handle for _, handle in self._sorted.get(scope, [])]

    def num_tokens(self, handle: int) -> int:
        return len(self._entries[handle][1]) // TOKEN.itemsize


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens both begin with."""
    shorter = min(len(a), len(b))
    differing: np.ndarray[Any, Any] = a[:shorter] != b[:shorter]
    return int(differing.argmax()) if differing.any() else shorter


def _common_length(a: bytes, b: bytes) -> int:
    return common_length(np.frombuffer(a, TOKEN), np.frombuffer(b, TOKEN))
