"""The trie drafter: valid trees from real repetition, nothing of anybody else's, nothing left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from batchserve.draft.base import DraftQuery, DraftRequest, DraftTree
from batchserve.draft.trie import MIN_ROWS, ROW_BYTES, SCOPE_BYTES, TrieDrafter
from batchserve.errors import ConfigError
from batchserve.request import DraftScope
from tests.draft.scope_machine import OTHER_SCOPES, SCOPE, ScopeMachine, check_tree, first_chain, say
from tests.draft.test_trie_kernels import check_trie
from tests.factories import examples

PATTERN = [11, 12, 13, 14, 15, 16, 17, 18]


def propose(drafter: TrieDrafter, request_id: str, max_tokens: int = 8, max_depth: int = 8) -> DraftTree:
    query = DraftQuery(request_id, max_tokens, max_depth)
    (tree,) = drafter.propose([query])
    check_tree(tree, query)
    return tree


def roots(tree: DraftTree) -> list[int]:
    return [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent < 0]


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def begin(drafter: TrieDrafter, request_id: str, prompt: list[int], scope: DraftScope | None = SCOPE) -> None:
    drafter.start(DraftRequest(request_id, prompt, scope=scope))


def teach(drafter: TrieDrafter, answers: list[list[int]], scope: DraftScope = SCOPE) -> None:
    """Answers of requests that have come and gone."""
    for i, answer in enumerate(answers):
        begin(drafter, f"taught {i}", [99_999], scope)
        say(drafter, f"taught {i}", answer)
        drafter.end(f"taught {i}")


class TrieMachine(ScopeMachine):
    """With any bounds and modes: what the shared tries hold is accounted for after every step."""

    @initialize(
        capacity=st.sampled_from([1, 40, None]),
        max_scope_rows=st.sampled_from([1, 60, 100_000]),
        max_total_rows=st.sampled_from([1, 100, 1000, 100_000]),
        length=st.integers(1, 6),
        mode=st.sampled_from(["hierarchical", "parallel", "single"]),
        min_retrieved_tokens=st.sampled_from([1, None]),
    )
    def begin(self, max_scope_rows: int, max_total_rows: int, length: int, **options: Any) -> None:
        self.max_total_bytes = max_total_rows * ROW_BYTES + 2 * SCOPE_BYTES
        self.capacity, self.max_scope_rows = options["capacity"] or 16 * 64, max_scope_rows
        self.drafter = TrieDrafter(
            branch_length=length,
            max_scope_bytes=max_scope_rows * ROW_BYTES,
            max_total_bytes=self.max_total_bytes,
            **options,
        )

    @invariant()
    def memory_is_bounded_and_accounted_for(self) -> None:
        if not hasattr(self, "drafter"):
            return
        tries = self.drafter._scopes
        for scope, trie in tries.items():
            check_trie(trie, self.capacity, self.max_scope_rows)
            assert trie.num_requests == sum(other == scope for other in self.scopes.values())
        total = sum(trie.memory_bytes() for trie in tries.values())
        texts = sum(state.text.nbytes for state in self.drafter._requests.values())
        assert self.drafter.memory_bytes() == total + texts
        # An empty scope that a request is using is there, whatever the bound.
        in_use = sum(trie.num_requests > 0 for trie in tries.values())
        assert total <= self.max_total_bytes + in_use * (SCOPE_BYTES + ROW_BYTES)


TestTrie = TrieMachine.TestCase
TestTrie.settings = examples(80, stateful_step_count=30)


@pytest.mark.slow
class TestTrieAtLength(TrieMachine.TestCase):
    settings = examples(300, stateful_step_count=80)


def test_repeated_text_of_the_prompt_is_found() -> None:
    drafter = TrieDrafter()
    begin(drafter, "a", [*PATTERN, 90, 91, 92, *PATTERN[:3]])
    assert first_chain(propose(drafter, "a", 5)) == PATTERN[3:8]


def test_references_are_drafted_and_do_not_run_into_each_other() -> None:
    drafter = TrieDrafter()
    drafter.start(DraftRequest("a", [5, *PATTERN[:2]], [PATTERN, [50, 51]], SCOPE))
    assert first_chain(propose(drafter, "a")) == PATTERN[2:]
    drafter.accept("a", PATTERN[2:])
    assert len(propose(drafter, "a")) == 0  # behind the reference comes another one, and that is chance
    drafter.accept("a", [50])
    assert first_chain(propose(drafter, "a")) == [51]  # and behind the last comes the prompt


def test_an_answer_is_drafted_from_its_own_text_at_once() -> None:
    """Not only when it is complete, and before anything is published."""
    drafter = TrieDrafter()
    begin(drafter, "a", [1], scope=None)
    drafter.accept("a", PATTERN)
    drafter.accept("a", [50])
    assert len(propose(drafter, "a")) == 0
    drafter.accept("a", PATTERN[:2])
    assert first_chain(propose(drafter, "a"))[:6] == PATTERN[2:]


def test_a_loop_is_drafted_as_soon_as_it_repeats() -> None:
    """Down to the very last token: nothing has to be twelve tokens old first."""
    drafter = TrieDrafter()
    begin(drafter, "a", [1])
    drafter.accept("a", [7, 8, 7])
    assert first_chain(propose(drafter, "a"))[:2] == [8, 7]


def test_a_long_text_is_draftable_from_its_beginning_to_its_end() -> None:
    rng, drafter = random.Random(4), TrieDrafter()
    text = [rng.randrange(50_000) for _ in range(20_000)]
    begin(drafter, "a", text[:10_000])
    for at in range(10_000, 20_000, 500):
        drafter.accept("a", text[at : at + 500])
    for at in (0, 5_000, 9_995, 15_000, 19_900):
        drafter.accept("a", text[at : at + 4])
        assert first_chain(propose(drafter, "a", 64))[:8] == text[at + 4 : at + 12]


def test_outputs_reach_other_requests_once_they_are_shared() -> None:
    drafter = TrieDrafter()
    begin(drafter, "a", [1])
    begin(drafter, "b", PATTERN[:2])
    drafter.accept("a", PATTERN)
    assert len(propose(drafter, "b")) == 0  # not published: the client may never see these tokens
    drafter.share("a", PATTERN)
    assert first_chain(propose(drafter, "b"))[:6] == PATTERN[2:]
    drafter.end("a")
    assert first_chain(propose(drafter, "b"))[:6] == PATTERN[2:]  # shared text outlives its request


@pytest.mark.parametrize("scope", [None, *OTHER_SCOPES])
def test_outputs_stay_inside_their_scope(scope: DraftScope | None) -> None:
    drafter = TrieDrafter()
    begin(drafter, "b", PATTERN[:2], scope)
    teach(drafter, [PATTERN] * 3)
    assert len(propose(drafter, "b")) == 0
    say(drafter, "b", PATTERN[2:])
    begin(drafter, "c", [1], SCOPE)
    drafter.accept("c", [PATTERN[-1]])
    assert len(propose(drafter, "c")) == 0


def test_without_a_scope_nothing_leaves_the_request() -> None:
    drafter = TrieDrafter()
    begin(drafter, "a", [1], scope=None)
    say(drafter, "a", PATTERN)
    for scope in (None, SCOPE, DraftScope("", "")):
        begin(drafter, f"b {scope}", PATTERN[:2], scope)
        assert len(propose(drafter, f"b {scope}")) == 0


def test_a_prompt_is_never_drafted_to_others_even_where_texts_meet() -> None:
    """B says exactly what stands before the secret in A's prompt, and what A answers around it."""
    drafter, secret = TrieDrafter(), [777, 778, 779]
    drafter.start(DraftRequest("a", [*PATTERN, *secret], [[*PATTERN[-2:], *secret]], SCOPE))
    begin(drafter, "b", [5, *PATTERN])
    assert first_chain(propose(drafter, "a")) == []
    say(drafter, "a", PATTERN)
    assert first_chain(propose(drafter, "a"))[:3] == secret  # A itself is helped by it
    for _ in range(3):
        say(drafter, "b", PATTERN)
        assert set(propose(drafter, "b", 64, 12).token_ids).isdisjoint(secret)


