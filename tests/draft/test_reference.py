"""The reference drafter: the right place is copied from, and nothing of anybody else's scope."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from batchserve.draft import reference, reference_kernels
from batchserve.draft.answer_cache import OVERHEAD_BYTES, AnswerCache
from batchserve.draft.base import DraftQuery, DraftRequest
from batchserve.draft.reference import ReferenceDrafter
from batchserve.draft.reference_kernels import MAX_OCCURRENCES, READ_ON
from batchserve.errors import ConfigError
from batchserve.request import DraftScope
from tests.draft.scope_machine import ScopeMachine
from tests.factories import examples

SCOPE, OTHER = DraftScope("tenant", "one"), DraftScope("tenant", "two")
FACT = [71, 72, 73, 74, 75, 76, 77, 78]


def start(drafter: ReferenceDrafter, prompt: list[int], request_id: str = "a", **more: object) -> None:
    drafter.start(DraftRequest(request_id, prompt, **more))  # type: ignore[arg-type]


def copied(drafter: ReferenceDrafter, max_tokens: int = 16, max_depth: int = 16, request_id: str = "a") -> list[int]:
    """The draft, checked to be one branch whose probabilities fall."""
    query = DraftQuery(request_id, max_tokens, max_depth)
    (tree,) = drafter.propose([query])
    tree.check(query)
    assert tree.parents == list(range(-1, len(tree) - 1))
    assert all(tree.is_verified)
    assert all(0 < later < earlier for earlier, later in zip([1.0, *tree.probs], tree.probs, strict=False))
    return tree.token_ids


def answer(drafter: ReferenceDrafter, prompt: list[int], token_ids: list[int], scope: DraftScope | None) -> None:
    """A request from start to end, all of whose answer was published."""
    start(drafter, prompt, "earlier", scope=scope)
    drafter.accept("earlier", token_ids)
    drafter.share("earlier", token_ids)
    drafter.end("earlier")


def expected_copy(
    texts: list[list[int]], min_match: int, copy_length: int, read_at: int
) -> tuple[list[int], int | None]:
    """(tokens, place) by definition: every place is tried, and the texts stand behind each other with a gap."""
    flat = [token for text in texts for token in [*text, None]][:-1]

    def matching(place: int) -> int:
        length = 0
        while length < min(32, len(texts[-1])) and place > length:
            if flat[place - 1 - length] is None or flat[place - 1 - length] != texts[-1][-1 - length]:
                break
            length += 1
        return length

    lengths = {place: matching(place) for place in range(1, len(flat)) if flat[place] is not None}
    longest = max(lengths.values(), default=0)
    if longest < min_match:
        return [], None
    places = sorted(place for place, length in lengths.items() if length == longest)
    near = [place for place in places if read_at >= 0 and abs(place - read_at) <= READ_ON]
    if near:
        place = max(near, key=lambda place: (-abs(place - read_at), place))
    else:
        for depth in range(copy_length):
            behind = {place: flat[place + depth] if place + depth < len(flat) else None for place in places}
            counts = Counter(token for token in behind.values() if token is not None)
            if not counts:
                break
            best = max(places, key=lambda place: (counts[behind[place]], place))
            places = [place for place in places if behind[place] == behind[best]]
        place = places[-1]
    tokens: list[int] = []
    while len(tokens) < copy_length:
        at = place + len(tokens)
        token = flat[at] if at < len(flat) else tokens[at - len(flat)]
        if token is None:
            break
        tokens.append(token)
    return tokens, place


@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(1, 6),
    min_match=st.integers(1, 4),
    copy_length=st.integers(1, 9),
)
@examples(200)
def test_any_draft_is_the_copy_that_the_definition_asks_for(
    seed: int, vocab_size: int, min_match: int, copy_length: int
) -> None:
    """Texts shorter than the number of occurrences that are looked at, so that none is out of sight."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 18) for _ in range(rng.randint(0, 2))]
    texts = [[rng.randrange(vocab_size) for _ in range(size)] for size in [*sizes, rng.randint(1, 12)]]
    drafter = ReferenceDrafter(min_match, copy_length)
    start(drafter, texts[-1], references=texts[:-1])
    texts[-1] = list(texts[-1])
    read_at = -1
    while sum(map(len, texts)) < MAX_OCCURRENCES:
        draft = copied(drafter)
        wanted, place = expected_copy(texts, min_match, copy_length, read_at)
        assert draft == wanted
        used = rng.randint(0, len(draft))
        if used and place is not None:
            read_at = place + used
        bonus = rng.randrange(vocab_size)
        while used < len(draft) and bonus == draft[used]:  # it would have been accepted
            bonus += 1
        drafter.accept("a", [*draft[:used], bonus])
        texts[-1] += [*draft[:used], bonus]


