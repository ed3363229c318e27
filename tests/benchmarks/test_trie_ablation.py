"""What the ablations of the trie leave out, and what goes on as ever."""

from __future__ import annotations

import random

from batchserve.draft.base import DraftRequest
from benchmarks.trie_ablation import UNPRUNED, AblatedTrie
from tests.draft.scope_machine import SCOPE, first_chain, say
from tests.draft.test_trie import PATTERN, begin, propose, teach


def test_prompts_and_outputs_can_be_left_out() -> None:
    """The ablations of table 3: what is not inserted is not drafted; what is, goes on as ever."""
    for is_prompt, is_output in ((True, False), (False, True)):
        drafter = AblatedTrie(is_inserting_prompts=is_prompt, is_inserting_outputs=is_output)
        drafter.start(DraftRequest("a", [*PATTERN, 20], [[21, 22]], SCOPE))
        begin(drafter, "b", [40])
        say(drafter, "a", [30, 31, 32, *PATTERN[:2]])
        assert first_chain(propose(drafter, "a"))[:2] == (PATTERN[2:4] if is_prompt else [])
        drafter.accept("a", [20])
        assert len(propose(drafter, "a")) == 0  # behind the prompt's last token stands an output
        drafter.accept("a", [21])
        assert first_chain(propose(drafter, "a")) == ([22] if is_prompt else [])
        for request_id in "ab":
            drafter.accept(request_id, [30])
            assert first_chain(propose(drafter, request_id))[:2] == ([31, 32] if is_output else [])


def test_without_eliminating_a_prompt_outlives_its_request() -> None:
    for is_eliminating in (True, False):
        drafter = AblatedTrie(is_eliminating=is_eliminating)
        begin(drafter, "a", PATTERN)
        begin(drafter, "b", PATTERN[:2])
        assert len(propose(drafter, "b")) == 0
        drafter.end("a")
        assert first_chain(propose(drafter, "b")) == ([] if is_eliminating else PATTERN[2:])


def test_without_pruning_the_capacity_does_not_bind() -> None:
    rng = random.Random(0)
    texts = [[9, rng.randrange(1000), rng.randrange(1000)] for _ in range(200)]
    sizes = {}
    for is_pruning in (True, False):
        drafter = AblatedTrie(capacity=50 if is_pruning else UNPRUNED)
        teach(drafter, texts)
        sizes[is_pruning] = drafter._scopes[SCOPE].num_nodes
    assert sizes[False] > sizes[True] + 200
