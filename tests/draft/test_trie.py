"""The trie drafter: valid trees from real repetition, nothing of anybody else's prompt, nothing left behind."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from batchserve.draft.base import DraftQuery, DraftRequest, DraftTree
from batchserve.draft.trie import TrieDrafter
from tests.draft.test_suffix_trie import contents
from tests.factories import examples

PATTERN = [11, 12, 13, 14, 15, 16, 17, 18]


def propose(drafter: TrieDrafter, request_id: str, max_tokens: int = 8, max_depth: int = 8) -> DraftTree:
    (tree,) = drafter.propose([DraftQuery(request_id, max_tokens, max_depth)])
    check_tree(tree, max_tokens, max_depth)
    return tree


def check_tree(tree: DraftTree, max_tokens: int, max_depth: int) -> None:
    """The contract, and what design.md adds: path probabilities fall, the likeliest sibling is first."""
    tree.check(DraftQuery("", max_tokens, max_depth))
    assert len(tree.probs) == len(tree)
    last_sibling: dict[int, float] = {}
    for parent, prob in zip(tree.parents, tree.probs, strict=True):
        assert 0 < prob <= (tree.probs[parent] if parent >= 0 else 1) + 1e-9
        assert prob <= last_sibling.get(parent, 1.0) + 1e-9
        last_sibling[parent] = prob


def first_chain(tree: DraftTree) -> list[int]:
    """The likeliest path: first children all the way."""
    chain, node = [], -1
    while node in tree.parents:
        node = tree.parents.index(node)
        chain.append(tree.token_ids[node])
    return chain


def say(drafter: TrieDrafter, request_id: str, token_ids: list[int]) -> None:
    drafter.accept(request_id, token_ids)
    drafter.share(request_id, token_ids)


class TrieMachine(RuleBasedStateMachine):
    """Several requests at once; every prompt has tokens of its own that nobody else may ever be shown."""

    SECRETS = 1000

    @initialize(capacity=st.sampled_from([40, 300, 200_000]), share_outputs=st.booleans(), length=st.integers(1, 6))
    def begin(self, capacity: int, share_outputs: bool, length: int) -> None:
        self.drafter = TrieDrafter(length, capacity, share_outputs=share_outputs)
        self.is_sharing = share_outputs
        self.known: dict[str, set[int]] = {}  # tokens that each request was told of
        self.unshared: dict[str, list[int]] = {}
        self.shared: set[int] = set()
        self.started = 0

    @rule(public=st.lists(st.integers(0, 5), max_size=12))
    def start(self, public: list[int]) -> None:
        self.started += 1
        request_id, secret = f"r{self.started}", self.SECRETS * self.started
        prompt = [token for t in public for token in (t, secret + t)] or [secret]
        self.drafter.start(DraftRequest(request_id, prompt))
        self.known[request_id], self.unshared[request_id] = set(prompt), []

    @precondition(lambda self: self.known)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 5), min_size=1, max_size=6))
    def accept(self, data: st.DataObject, tokens: list[int]) -> None:
        """An answer may quote its own prompt's secret: then it is shared like any output, once it is published."""
        request_id = data.draw(st.sampled_from(sorted(self.known)))
        own = int(request_id[1:]) * self.SECRETS
        if data.draw(st.integers(0, 9)) == 0:
            tokens = [*tokens, own + 7]
        self.drafter.accept(request_id, tokens)
        self.known[request_id] |= set(tokens)
        self.unshared[request_id] += tokens

    @precondition(lambda self: any(self.unshared.values()))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(r for r, tokens in self.unshared.items() if tokens)))
        tokens, self.unshared[request_id] = self.unshared[request_id], []
        self.drafter.share(request_id, tokens)
        if self.is_sharing:
            self.shared |= set(tokens)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), max_tokens=st.integers(0, 20), max_depth=st.integers(0, 8))
    def propose(self, data: st.DataObject, max_tokens: int, max_depth: int) -> None:
        wanted = data.draw(st.lists(st.sampled_from(sorted(self.known)), min_size=1, unique=True))
        trees = self.drafter.propose([DraftQuery(request_id, max_tokens, max_depth) for request_id in wanted])
        assert len(trees) == len(wanted)
        for request_id, tree in zip(wanted, trees, strict=True):
            check_tree(tree, max_tokens, max_depth)
            assert set(tree.token_ids) <= self.known[request_id] | self.shared

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.known)))
        self.drafter.end(request_id)
        del self.known[request_id], self.unshared[request_id]

    def teardown(self) -> None:
        for request_id in getattr(self, "known", {}):
            self.drafter.end(request_id)
        if hasattr(self, "drafter"):
            assert not self.drafter._requests


TestTrie = TrieMachine.TestCase
TestTrie.settings = examples(80, stateful_step_count=30)


@pytest.mark.slow
class TestTrieAtLength(TrieMachine.TestCase):
    settings = examples(300, stateful_step_count=80)


def test_repeated_text_of_the_prompt_is_found() -> None:
    drafter = TrieDrafter()
    drafter.start(DraftRequest("a", [*PATTERN, 90, 91, 92, *PATTERN[:3]]))
    assert first_chain(propose(drafter, "a", 5)) == PATTERN[3:8]


