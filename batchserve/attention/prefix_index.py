"""Which tokens the kept K/V of ended requests stands for, and whose it is. Torch-free."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_ENTRIES = 256  # each is compared with when a prompt comes: some microseconds
FEWEST_TOKENS = 16  # less is computed as quickly as it is found


@dataclass(frozen=True, slots=True)
class _Entry:
    scope: Hashable
    token_ids: np.ndarray[Any, np.dtype[np.int32]]


class PrefixIndex:
    """Entries by handle, the least recently used first. Only the same scope's prompts ever match an entry."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._next_handle = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def add(self, scope: Hashable, token_ids: Sequence[int]) -> tuple[int, list[int]]:
        """A new entry's handle, and those that have to go for it: prefixes of it, and what is too many."""
        tokens = np.array(token_ids, np.int32)
        gone = [
            handle
            for handle, entry in self._entries.items()
            if entry.scope == scope and common_length(entry.token_ids, tokens) == len(entry.token_ids)
        ]
        others = (handle for handle in self._entries if handle not in gone)
        gone += [handle for handle, _ in zip(others, range(len(self) - len(gone) + 1 - MOST_ENTRIES), strict=False)]
        for handle in gone:
            del self._entries[handle]
        self._next_handle += 1
        self._entries[self._next_handle] = _Entry(scope, tokens)
        return self._next_handle, gone

    def match(self, scope: Hashable, token_ids: Sequence[int]) -> tuple[int, int]:
        """(handle, tokens in common) of the entry that begins most like these; (0, 0) where none begins so at all."""
        tokens = np.array(token_ids, np.int32)
        best, length = 0, 0
        for handle, entry in self._entries.items():
            if entry.scope == scope and (found := common_length(entry.token_ids, tokens)) > length:
                best, length = handle, found
        return (best, length) if length >= FEWEST_TOKENS else (0, 0)

    def use(self, handle: int) -> None:
        """The entry was used last, if there is one."""
        if handle:
            self._entries[handle] = self._entries.pop(handle)

    def remove(self, handle: int) -> None:
        del self._entries[handle]

    def of_scope(self, scope: Hashable) -> list[int]:
        return [handle for handle, entry in self._entries.items() if entry.scope == scope]

    def num_tokens(self, handle: int) -> int:
        return len(self._entries[handle].token_ids)


def common_length(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(a), len(b))
    differing = a[:shorter] != b[:shorter]
    return int(differing.argmax()) if differing.any() else shorter