def test_of_two_equal_matches_the_most_recent_is_copied() -> None:
    drafter = ReferenceDrafter(copy_length=3)
    start(drafter, [1, 2, 3, 40, 1, 2, 3, 50, 60, 2, 3])
    assert copied(drafter) == [50, 60, 2]


def test_a_longer_match_counts_for_more_than_a_recent_one() -> None:
    drafter = ReferenceDrafter(copy_length=2)
    start(drafter, [1, 2, 3, 40, 9, 3, 50, 9, 3, 50, 1, 2, 3])
    assert copied(drafter) == [40, 9]


def test_a_continuation_that_most_equal_matches_share_comes_first() -> None:
    drafter = ReferenceDrafter(copy_length=2)
    start(drafter, [7, 1, 2, 8, 1, 2, 9, 1, 3, 5, 1])
    assert copied(drafter)[0] == 2


def test_the_last_place_is_read_on_after_a_token_that_was_not_there() -> None:
    """The document says "a b c d THE e f", the answer "a b X THE": another THE is more recent, but elsewhere."""
    document, elsewhere = [11, 12, 13, 14, 5, 15, 16], [5, 21, *range(100, 100 + READ_ON), 5, 22]
    drafter = ReferenceDrafter(copy_length=2)
    start(drafter, [90, 11], references=[document, elsewhere])
    assert copied(drafter) == [12, 13]
    drafter.accept("a", [12, 30])
    drafter.accept("a", [5])
    assert copied(drafter) == [15, 16]


def test_a_match_must_have_the_least_length_and_a_copy_has_at_most_its_own() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 2, 3]
    for min_match, wanted in ((1, [4, 5, 6, 7]), (2, [4, 5, 6, 7]), (3, [])):
        drafter = ReferenceDrafter(min_match, copy_length=4)
        start(drafter, prompt)
        assert copied(drafter) == wanted
    drafter = ReferenceDrafter(copy_length=4)
    start(drafter, prompt)
    assert copied(drafter, max_tokens=3) == [4, 5, 6]
    assert copied(drafter, max_depth=2) == [4, 5]
    assert copied(drafter, max_tokens=0) == []
    drafter.accept("a", [99])
    assert copied(drafter) == []


def test_no_match_and_no_copy_crosses_the_border_of_a_text() -> None:
    drafter = ReferenceDrafter(min_match=2)
    start(drafter, [3, 4, 50, 60], references=[[1, 2], [8, 3, 4]])
    assert copied(drafter) == []
    drafter.accept("a", [2, 8])  # "2 8" stands in no text, but 2 ends one and 8 begins the next
    assert copied(drafter) == []
    drafter.accept("a", [8, 3])
    assert copied(drafter) == [4]


def test_a_copy_that_reaches_the_end_of_the_answer_repeats_itself() -> None:
    drafter = ReferenceDrafter(copy_length=7)
    start(drafter, [1])
    drafter.accept("a", [5, 6, 7, 5, 6])
    assert copied(drafter) == [7, 5, 6, 7, 5, 6, 7]


