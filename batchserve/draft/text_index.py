"""An index of the occurrences of token contexts: a bounded ring of text with hash chains, which evicts the oldest.

Every text position is linked to the previous one that has the same last 1, 2, 4 and 8 tokens. So walking a chain finds
the latest occurrences of a context, appending a token costs a few writes, eviction is overwriting, and a token takes a
fixed number of bytes whatever the text is. A trie of the same text takes several times as much and has to be pruned.
"""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import carray

from batchserve.native import pages
from batchserve.native.addresses import as_pointer
from batchserve.native.jit import njit

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDERS = (1, 2, 4, 8)  # context lengths that have a chain of their own
NUM_ORDERS = len(ORDERS)
MAX_MATCH = 32  # most tokens of a context that are compared
SEPARATOR = -1  # comes between texts: no context crosses it
START = -2  # begins a text: a context may reach back to it, but not beyond
BYTES_PER_TOKEN = 4 + NUM_ORDERS * (4 + 4)
MIN_CAPACITY = 1024
# Fields of `meta`: newest slot, filled slots, tokens since the last separator, buckets of each order in use, and the
# slot at which an answer begins (-1: none).
NEWEST, FILLED, RUN, BUCKETS, ANSWER = range(5)
RESERVED, RESERVED_FROM = 32, 1 << 16  # from RESERVED_FROM tokens on, RESERVED times the address space is reserved
SPLITS = 2  # buckets split for every token that is appended: all are split before the table grows again

_ORDERS = np.array(ORDERS, dtype=np.int64)


@njit(cache=True, nogil=True, inline="always")
def source_at(address):  # type: ignore[no-untyped-def]
    """Returns (text, prev, head, meta) of the index whose `address` array is at this address."""
    at = carray(as_pointer(address), 5, np.int64)
    cells = carray(as_pointer(at[0]), (at[1], 1 + NUM_ORDERS), np.int32)
    head = carray(as_pointer(at[2]), (at[3], NUM_ORDERS), np.int32)
    return cells[:, 0], cells[:, 1:], head, carray(as_pointer(at[4]), ANSWER + 1, np.int64)


@njit(cache=True, nogil=True, inline="always")
def hash_step(key, token):  # type: ignore[no-untyped-def]
    """Mixes one more token (going backwards) into a context's hash."""
    key = (key ^ np.uint64(token)) * np.uint64(0x9E3779B97F4A7C15)
    return key ^ (key >> np.uint64(29))


@njit(cache=True, nogil=True, inline="always")
def bucket_of(key, head, meta):  # type: ignore[no-untyped-def]
    """Returns a hash's bucket by linear hashing: an unused bucket is still part of the bucket half a table earlier."""
    bucket = np.int64((key >> np.uint64(7)) & np.uint64(head.shape[0] - 1))
    return bucket if bucket < meta[BUCKETS] else bucket - head.shape[0] // 2


@njit(cache=True, nogil=True)
def split_buckets(text, prev, head, meta, count):  # type: ignore[no-untyped-def]
    """Puts `count` more buckets of each order into use. Their entries move from the chains half a table earlier."""
    capacity, half = text.shape[0], head.shape[0] // 2
    for bucket in range(meta[BUCKETS], min(meta[BUCKETS] + count, head.shape[0])):
        meta[BUCKETS] = bucket + 1
        for o in range(NUM_ORDERS):
            end, last_age = head[bucket - half, o] - 1, -1
            head[bucket - half, o] = 0
            last_kept, last_moved = -1, -1
            while end >= 0:
                age = meta[NEWEST] - end
                if age < 0:
                    age += capacity
                if age <= last_age or age >= meta[FILLED]:
                    break
                last_age, after = age, prev[end, o] - 1
                key, slot = np.uint64(0), end
                for _ in range(_ORDERS[o]):
                    key = hash_step(key, text[slot])
                    slot = slot - 1 if slot > 0 else capacity - 1
                prev[end, o] = 0
                if bucket_of(key, head, meta) == bucket:
                    if last_moved < 0:
                        head[bucket, o] = end + 1
                    else:
                        prev[last_moved, o] = end + 1
                    last_moved = end
                else:
                    if last_kept < 0:
                        head[bucket - half, o] = end + 1
                    else:
                        prev[last_kept, o] = end + 1
                    last_kept = end
                end = after


