"""The occurrence index against a plain search, also where the ring has wrapped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.draft.text_index import (
    BUCKETS,
    BYTES_PER_TOKEN,
    MAX_MATCH,
    NEWEST,
    ORDERS,
    RESERVED_FROM,
    SEPARATOR,
    START,
    TextIndex,
    find_occurrences,
)
from tests.factories import examples


def occurrences(index: TextIndex, context: list[int], order: int, longest: int = 1000) -> list[tuple[int, int]]:
    """(age of the follower, match length), latest first, as the kernel finds them."""
    recent = np.full(MAX_MATCH, SEPARATOR, np.int32)
    recent[: len(context)] = context[::-1][:MAX_MATCH]
    slots, lengths = np.zeros(4096, np.int32), np.zeros(4096, np.int32)
    count = find_occurrences(*index.source, recent, order, longest, 4096, slots, lengths, 0)
    ages = (index.meta[NEWEST] - slots[:count]) % len(index.text)
    return list(zip(ages.tolist(), lengths[:count].tolist(), strict=True))


def plain_search(text: list[int], context: list[int], order: int, longest: int = 1000) -> list[tuple[int, int]]:
    found = []
    for end in range(len(text) - 2, -1, -1):
        length = 0
        while length < min(len(context), MAX_MATCH, end + 1) and text[end - length] == context[-1 - length]:
            length += 1
        if ORDERS[order] <= length < longest and text[end + 1] >= 0:
            found.append((len(text) - 2 - end, length))
    return found


@examples(150)
@given(st.data())
def test_it_finds_what_a_plain_search_finds(data: st.DataObject) -> None:
    token = st.integers(0, data.draw(st.sampled_from([1, 3, 9])))
    texts = data.draw(st.lists(st.lists(token, min_size=1, max_size=60), min_size=1, max_size=6))
    capacity = data.draw(st.sampled_from([16, 37, 5000]))
    index, whole = TextIndex(capacity, capacity=data.draw(st.sampled_from([8, 64]))), []
    for text in texts:
        begin = data.draw(st.sampled_from([[], [START]]))
        index.separate()
        whole += [SEPARATOR] if whole and index.meta[2] == 0 and whole[-1] != SEPARATOR else []
        at = data.draw(st.integers(0, len(text)))
        for piece in (begin + text[:at], text[at:]):
            index.append(piece)
            whole += piece
    whole = whole[-capacity:]
    assert index.tokens().tolist() == whole
    context = data.draw(st.sampled_from([whole[-12:], data.draw(st.lists(token, min_size=1, max_size=12))]))
    last_break = max((i for i, t in enumerate(context) if t == SEPARATOR), default=-1)
    context = context[last_break + 1 :]
    for order in range(len(ORDERS)):
        if len(context) < ORDERS[order]:
            continue
        longest = data.draw(st.sampled_from([1000, 2 * ORDERS[order]]))
        found, expected = occurrences(index, context, order, longest), plain_search(whole, context, order, longest)
        if index.max_tokens == 5000:
            assert found == expected
        else:  # a chain may end early where it was overwritten, but it never lies
            assert set(found) <= set(expected)
            assert found == sorted(found)


def test_a_full_ring_still_finds_everything_recent() -> None:
    """Chains are followed to the oldest kept token when the text repeats without an end."""
    index = TextIndex(64, capacity=64)
    for _ in range(50):
        index.append(range(8))
    assert len(index) == 64
    assert len(occurrences(index, [3], 0)) == 8
    assert index.nbytes == 64 * BYTES_PER_TOKEN


def test_context_only_tokens_are_not_found_but_extend_matches() -> None:
    index = TextIndex(1000)
    index.append([1, 2, 3, 9, 9])
    index.separate()
    index.append([1, 2, 3, 4], first_indexed=2)
    assert occurrences(index, [1, 2], 0) == [(7, 2)]  # only the first text's
    assert occurrences(index, [1, 2, 3], 0) == [(0, 3), (6, 3)]


def test_nothing_goes_on_into_an_answer_and_contexts_reach_back_over_its_beginning() -> None:
    index = TextIndex(1 << 30, capacity=8)
    index.append([5, 1, 2, 3])
    index.mark_answer_start()
    index.append([4, 6, 3, 4, 7])
    assert occurrences(index, [2, 3], 0) == [(1, 1)]  # behind the answer's own 3, not behind the prompt's
    assert occurrences(index, [3, 4], 0) == [(0, 2), (3, 2)]
    index.append([9] * 2000)  # grows
    assert occurrences(index, [2, 3], 0) == [(2001, 1)]


@pytest.mark.parametrize("max_tokens", [1, 7, 1024, 100_000])
def test_memory_stays_within_its_bound(max_tokens: int) -> None:
    index = TextIndex(max_tokens)
    for _ in range(30):
        index.append(np.arange(997, dtype=np.int32))
        assert index.nbytes <= BYTES_PER_TOKEN * max_tokens
    assert len(index) == min(max_tokens, 30 * 997)


def test_no_append_waits_for_a_text_to_be_indexed_again() -> None:
    """Where a large text grows, nothing is copied; and only a few chains are taken apart at a time, all in the end."""
    rng = np.random.default_rng(4)
    text, index, growths = rng.integers(0, 300, 4 * RESERVED_FROM).astype(np.int32), TextIndex(1 << 20), 0
    index.append(text[:RESERVED_FROM])
    for at in range(RESERVED_FROM, len(text), 32):
        capacity, buckets, memory = len(index.text), index.meta[BUCKETS], index.source[1]
        index.append(text[at : at + 32])
        assert index.meta[BUCKETS] - buckets <= 64
        assert np.shares_memory(index.source[1], memory)
        growths += len(index.text) > capacity
    assert growths == 2
    assert index.meta[BUCKETS] == len(index.source[2])
    whole, context = text.tolist(), text[1000:1008].tolist()
    assert occurrences(index, context, 3) == plain_search(whole, context, 3)
    assert occurrences(index, context, 0)[:50] == plain_search(whole[-30_000:], context, 0)[:50]