def test_without_sharing_a_request_drafts_as_if_it_were_alone() -> None:
    rng = random.Random(3)
    together, alone = TrieDrafter(), TrieDrafter()
    for drafter in (together, alone):
        begin(drafter, "b", PATTERN, OTHER_SCOPES[0])
    begin(together, "a", PATTERN)
    for _ in range(60):
        tokens = [rng.choice(PATTERN) for _ in range(rng.randint(1, 5))]
        say(together, "a", [rng.choice(PATTERN) for _ in range(5)])
        for drafter in (together, alone):
            say(drafter, "b", tokens)
        assert propose(together, "b") == propose(alone, "b")


def test_a_cleared_scope_is_forgotten_and_goes_on_with_what_comes() -> None:
    drafter = TrieDrafter()
    teach(drafter, [PATTERN] * 2)
    begin(drafter, "a", [1])
    say(drafter, "a", [31, 32, 33])
    drafter.clear_scope(SCOPE)
    drafter.clear_scope(OTHER_SCOPES[0])  # unknown: harmless
    begin(drafter, "b", PATTERN[:2])
    assert len(propose(drafter, "b")) == 0
    say(drafter, "a", [34, 35])
    drafter.accept("a", [31])
    assert first_chain(propose(drafter, "a"))[:2] == [32, 33]  # its own text it still has
    drafter.accept("b", [33])
    assert len(propose(drafter, "b")) == 0  # nothing reaches back behind the clearing
    drafter.accept("b", [34])
    assert first_chain(propose(drafter, "b")) == [35]
    drafter.end("a")
    drafter.end("b")
    drafter.clear_scope(SCOPE)
    assert drafter.memory_bytes() == 0


