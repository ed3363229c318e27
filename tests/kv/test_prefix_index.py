"""The index of kept prefixes against one that compares with everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.kv import prefix_index
from batchserve.kv.prefix_index import MIN_TOKENS, PrefixIndex
from tests.factories import common_length, examples

TAIL = [255, 256, 1, 65536, 2**31 - 1]  # as bytes some begin alike
texts = st.tuples(st.integers(MIN_TOKENS - 2, MIN_TOKENS + 2), st.lists(st.sampled_from(TAIL), max_size=5)).map(
    lambda drawn: [7] * drawn[0] + drawn[1]
)


@examples(300)
@given(st.lists(st.tuples(st.sampled_from("aab"), texts, st.sampled_from(["add", "match", "remove"])), max_size=40))
def test_it_finds_what_comparing_with_everything_finds(what: list[tuple[str, list[int], str]]) -> None:
    index, known = PrefixIndex(), dict[int, tuple[str, list[int]]]()  # the least recently used first
    for scope, text, action in what:
        if action == "add":
            prefixes = {handle for handle, (owner, own) in known.items() if owner == scope and text[: len(own)] == own}
            handle, gone = index.add(scope, text)
            assert set(gone) == prefixes
            assert handle not in known
            known = {each: own for each, own in known.items() if each not in prefixes} | {handle: (scope, text)}
        elif action == "match":
            lengths = {handle: common_length(own, text) for handle, (owner, own) in known.items() if owner == scope}
            longest = max(lengths.values(), default=0)
            handle, length = index.match(scope, text)
            assert length == (longest if longest >= MIN_TOKENS else 0)
            assert lengths.get(handle, 0) == length
            index.use(handle)
            if handle:
                known[handle] = known.pop(handle)
        elif known:
            handle = min(known)
            index.remove(handle)
            del known[handle]
        assert list(index) == list(known)
        for handle, (_, own) in known.items():
            assert index.num_tokens(handle) == len(own)
        for name in "ab":
            assert sorted(index.of_scope(name)) == sorted(each for each, (owner, _) in known.items() if owner == name)


def test_of_too_many_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_ENTRIES", 3)
    index = PrefixIndex()
    first, second, third = (index.add("s", [number] * 20)[0] for number in range(3))
    index.use(first)
    fourth, gone = index.add("t", [9] * 20)
    assert gone == [second]
    assert list(index) == [third, first, fourth]
    assert index.match("s", [1] * 20) == (0, 0)
    assert index.match("s", [0] * 30) == (first, 20)
    assert index.match("t", []) == (0, 0)