def test_an_answer_is_drafted_from_its_own_text_at_once() -> None:
    """Not only when it is complete, and before anything is published."""
    drafter = TrieDrafter(share_outputs=False)
    drafter.start(DraftRequest("a", [1]))
    drafter.accept("a", PATTERN)
    drafter.accept("a", [50])
    assert len(propose(drafter, "a")) == 0
    drafter.accept("a", PATTERN[:2])
    assert first_chain(propose(drafter, "a"))[:6] == PATTERN[2:]


def test_outputs_reach_other_requests_once_they_are_shared() -> None:
    drafter = TrieDrafter()
    drafter.start(DraftRequest("a", [1]))
    drafter.start(DraftRequest("b", [*PATTERN[:2]]))
    drafter.accept("a", PATTERN)
    assert len(propose(drafter, "b")) == 0  # not published: the client may never see these tokens
    drafter.share("a", PATTERN)
    assert first_chain(propose(drafter, "b"))[:6] == PATTERN[2:]
    drafter.end("a")
    assert first_chain(propose(drafter, "b"))[:6] == PATTERN[2:]  # shared text outlives its request


def test_a_prompt_is_never_drafted_to_others_even_where_texts_meet() -> None:
    """B says exactly what stands before the secret in A's prompt, and what A answers around it."""
    drafter, secret = TrieDrafter(), [777, 778, 779]
    drafter.start(DraftRequest("a", [*PATTERN, *secret]))
    drafter.start(DraftRequest("b", [5, *PATTERN]))
    assert first_chain(propose(drafter, "a")) == []
    say(drafter, "a", PATTERN)
    assert first_chain(propose(drafter, "a"))[:3] == secret  # A itself is helped by it
    for _ in range(3):
        say(drafter, "b", PATTERN)
        assert set(propose(drafter, "b", 64, 12).token_ids).isdisjoint(secret)


def test_without_sharing_a_request_drafts_as_if_it_were_alone() -> None:
    rng = random.Random(3)
    together, alone = (TrieDrafter(share_outputs=False) for _ in range(2))
    for drafter in (together, alone):
        drafter.start(DraftRequest("b", PATTERN))
    together.start(DraftRequest("a", PATTERN))
    for _ in range(60):
        tokens = [rng.choice(PATTERN) for _ in range(rng.randint(1, 5))]
        say(together, "a", [rng.choice(PATTERN) for _ in range(5)])
        for drafter in (together, alone):
            say(drafter, "b", tokens)
        assert propose(together, "b") == propose(alone, "b")


def test_two_continuations_are_both_drafted_the_more_frequent_first() -> None:
    drafter = TrieDrafter()
    often, seldom = [21, 22, 23], [31, 32, 33]
    texts = [often, seldom, often, seldom, often]  # a token of its own before each 9: nothing longer matches
    drafter.start(
        DraftRequest("a", [*(token for i, text in enumerate(texts) for token in (100 + i, 9, *text)), 200, 9])
    )
    tree = propose(drafter, "a", 8)
    roots = [tree.token_ids[i] for i, parent in enumerate(tree.parents) if parent < 0]
    assert roots[:2] == [21, 31]
    assert first_chain(tree)[:3] == often
    assert {22, 32} <= set(tree.token_ids)  # both are followed, in one tree


def test_the_longest_matching_context_speaks_first() -> None:
    """After "7 8" comes 1, though 8 alone is mostly followed by 2."""
    drafter = TrieDrafter()
    drafter.start(DraftRequest("a", [7, 8, 1, *([5, 8, 2] * 3), 7, 8, 1, 7, 8]))
    assert first_chain(propose(drafter, "a"))[0] == 1


def test_a_budget_of_one_is_the_likeliest_next_token() -> None:
    drafter = TrieDrafter()
    drafter.start(DraftRequest("a", [9, 1, 9, 2, 9, 2, 9]))
    assert propose(drafter, "a", 1).token_ids == [2]
    assert len(propose(drafter, "a", 0)) == 0


def test_ending_a_request_frees_its_state_and_its_id() -> None:
    drafter = TrieDrafter()
    drafter.start(DraftRequest("a", PATTERN * 2))
    with pytest.raises(ValueError, match="'a'"):
        drafter.start(DraftRequest("a", [1]))
    drafter.end("a")
    drafter.end("a")  # harmless
    drafter.start(DraftRequest("a", PATTERN[:2]))
    assert len(propose(drafter, "a")) == 0, "the old prompt of a reused id is drafted"


def test_it_still_drafts_after_its_shared_memory_was_pruned_many_times() -> None:
    rng, drafter = random.Random(2), TrieDrafter(6, capacity=500)
    for i in range(300):
        request_id = f"r{i}"
        drafter.start(DraftRequest(request_id, [1]))
        for _ in range(3):
            say(drafter, request_id, [rng.randrange(30, 5000) for _ in range(6)])
            say(drafter, request_id, PATTERN)
            assert drafter._shared.num_nodes <= 500
            if i % 20 == 0:  # no memory hangs on a window that pruning has cut off
                assert drafter._shared.num_nodes == len(contents(drafter._shared.root))
        drafter.end(request_id)
    assert drafter._shared.generation > 10
    drafter.start(DraftRequest("new", PATTERN[:3]))
    assert first_chain(propose(drafter, "new"))[:3] == PATTERN[3:6]
    say(drafter, "new", PATTERN[3:])
    say(drafter, "new", PATTERN[:3])
    assert first_chain(propose(drafter, "new"))[:3] == PATTERN[3:6]