@njit(cache=True, nogil=True)
def append_tokens(text, prev, head, meta, token_ids, first_indexed):  # type: ignore[no-untyped-def]
    """Appends tokens after the newest one. Tokens before `first_indexed` are only context and get no links."""
    if meta[BUCKETS] < head.shape[0]:
        split_buckets(text, prev, head, meta, SPLITS * token_ids.shape[0])
    capacity = text.shape[0]
    newest, filled, run = meta[NEWEST], meta[FILLED], meta[RUN]
    for i in range(token_ids.shape[0]):
        newest += 1
        if newest == capacity:
            newest = 0
        text[newest] = token_ids[i]
        filled = min(filled + 1, capacity)
        run = run + 1 if token_ids[i] >= 0 else (1 if token_ids[i] == START else 0)
        longest = min(run, filled) if i >= first_indexed else 0
        key, slot, length = np.uint64(0), newest, 0
        for o in range(NUM_ORDERS):
            if _ORDERS[o] > longest:
                prev[newest, o] = 0
                continue
            while length < _ORDERS[o]:
                key = hash_step(key, text[slot])
                slot = slot - 1 if slot > 0 else capacity - 1
                length += 1
            bucket = bucket_of(key, head, meta)
            prev[newest, o] = head[bucket, o]
            head[bucket, o] = newest + 1
    meta[NEWEST], meta[FILLED], meta[RUN] = newest, filled, run


@njit(cache=True, nogil=True)
def match_length(text, meta, end, recent):  # type: ignore[no-untyped-def]
    """Returns how many tokens up to slot `end` equal recent[0], recent[1], ... (newest first; SEPARATOR ends it)."""
    capacity = text.shape[0]
    age = meta[NEWEST] - end
    if age < 0:
        age += capacity
    most = min(recent.shape[0], meta[FILLED] - age)
    slot, length = end, 0
    while length < most and text[slot] == recent[length] and recent[length] != SEPARATOR:
        length += 1
        slot = slot - 1 if slot > 0 else capacity - 1
    return length


@njit(cache=True, nogil=True)
def find_occurrences(  # type: ignore[no-untyped-def]
    text, prev, head, meta, recent, order, longest, max_visits, slots, lengths, count
):
    """Adds occurrences of the last ORDERS[order] tokens, latest first, to slots and lengths [size] from `count` on.

    The slot of an occurrence is that of the token after it. Occurrences that match `longest` tokens or more are left
    out. Returns the new count.
    """
    capacity = text.shape[0]
    if recent[_ORDERS[order] - 1] == SEPARATOR or meta[FILLED] == 0:
        return count
    key = np.uint64(0)
    for i in range(_ORDERS[order]):
        key = hash_step(key, recent[i])
    end = head[bucket_of(key, head, meta), order] - 1
    last_age = -1
    for _ in range(max_visits):
        if end < 0 or count == slots.shape[0]:
            break
        age = meta[NEWEST] - end
        if age < 0:
            age += capacity
        if age <= last_age or age >= meta[FILLED]:  # overwritten: from here on, the chain does not lead to older tokens
            break
        last_age = age
        behind = end + 1 if end + 1 < capacity else 0
        if age > 0 and text[behind] >= 0 and behind != meta[ANSWER]:
            length = match_length(text, meta, end, recent)
            if _ORDERS[order] <= length < longest:
                slots[count], lengths[count] = behind, length
                count += 1
        end = prev[end, order] - 1
    return count


@njit(cache=True, nogil=True)
def append_to(address, token_ids, first_indexed):  # type: ignore[no-untyped-def]
    """Runs append_tokens on the index that `address` describes."""
    text, prev, head, meta = source_at(address.ctypes.data)
    append_tokens(text, prev, head, meta, token_ids, first_indexed)


@njit(cache=True, nogil=True)
def note_addresses(address, cells, heads, meta, capacity, num_buckets):  # type: ignore[no-untyped-def]
    """Writes the addresses and sizes of an index's arrays to `address`, for source_at."""
    address[0], address[1], address[2] = cells.ctypes.data, capacity, heads.ctypes.data
    address[3], address[4] = num_buckets, meta.ctypes.data


