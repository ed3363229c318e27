"""LLMA's inner loop: finds the longest match of a text's end in the text itself, and copies what follows it.

A text is a TextIndex that never overwrites anything, so a slot is a position. See text_index for its arrays.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np

from batchserve.draft.text_index import MAX_MATCH, NEWEST, NUM_ORDERS, RUN, SEPARATOR, find_occurrences
from batchserve.native.jit import njit

MAX_OCCURRENCES = 64  # latest occurrences of one context that are considered
READ_ON = 32  # a match this close to the end of the last copy continues that copy


@njit(cache=True, nogil=True)
def _token_at(text, newest, place):  # type: ignore[no-untyped-def]
    return text[place] if place <= newest else SEPARATOR


@njit(cache=True, nogil=True)
def _find_longest(source, min_match, places, lengths):  # type: ignore[no-untyped-def]
    """Finds the longest matches of the open text's end: (number, length), and places after them, latest first."""
    text, prev, head, meta = source
    recent = np.full(MAX_MATCH, SEPARATOR, np.int32)
    for i in range(min(MAX_MATCH, meta[RUN])):
        recent[i] = text[meta[NEWEST] - i]
    for order in range(NUM_ORDERS - 1, -1, -1):
        count = find_occurrences(
            text, prev, head, meta, recent, order, MAX_MATCH + 1, MAX_OCCURRENCES, places, lengths, 0
        )
        longest = 0
        for i in range(count):
            longest = max(longest, lengths[i])
        if longest < min_match:
            continue
        num_longest = 0
        for i in range(count):
            if lengths[i] == longest:
                places[num_longest] = places[i]
                num_longest += 1
        return num_longest, longest
    return 0, 0


@njit(cache=True, nogil=True)
def _choose(text, newest, places, count, read_at, most):  # type: ignore[no-untyped-def]
    """Returns the place to copy from: near the end of the last copy, else where most agree, else the latest."""
    nearest, distance = -1, READ_ON + 1
    for i in range(count):
        if read_at >= 0 and abs(places[i] - read_at) < distance:
            nearest, distance = places[i], abs(places[i] - read_at)
    if nearest >= 0:
        return nearest
    depth = 0
    while count > 1 and depth < most:
        best, best_count = SEPARATOR, 0
        for i in range(count):
            token, same = _token_at(text, newest, places[i] + depth), 0
            if token < 0:
                continue
            for j in range(count):
                same += _token_at(text, newest, places[j] + depth) == token
            if same > best_count:
                best, best_count = token, same
            if 2 * best_count >= count:  # no later token can be more frequent
                break
        if best < 0:  # all continuations end here
            break
        kept = 0
        for i in range(count):
            if _token_at(text, newest, places[i] + depth) == best:
                places[kept] = places[i]
                kept += 1
        count = kept
        depth += 1
    return places[0]


@njit(cache=True, nogil=True)
def find_copy(source, min_match, read_at, most, places, lengths, copied):  # type: ignore[no-untyped-def]
    """Copies at most `most` tokens after the longest match to copied [most]; returns (number, place, length).

    source is (text, prev, head, meta). A copy that reaches the end of the text continues with its own tokens. Nothing
    is copied if fewer than min_match tokens match.
    """
    text, _, _, meta = source
    newest = meta[NEWEST]
    count, length = _find_longest(source, min_match, places, lengths)
    if count == 0:
        return 0, -1, 0
    place = _choose(text, newest, places, count, read_at, most)
    for i in range(most):
        at = place + i
        token = text[at] if at <= newest else copied[at - newest - 1]
        if token < 0:
            return i, place, length
        copied[i] = token
    return most, place, length
