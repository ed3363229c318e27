"""Index of the tokens whose K/V is kept after requests have ended, by scope. Torch-free."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

MAX_ENTRIES = 4096  # bounds host memory (a copy of each entry's tokens) and time
MIN_TOKENS = 16  # a shorter prefix is computed as quickly as it is found
TOKEN = np.dtype(np.int32)


class PrefixIndex:
    """Entries by handle, least recently used first. An entry is only matched by prompts of its own scope.

    The texts of a scope are sorted as bytes: the one that shares the longest prefix with a prompt is next to the place
    where the prompt would be.
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
        """Adds an entry. Returns its handle, and those it has replaced: its prefixes, and any above MAX_ENTRIES."""
        text = np.array(token_ids, TOKEN).tobytes()
        gone = self._prefixes_of(scope, text)
        for handle in gone:
            self.remove(handle)
        while len(self) >= MAX_ENTRIES:
            gone.append(next(iter(self)))
            self.remove(gone[-1])
        self._next_handle += 1
        self._entries[self._next_handle] = scope, text
        insort(self._sorted.setdefault(scope, []), (text, self._next_handle))
        return self._next_handle, gone

    def _prefixes_of(self, scope: Hashable, text: bytes) -> list[int]:
        """Returns the handles of the entries that are prefixes of the text, or equal to it; the longest first."""
        texts, found, end = self._sorted.get(scope, []), [], text
        # Prefixes sort before the text. If the entry right before it is none, no prefix is longer than what they share.
        while place := bisect_right(texts, (end, math.inf)):
            known, handle = texts[place - 1]
            length = _common_length(known, text) * TOKEN.itemsize
            if length == len(known):
                found.append(handle)
                length -= TOKEN.itemsize
            end = text[:length]
        return found

    def match(self, scope: Hashable, token_ids: Sequence[int]) -> tuple[int, int]:
        """Returns (handle, length) of the entry with the longest common prefix; (0, 0) below MIN_TOKENS."""
        text, texts = np.array(token_ids, TOKEN).tobytes(), self._sorted.get(scope, [])
        place = bisect_left(texts, (text,))
        best, length = 0, 0
        for known, handle in texts[max(0, place - 1) : place + 1]:
            if (found := _common_length(known, text)) > length:
                best, length = handle, found
        return (best, length) if length >= MIN_TOKENS else (0, 0)

    def use(self, handle: int) -> None:
        """Marks the entry as the most recently used. Handle 0 is ignored."""
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
    """Returns the length of the common prefix."""
    shorter = min(len(a), len(b))
    differing: np.ndarray[Any, Any] = a[:shorter] != b[:shorter]
    return int(differing.argmax()) if differing.any() else shorter


def _common_length(a: bytes, b: bytes) -> int:
    return common_length(np.frombuffer(a, TOKEN), np.frombuffer(b, TOKEN))