class TextIndex:
    """Stores texts one after another with their occurrence chains. At `max_tokens` the oldest text is overwritten.

    It starts small and doubles, so memory follows use: at most BYTES_PER_TOKEN * max_tokens bytes (the number of chain
    heads is a power of two of at most max_tokens). No step waits for growth: chains are split a few at a time as tokens
    are appended, and a large text reserves address space to grow into, which takes no memory before it is used.
    """

    def __init__(self, max_tokens: int, capacity: int = MIN_CAPACITY) -> None:
        self.max_tokens = max_tokens
        self.address = np.zeros(5, np.int64)  # where the arrays are, for source_at; always up to date
        self._allocate(min(capacity, max_tokens))

    def _allocate(self, capacity: int) -> None:
        reserved = capacity if capacity < RESERVED_FROM else min(RESERVED * capacity, self.max_tokens)
        # A token is stored next to its links: following a chain reads both, and so waits for memory only once.
        self._cells = pages.zeros((reserved, 1 + NUM_ORDERS), np.int32)
        self._heads = pages.zeros((_num_buckets(reserved), NUM_ORDERS), np.int32)
        self.meta = np.array([-1, 0, 0, _num_buckets(capacity), -1], dtype=np.int64)
        self._use(capacity)

    def _use(self, capacity: int) -> None:
        self.capacity = capacity
        self._views: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None
        note_addresses(self.address, self._cells, self._heads, self.meta, capacity, _num_buckets(capacity))

    def __len__(self) -> int:
        return int(self.meta[FILLED])

    @property
    def nbytes(self) -> int:
        return 4 * ((1 + NUM_ORDERS) * self.capacity + NUM_ORDERS * _num_buckets(self.capacity))

    @property
    def source(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(text, prev, head, meta), as kernels take it; stale after the next `append` or `reserve`."""
        if self._views is None:
            cells, head = self._cells[: self.capacity], self._heads[: _num_buckets(self.capacity)]
            self._views = cells[:, 0], cells[:, 1:], head, self.meta
        return self._views

    @property
    def text(self) -> np.ndarray:
        return self.source[0]

    @property
    def run(self) -> int:
        """The number of tokens in the open text, which begins after the last separator."""
        return int(self.meta[RUN])

    def append(self, token_ids: Sequence[int] | np.ndarray, first_indexed: int = 0) -> None:
        """Continues the open text. Tokens before `first_indexed` are only context for the ones after them."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        self.reserve(len(tokens))
        append_to(self.address, tokens, first_indexed)

    def separate(self) -> None:
        """Ends the open text."""
        if self.run:
            self.append((SEPARATOR,))

    def mark_answer_start(self) -> None:
        """Marks the next token as the start of the answer to the open text. A context may span both, but no occurrence
        continues from one into the other: after a copy of the whole prompt, the answer's beginning is not drafted. Only
        for a text that is never overwritten.
        """
        self.meta[ANSWER] = self.meta[NEWEST] + 1

    def tokens(self) -> np.ndarray:
        """Returns all tokens that are kept, oldest first, int32."""
        slots = np.arange(self.meta[NEWEST] - len(self) + 1, self.meta[NEWEST] + 1)
        kept: np.ndarray = self.text[slots % self.capacity]
        return kept

    def capacity_for(self, count: int) -> int:
        """Returns the capacity, in tokens, after growing for `count` more."""
        wanted, capacity = len(self) + count, self.capacity
        while capacity < min(wanted, self.max_tokens):
            capacity = min(2 * capacity, self.max_tokens)
        return capacity

    def reserve(self, count: int) -> None:
        """Makes room for `count` more tokens."""
        capacity, before = self.capacity_for(count), self.capacity
        if capacity <= before:
            return
        is_straight = self.meta[NEWEST] + 1 == len(self)
        if capacity > 2 * before or not is_straight:  # more than doubles, or slots change, which is rare
            kept, answer = self.tokens(), self.meta[ANSWER]
            self._allocate(capacity)
            self.meta[ANSWER] = answer
            append_to(self.address, kept, 0)
            return
        split_buckets(*self.source, _num_buckets(before))
        if capacity <= len(self._cells):
            self._use(capacity)
            return
        cells, heads, meta = self._cells[:before], self._heads[: _num_buckets(before)], self.meta
        self._allocate(capacity)
        self._cells[:before], self._heads[: len(heads)], self.meta[:] = cells, heads, meta


def _num_buckets(capacity: int) -> int:
    """Returns the number of chain heads per order: the largest power of two that is at most capacity."""
    return 1 << (capacity.bit_length() - 1)