def test_a_large_scope_is_cleared_while_a_request_writes_to_it() -> None:
    """What was open leads to rows that are gone: compiled code reads them without a look at the bounds."""
    drafter, rng = TrieDrafter(), random.Random(0)
    for name in ("a", "b"):
        begin(drafter, name, [1])
        say(drafter, name, [rng.randrange(5000) for _ in range(2000)])
    (trie,) = drafter._scopes.values()
    assert trie.num_rows > 30 * MIN_ROWS
    drafter.clear_scope(SCOPE)
    for name in ("a", "b"):
        state = drafter._requests[name]
        assert not state.branches.cursors.any(), "nothing leads to the rows of before"
        say(drafter, name, PATTERN)
    assert drafter.memory_bytes() < 200 * ROW_BYTES + SCOPE_BYTES + sum(
        state.text.nbytes for state in drafter._requests.values()
    )
    begin(drafter, "c", PATTERN[:2])
    assert first_chain(propose(drafter, "c")) == PATTERN[2 : 2 + len(first_chain(propose(drafter, "c")))]
    assert len(propose(drafter, "c")) > 3


def test_idle_scopes_are_dropped_the_least_recently_used_first() -> None:
    rng, scopes = random.Random(0), [DraftScope("t", str(i)) for i in range(4)]
    texts = [[rng.randrange(5000) for _ in range(100)] for _ in scopes]
    size = 1300 * ROW_BYTES + SCOPE_BYTES  # of one such text
    drafter = TrieDrafter(max_total_bytes=3 * size + 2 * SCOPE_BYTES)
    begin(drafter, "live", texts[0][:2], scopes[0])
    for scope, text in zip(scopes[:3], texts, strict=False):
        teach(drafter, [text], scope)
    begin(drafter, "again", texts[1][:2], scopes[1])
    drafter.end("again")
    teach(drafter, [texts[3]], scopes[3])
    for i, is_kept in enumerate([True, True, False, True]):  # 0 is in use, 1 was used again
        begin(drafter, "probe", texts[i][:2], scopes[i])
        assert (len(propose(drafter, "probe")) > 0) == is_kept
        drafter.end("probe")


