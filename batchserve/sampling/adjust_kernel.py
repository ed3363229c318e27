"""Compiled version of row_adjustments.adjust_by_definition."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np
from numba import carray

from batchserve.native.addresses import as_pointer, record_at
from batchserve.native.jit import njit
from batchserve.row_adjustments import ADJUSTMENTS, BITS

FORBIDDEN = np.float32(-np.inf)
MASK_BYTES = 4  # of a word of a mask
COUNTED, SEEN = 0, 1  # places in Room's progress
IN_PROMPT, ONCE = 1, 2  # a count is ONCE for each time in the answer, plus IN_PROMPT


@njit(cache=True, nogil=True)
def make_room(address, vocab_size, num_tokens):  # type: ignore[no-untyped-def]
    """Returns the memory for the walk of a request: (row float32 [vocab_size], counts int32 [vocab_size], seen int64
    [num_tokens], progress int64 [2]). Empty for what it does not need. address: of its ADJUSTMENTS, or 0.

    num_tokens: the most different tokens that the history may have. progress: how many tokens of the history are
    counted, and how many different ones were seen.
    """
    size = counted = 0
    if address != 0:
        record = record_at(address, ADJUSTMENTS)
        size = vocab_size
        if record.repetition != 1.0 or record.frequency != 0.0 or record.presence != 0.0:
            counted = vocab_size
    counts, seen = np.zeros(counted, np.int32), np.empty(num_tokens if counted > 0 else 0, np.int64)
    return np.empty(size, np.float32), counts, seen, np.zeros(2, np.int64)


@njit(cache=True, nogil=True)
def _forbid(row, mask):  # type: ignore[no-untyped-def]
    """Forbids the tokens whose bits are not set."""
    for word in range(mask.shape[0]):
        bits = mask[word]
        if bits == np.uint32(0xFFFFFFFF):
            continue
        first = word * BITS
        for bit in range(min(BITS, row.shape[0] - first)):
            if (bits >> np.uint32(bit)) & np.uint32(1) == 0:
                row[first + bit] = FORBIDDEN


@njit(cache=True, nogil=True)
def _forbid_bad_words(row, record, history):  # type: ignore[no-untyped-def]
    """Forbids the last token of each bad word whose other tokens are the last of the history."""
    words, at = as_pointer(record.bad_words), 0
    for _ in range(record.num_bad_words):
        length = carray(words, at + 1, np.int64)[at]
        word = carray(words, at + 1 + length, np.int64)[at + 1 :]
        first = history.shape[0] - length + 1
        is_begun = first >= 0
        for j in range(length - 1):
            is_begun = is_begun and history[first + j] == word[j]
        if is_begun:
            row[word[length - 1]] = FORBIDDEN
        at += 1 + length


@njit(cache=True, nogil=True)
def _forbid_repeated(row, history, ngram_size):  # type: ignore[no-untyped-def]
    """Forbids the tokens that would complete ngram_size tokens that the history has already."""
    last = history.shape[0] - ngram_size + 1  # where the unfinished sequence begins
    for start in range(last):
        is_same = True
        for j in range(ngram_size - 1):
            is_same = is_same and history[start + j] == history[last + j]
        if is_same:
            row[history[start + ngram_size - 1]] = FORBIDDEN


@njit(cache=True, nogil=True, error_model="numpy")
def _penalize(row, record, history, counts, seen, progress):  # type: ignore[no-untyped-def]
    """Counts the tokens that have been added to the history, and applies the penalties."""
    for i in range(progress[COUNTED], history.shape[0]):
        token = history[i]
        if counts[token] == 0:
            seen[progress[SEEN]] = token
            progress[SEEN] += 1
        if i < record.num_prompt:
            counts[token] |= IN_PROMPT
        else:
            counts[token] += ONCE
    progress[COUNTED] = history.shape[0]
    for i in range(progress[SEEN]):
        token = seen[i]
        value, count = row[token], counts[token] // ONCE
        if record.repetition != 1.0:
            value = value / record.repetition if value > 0 else value * record.repetition
        if count > 0:
            value = np.float32(value - np.float32(record.frequency * np.float32(count)))
            value = np.float32(value - record.presence)
        row[token] = value


@njit(cache=True, nogil=True)
def adjust(logits, address, size, place, room):  # type: ignore[no-untyped-def]
    """Returns the row of logits, adjusted, in `room`: make_room's, the same one for all rows of a walk.

    address: of the request's ADJUSTMENTS. size: the number of tokens before the row; their history only grows. place:
    of the row in the walked tree, 0 for its root.
    """
    row, counts, seen, progress = room
    record = record_at(address, ADJUSTMENTS)
    history = carray(as_pointer(record.history), size, np.int64)
    for i in range(row.shape[0]):  # Numba takes seconds to compile a slice assignment
        row[i] = logits[i]
    if record.masks != 0:
        mask = record.masks + place * record.mask_words * MASK_BYTES
        _forbid(row, carray(as_pointer(mask), -(-row.shape[0] // BITS), np.uint32))
    _forbid_bad_words(row, record, history)
    if record.ngram_size > 0:
        _forbid_repeated(row, history, record.ngram_size)
    if size - record.num_prompt < record.min_tokens:
        for token in carray(as_pointer(record.ends), record.num_ends, np.int64):
            row[token] = FORBIDDEN
    if record.num_biased > 0:
        tokens = carray(as_pointer(record.biased), record.num_biased, np.int64)
        biases = carray(as_pointer(record.biases), record.num_biased, np.float32)
        for i in range(tokens.shape[0]):
            row[tokens[i]] += biases[i]
    if counts.shape[0] > 0:
        _penalize(row, record, history, counts, seen, progress)
    return row