def test_scenario_retrieved_documents() -> None:
    """Section 2.3, retrieval-augmented generation: what the answer quotes is in a document, even an unread one."""
    drafter = ReferenceDrafter()
    start(drafter, [1, 2, 3], references=[[9, 9, *FACT, 8], [4, 4]])
    drafter.accept("a", [50, *FACT[:2]])
    assert copied(drafter) == [*FACT[2:], 8]


def test_scenario_cached_answers_to_similar_prompts() -> None:
    """Section 2.3, cache-assisted generation: the answer of before is there as soon as its request has ended."""
    drafter, prompt = ReferenceDrafter(), [1, 2, 3, 4, 5, 6]
    start(drafter, prompt, "earlier", scope=SCOPE)
    drafter.accept("earlier", FACT)
    drafter.share("earlier", FACT)
    start(drafter, [*prompt[:5], 7], "meanwhile", scope=SCOPE)
    drafter.end("earlier")
    start(drafter, [*prompt[:5], 7], "a", scope=SCOPE)
    start(drafter, [30, 31, 32, 33, 34, 1], "unlike", scope=SCOPE)
    for request_id in ("a", "meanwhile", "unlike"):
        drafter.accept(request_id, [50, FACT[0]])
    assert copied(drafter) == FACT[1:]
    assert copied(drafter, request_id="meanwhile") == []
    assert copied(drafter, request_id="unlike") == []


def test_scenario_earlier_turns() -> None:
    """Section 2.3, multi-turn generation: a revised answer repeats most of the one before, which is in the prompt."""
    first = [*FACT, 10, *range(60, 70)]
    drafter = ReferenceDrafter()
    start(drafter, [1, 2, *first, 3, 4])
    drafter.accept("a", FACT[:3])
    assert copied(drafter)[:5] == FACT[3:]
    drafter.accept("a", [*FACT[3:], 11])  # 10 was revised to 11
    assert copied(drafter) == []
    drafter.accept("a", [60])
    assert copied(drafter)[:9] == list(range(61, 70))


def test_only_published_tokens_are_cached_and_only_at_the_end() -> None:
    drafter = ReferenceDrafter()
    start(drafter, [1, 2, 3], "earlier", scope=SCOPE)
    drafter.accept("earlier", FACT)
    drafter.share("earlier", FACT[:4])  # a stop string cut the rest
    assert drafter._cache.nbytes == 0
    drafter.end("earlier")
    drafter.end("earlier")  # harmless
    start(drafter, [1, 2, 3], scope=SCOPE)
    drafter.accept("a", [FACT[0]])
    assert copied(drafter) == FACT[1:4]


def test_of_many_similar_prompts_the_four_most_similar_are_taken() -> None:
    drafter, prompt = ReferenceDrafter(copy_length=1), list(range(1, 9))
    for i in range(6):  # the i-th shares 8 - i tokens
        answer(drafter, [*prompt[i:], *range(200 + 10 * i, 200 + 11 * i)], [300 + i, 400 + i], SCOPE)
    start(drafter, prompt, scope=SCOPE)
    for i in range(6):
        drafter.accept("a", [300 + i])
        assert copied(drafter) == ([400 + i] if i < 4 else [])


def test_the_most_similar_answer_is_the_most_recent_one() -> None:
    drafter = ReferenceDrafter(copy_length=1)
    answer(drafter, [1, 2, 3, 4], [50, 60], SCOPE)
    answer(drafter, [1, 2, 3, 9], [50, 70], SCOPE)
    start(drafter, [1, 2, 3, 4], scope=SCOPE)
    drafter.accept("a", [50])
    assert copied(drafter) == [60]
    answer(drafter, [4, 3, 2, 1], [50, 80], SCOPE)  # the same set of tokens, and later
    drafter.end("a")
    start(drafter, [1, 2, 3, 4], scope=SCOPE)
    drafter.accept("a", [50])
    assert copied(drafter) == [80]