def test_two_continuations_are_both_drafted_the_more_frequent_first() -> None:
    drafter = TrieDrafter()
    often, seldom = [21, 22, 23], [31, 32, 33]
    texts = [often, seldom, often, seldom, often]  # a token of its own before each 9: nothing longer matches
    begin(drafter, "a", [*(token for i, text in enumerate(texts) for token in (100 + i, 9, *text)), 200, 9])
    tree = propose(drafter, "a", 8)
    assert roots(tree)[:2] == [21, 31]
    assert first_chain(tree)[:3] == often
    assert {22, 32} <= set(tree.token_ids)  # both are followed, in one tree


def test_more_frequent_outputs_of_the_scope_come_first() -> None:
    drafter = TrieDrafter()
    teach(drafter, [[9, 2, 5], [9, 1, 5], [9, 2, 6], [9, 3, 5], [9, 2, 5]])
    begin(drafter, "a", [9])
    tree = propose(drafter, "a", 16)
    assert roots(tree)[0] == 2
    assert sorted(roots(tree)) == [1, 2, 3]
    assert first_chain(tree)[:2] == [2, 5]


def test_shorter_matches_are_added_to_longer_ones_never_put_instead() -> None:
    """After "7 8" comes 1, though 8 alone is mostly followed by 2: 1 first, and 2 beside it."""
    prompt = [7, 8, 1, *([5, 8, 2] * 3), 6, 7, 8]
    drafter = TrieDrafter()
    begin(drafter, "a", prompt)
    assert roots(propose(drafter, "a", 16)) == [1, 2]
    drafter = TrieDrafter(min_retrieved_tokens=1)  # the longest match is enough
    begin(drafter, "a", prompt)
    assert roots(propose(drafter, "a", 16)) == [1]


def test_min_retrieved_tokens_counts_shared_branches_too() -> None:
    for wanted, expected in ((2, [1]), (3, [1, 2])):
        drafter = TrieDrafter(min_retrieved_tokens=wanted)
        teach(drafter, [[7, 8, 1, 3], [5, 8, 2, 4]])
        begin(drafter, "a", [7, 8])
        assert roots(propose(drafter, "a", 16)) == expected


@pytest.mark.parametrize(("prompt_weight", "first"), [(8.0, 1), (0.1, 2)])
def test_branches_of_the_prompt_weigh_more_or_less(prompt_weight: float, first: int) -> None:
    drafter = TrieDrafter(prompt_weight=prompt_weight)
    teach(drafter, [[9, 2]] * 3)
    begin(drafter, "a", [9, 1, 9])
    assert roots(propose(drafter, "a"))[0] == first


def test_a_match_inside_a_long_repetition_is_nearly_certain_and_a_chance_hit_is_not() -> None:
    drafter = TrieDrafter()
    begin(drafter, "a", [*PATTERN, 30, 31, 32, *PATTERN[:7]])
    assert propose(drafter, "a").probs[0] > 0.6
    drafter.accept("a", [31])
    assert propose(drafter, "a").probs[0] < 0.4


def test_a_continuation_that_seldom_came_is_not_certain_because_it_is_the_only_one_left() -> None:
    """What else came is not in the trie: pruned, or here the answer's end."""
    drafter = TrieDrafter()
    teach(drafter, [[5, 7, 8]] * 98 + [[5, 7, 8, 1]] * 2)
    begin(drafter, "a", [5, 7, 8])
    assert propose(drafter, "a").probs[0] < 0.5


def branching(mode: str, **options: Any) -> TrieDrafter:
    drafter = TrieDrafter(mode=mode, **options)
    teach(drafter, [[9, 1, 2, 3, 4], [9, 1, 2, 5, 6], [9, 1, 2, 3, 4], [9, 7, 8, 7, 8], [9, 7, 8, 1, 1]])
    begin(drafter, "a", [9])
    return drafter


def test_hierarchical_drafts_merge_branches_by_prefix() -> None:
    tree = propose(branching("hierarchical"), "a", 64)
    assert {(1, 2, 3, 4), (1, 2, 5, 6), (7, 8, 7, 8), (7, 8, 1, 1)} <= paths(tree)
    assert len(paths(tree)) == len(tree)


