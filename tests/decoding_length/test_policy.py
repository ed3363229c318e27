"""A fixed decoding length: everything is run, and what came of it is counted."""

from __future__ import annotations

import numpy as np

from batchserve.decoding_length.policy import FixedDrafting, StepOutcome
from batchserve.decoding_length.step_time import StepLoad
from batchserve.draft.base import DraftTree
from batchserve.draft.forest import DraftForest

LOAD = StepLoad(2, 2, 2)


def choose(policy: FixedDrafting, trees: dict[str, DraftTree]) -> list[bool]:
    assert policy.begin_step(LOAD, LOAD, len(trees))
    assert all(policy.are_asked([*trees]))
    bounds = np.full((len(trees), 3), 64)
    assert not policy.bound([*trees], bounds, 64).any()
    assert (bounds == 64).all()
    chosen: list[bool] = policy.choose(DraftForest.of([*trees.values()]), [*trees], [], 64).tolist()
    return chosen


def counted(policy: FixedDrafting, drafter: str) -> tuple[list[int], list[int]]:
    """By depth: edges that were held against the truth, and those that came true."""
    reliability = policy.acceptance.reliability[drafter]
    return reliability.num_scored, reliability.num_accepted


def test_what_is_proposed_is_run_and_counted_by_drafter_and_depth() -> None:
    policy = FixedDrafting()
    policy.start("a", "trie")
    policy.start("b", "reference")
    fork = DraftTree([1, 2, 3], [-1, 0, 0], [0.5, 0.3, 0.2])
    assert choose(policy, {"b": DraftTree([7, 8], [-1, 0], [1.0, 1.0]), "a": fork}) == [True] * 5
    policy.step_done(StepOutcome(LOAD, LOAD, LOAD), {"a": [1, 3, 4], "b": [9]})
    assert counted(policy, "trie") == ([1, 2, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0])
    assert counted(policy, "reference") == ([1, 0, 0, 0, 0, 0, 0], [0] * 7), "behind a wrong node nothing is known"
    assert not policy.acceptance.is_any_open


def test_what_nobody_verified_is_not_counted() -> None:
    policy = FixedDrafting()
    policy.start("a", "jacobi")
    window = DraftTree([1, 5, 6], [-1, -1, 1], [0.5, 1.0, 1.0], [True, False, False])
    assert choose(policy, {"a": window}) == [True] * 3
    assert not policy.windows_run(["a"]), "nobody wants to know what it earned"
    policy.step_done(StepOutcome(LOAD, LOAD, LOAD), {"a": [1, 2]})
    assert counted(policy, "jacobi") == ([1, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0])


def test_whoever_is_preempted_or_ends_is_held_to_nothing_that_he_was_offered() -> None:
    policy = FixedDrafting()
    for name in "abc":
        policy.start(name, "trie")
    choose(policy, {name: DraftTree([1], [-1], [1.0]) for name in "abc"})
    policy.skip("a")
    policy.end("b")
    policy.end("b")  # harmless
    policy.skip("b")  # so is this
    policy.step_done(StepOutcome(LOAD, LOAD, LOAD), {"a": [1], "b": [1], "c": [1]})
    assert counted(policy, "trie") == ([1, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0])