def test_a_repeated_prompt_has_one_answer_the_last() -> None:
    drafter = ReferenceDrafter(copy_length=1)
    for last in (60, 70):
        answer(drafter, [1, 2, 3], [50, last], SCOPE)
    before = drafter.memory_bytes()
    answer(drafter, [1, 2, 3], [50, 80], SCOPE)
    assert drafter.memory_bytes() == before
    start(drafter, [1, 2, 3], scope=SCOPE)
    drafter.accept("a", [50])
    assert copied(drafter) == [80]


@given(seed=st.integers(0, 10**6))
@examples(60)
def test_no_scope_is_ever_drafted_what_another_wrote(seed: int) -> None:
    """All prompts are alike, so that every answer of a scope is a source; each has tokens of its own."""
    rng = random.Random(seed)
    scopes = [None, SCOPE, OTHER, DraftScope("other tenant", "one")]
    drafter = ReferenceDrafter(copy_length=6, max_answers=5, max_total_bytes=8000)
    running: dict[str, tuple[int, set[int]]] = {}
    secrets: dict[int, set[int]] = {i: set() for i in range(len(scopes))}
    for number in range(80):
        if running and rng.random() < 0.6:
            request_id = rng.choice(sorted(running))
            which, own = running[request_id]
            draft = copied(drafter, request_id=request_id)
            assert set(draft) <= secrets[which] | own
            said = [*draft[: rng.randint(0, len(draft))], rng.choice([5, 6, 1000 * (number + 1)])]
            drafter.accept(request_id, said)
            drafter.share(request_id, said)
            own |= set(said)
            if rng.random() < 0.4:
                drafter.end(request_id)
                del running[request_id]
                if scopes[which] is not None:
                    secrets[which] |= own
        elif rng.random() < 0.1 and (which := rng.randint(1, 3)):
            drafter.clear_scope(scopes[which])  # type: ignore[arg-type]
            secrets[which] = set()
        else:
            which, prompt = rng.randrange(len(scopes)), [1, 2, 3, rng.choice([4, 5, 6])]
            start(drafter, prompt, str(number), scope=scopes[which])
            running[str(number)] = which, set(prompt)
    for request_id in running:
        drafter.end(request_id)


def test_a_cleared_scope_is_forgotten_by_requests_in_flight_too() -> None:
    drafter, prompt = ReferenceDrafter(), [1, 2, 3]
    for scope in (SCOPE, OTHER):
        answer(drafter, prompt, FACT, scope)
        start(drafter, prompt, scope.name, scope=scope, references=[[40, 41, 42]])
        drafter.accept(scope.name, [40, 41])
        drafter.share(scope.name, [40, 41])
    drafter.clear_scope(SCOPE)
    for scope, wanted in ((SCOPE, []), (OTHER, FACT[1:])):
        assert copied(drafter, request_id=scope.name)[:1] == [42], "its own texts are still there"
        drafter.accept(scope.name, [FACT[0]])
        assert copied(drafter, request_id=scope.name) == wanted
        drafter.end(scope.name)
    start(drafter, prompt, scope=SCOPE)
    drafter.accept("a", [40])
    assert copied(drafter) == [], "a request from before the clearing has left its answer"


def test_what_a_request_is_given_behind_a_clearing_is_cached() -> None:
    drafter, prompt = ReferenceDrafter(), [1, 2, 3]
    start(drafter, prompt, "old", scope=SCOPE)
    for tokens in ([40, 41, 42], [50, 51, 52]):
        drafter.accept("old", tokens)
        drafter.share("old", tokens)
        if tokens[0] == 40:
            drafter.clear_scope(SCOPE)
    drafter.end("old")
    start(drafter, prompt, scope=SCOPE)
    for token, wanted in ((40, []), (50, [51, 52])):
        drafter.accept("a", [token])
        assert copied(drafter) == wanted


def test_without_a_scope_or_without_similar_prompts_nothing_is_cached() -> None:
    for drafter, scope in ((ReferenceDrafter(), None), (ReferenceDrafter(similar=0), SCOPE)):
        answer(drafter, [1, 2, 3], FACT, scope)
        assert drafter.memory_bytes() == 0
        start(drafter, [1, 2, 3], scope=scope)
        drafter.accept("a", [FACT[0]])
        assert copied(drafter) == []