def test_parallel_drafts_are_chains_that_share_the_root_only() -> None:
    tree = propose(branching("parallel"), "a", 64)
    assert roots(tree) == [1, 7]
    assert all(tree.parents.count(node) <= 1 for node in range(len(tree)))
    assert (1, 2, 3, 4) in paths(tree)


def test_a_single_draft_is_the_likeliest_chain() -> None:
    tree = propose(branching("single"), "a", 64)
    assert tree.token_ids[:4] == [1, 2, 3, 4]
    assert tree.parents == list(range(-1, len(tree) - 1))


def test_a_small_budget_goes_to_the_likeliest_paths() -> None:
    whole = propose(branching("hierarchical"), "a", 64)
    for budget in range(1, len(whole)):
        tree = propose(branching("hierarchical"), "a", budget)
        assert len(tree) == budget
        assert sorted(tree.probs) == pytest.approx(sorted(whole.probs)[-budget:])
    assert len(propose(branching("hierarchical"), "a", 0)) == 0
    assert len(propose(branching("hierarchical"), "a", 8, 0)) == 0


def test_more_different_next_tokens_than_are_weighed() -> None:
    drafter = TrieDrafter(capacity=20_000)
    teach(drafter, [[8, 9, 100 + i] for i in range(5000)])
    teach(drafter, [[7, 9, 99, 98, 97]] * 3000)
    begin(drafter, "a", [9])
    assert 99 in propose(drafter, "a", 64, 12).token_ids
    drafter.accept("a", [99])
    assert propose(drafter, "a").token_ids[:2] == [98, 97]  # nothing is left behind of the crowd


def test_a_drafts_size_and_depth_are_bounded_by_query_and_drafter() -> None:
    for options, size, depth in (({}, 8, 8), ({"decoding_length": 3}, 3, 3), ({"branch_length": 2}, 2, 2)):
        drafter = TrieDrafter(**options)
        begin(drafter, "a", [*range(20), 0])
        tree = propose(drafter, "a")
        assert (len(tree), max(tree.depths())) == (size, depth)


def test_ending_a_request_frees_its_state_and_its_id() -> None:
    drafter = TrieDrafter()
    begin(drafter, "a", PATTERN * 2, scope=None)
    assert drafter.memory_bytes() > 0
    with pytest.raises(ValueError, match="'a'"):
        begin(drafter, "a", [1])
    drafter.end("a")
    drafter.end("a")  # harmless
    assert drafter.memory_bytes() == 0
    begin(drafter, "a", PATTERN[:2])
    assert len(propose(drafter, "a")) == 0, "the old prompt of a reused id is drafted"


@pytest.mark.parametrize("limits", [{"capacity": 50}, {"max_scope_bytes": 500 * ROW_BYTES}])
def test_it_still_drafts_after_its_shared_memory_was_pruned_many_times(limits: dict[str, int]) -> None:
    rng, drafter = random.Random(2), TrieDrafter(branch_length=6, **limits)
    for i in range(300):
        request_id = f"r{i}"
        begin(drafter, request_id, [1])
        for _ in range(3):
            say(drafter, request_id, [rng.randrange(30, 60) for _ in range(6)])
            say(drafter, request_id, PATTERN)
        drafter.end(request_id)
    check_trie(drafter._scopes[SCOPE], limits.get("capacity", 1024), 500 if "max_scope_bytes" in limits else 10**6)
    begin(drafter, "new", PATTERN[:3])
    assert first_chain(propose(drafter, "new"))[:3] == PATTERN[3:6]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decoding_length", 0),
        ("branch_length", 0),
        ("capacity", 0),
        ("min_retrieved_tokens", 0),
        ("max_scope_bytes", 0),
        ("max_total_bytes", 0),
        ("mode", "depth-first"),
        ("prompt_weight", 0.0),
        ("prompt_weight", float("nan")),
        ("prompt_weight", float("inf")),
    ],
)
def test_bad_options_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} = "):
        TrieDrafter(**{name: value})