def test_the_cache_is_bounded_and_the_least_recently_used_go_first() -> None:
    cache = AnswerCache(3, 10**6, 10**6)
    for i in range(5):
        cache.add(SCOPE, [i], [i])
    assert [int(a[0]) for a in cache.find(SCOPE, [2], 9, 0.0)] == [3, 4, 2]
    cache.add(SCOPE, [9], [9])  # found last, so 2 is not the oldest any more
    assert sorted(int(a[0]) for a in cache.find(SCOPE, [2], 9, 0.0)) == [2, 4, 9]


def test_the_cache_is_bounded_in_bytes_for_a_scope_and_for_all() -> None:
    each = OVERHEAD_BYTES + 4 * (1 + 10)
    cache = AnswerCache(100, 4 * each, 10 * each)
    scopes = [DraftScope("tenant", name) for name in "abcd"]

    def sizes() -> list[int]:
        return [len(cache.find(scope, [0], 100, 0.0)) for scope in scopes]

    for scope in scopes:
        for i in range(20):
            cache.add(scope, [i], [i] * 10)
            assert cache.nbytes == sum(cache._scope_bytes.values()) <= 10 * each
    assert sizes() == [0, 2, 4, 4]
    cache.find(scopes[1], [0], 1, 0.0)
    cache.add(scopes[0], [1], [1] * 10)
    assert sizes() == [1, 2, 3, 4], "the third was not used for longest"
    cache.add(SCOPE, [1], [1] * 4 * each)
    assert cache.find(SCOPE, [1], 1, 0.0) == [], "larger than a scope may be"
    for scope in scopes:
        cache.clear(scope)
    assert cache.nbytes == 0


def test_memory_is_counted_and_freed() -> None:
    drafter = ReferenceDrafter()
    start(drafter, list(range(5000)))
    assert 5000 * 4 < drafter.memory_bytes() < 10**6
    drafter.end("a")
    assert drafter.memory_bytes() == 0


def test_a_request_is_started_once_and_options_have_bounds() -> None:
    drafter = ReferenceDrafter()
    start(drafter, [1])
    with pytest.raises(ValueError, match="'a'"):
        start(drafter, [2])
    for options, message in (
        ({"min_match": 0}, "min_match = 0: must be in 1..32"),
        ({"min_match": 33}, "min_match = 33: must be in 1..32"),
        ({"copy_length": 0}, "copy_length = 0: must be at least 1"),
        ({"similar": -1}, "similar = -1: must be at least 0"),
        ({"min_similarity": 1.5}, r"min_similarity = 1.5: must be in 0..1"),
        ({"max_answers": 0}, "max_answers = 0: must be at least 1"),
        ({"max_scope_bytes": 0}, "max_scope_bytes = 0: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            ReferenceDrafter(**options)


def test_kernels_are_compiled_once_for_all_calls() -> None:
    reference.compile_kernels()
    before = len(reference_kernels.find_copy.signatures)
    drafter = ReferenceDrafter(2, 5)
    answer(drafter, [8, 9], FACT, SCOPE)
    start(drafter, [8, 9], scope=SCOPE, references=[(1, 2, 3)])
    drafter.accept("a", [1, 2])
    assert copied(drafter) == [3]
    assert len(reference_kernels.find_copy.signatures) == before


class ReferenceMachine(ScopeMachine):
    """Copies, and cached answers to similar prompts, under a cache that holds anything from one answer to all."""

    @initialize(max_answers=st.sampled_from([1, 3, 256]))
    def begin(self, max_answers: int) -> None:
        self.drafter = ReferenceDrafter(max_answers=max_answers)


TestReferenceScopes = ReferenceMachine.TestCase
TestReferenceScopes.settings = examples(60, stateful_step_count=30)
