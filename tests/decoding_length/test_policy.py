"""A fixed decoding length: everything is run, and what came of it is counted."""

from __future__ import annotations

import numpy as np

from batchserve.decoding_length.acceptance import Given
from batchserve.decoding_length.policy import Drafted, FixedDrafting, StepOutcome
from batchserve.decoding_length.step_time import StepLoad
from batchserve.draft.base import DraftTree
from batchserve.draft.forest import DraftForest

LOAD = StepLoad(2, 2, 2)


def slots_of(*names: str) -> np.ndarray:
    return np.array(["abc".index(name) for name in names], np.int64)


def choose(policy: FixedDrafting, trees: dict[str, DraftTree]) -> list[bool]:
    assert policy.begin_step(LOAD, LOAD, len(trees))
    slots = slots_of(*trees)
    assert policy.are_asked(slots).all()
    bounds = np.full((len(trees), 3), 64)
    assert not policy.bound(slots, bounds, 64).any()
    assert (bounds == 64).all()
    places = np.arange(len(slots))
    drafted = Drafted([], slots, places, slots, 0 * slots)
    chosen: list[bool] = policy.choose(DraftForest.of([*trees.values()]), drafted, 64).tolist()
    return chosen


def counted(policy: FixedDrafting, drafter: str) -> tuple[list[int], list[int]]:
    """By depth: edges that were held against the truth, and those that came true."""
    reliability = policy.acceptance.reliability[drafter]
    return reliability.num_scored, reliability.num_accepted


def test_what_is_proposed_is_run_and_counted_by_drafter_and_depth() -> None:
    policy = FixedDrafting()
    policy.start(0, "trie")
    policy.start(1, "reference")
    fork = DraftTree([1, 2, 3], [-1, 0, 0], [0.5, 0.3, 0.2])
    assert choose(policy, {"b": DraftTree([7, 8], [-1, 0], [1.0, 1.0]), "a": fork}) == [True] * 5
    policy.step_done(StepOutcome(LOAD, LOAD, LOAD), Given.of({0: [1, 3, 4], 1: [9]}))
    assert counted(policy, "trie") == ([1, 2, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0])
    assert counted(policy, "reference") == ([1, 0, 0, 0, 0, 0, 0], [0] * 7), "behind a wrong node nothing is known"
    assert not policy.acceptance.is_any_open


def test_what_nobody_verified_is_not_counted() -> None:
    policy = FixedDrafting()
    policy.start(0, "jacobi")
    window = DraftTree([1, 5, 6], [-1, -1, 1], [0.5, 1.0, 1.0], [True, False, False])
    assert choose(policy, {"a": window}) == [True] * 3
    assert not policy.windows_run(slots_of("a")), "nobody wants to know what it earned"
    policy.step_done(StepOutcome(LOAD, LOAD, LOAD), Given.of({0: [1, 2]}))
    assert counted(policy, "jacobi") == ([1, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0])


def test_whoever_is_preempted_or_ends_is_held_to_nothing_that_he_was_offered() -> None:
    policy = FixedDrafting()
    for slot in range(3):
        policy.start(slot, "trie")
    choose(policy, {name: DraftTree([1], [-1], [1.0]) for name in "abc"})
    policy.skip(0)
    policy.end(1)
    policy.end(1)  # harmless
    policy.skip(1)  # so is this
    policy.step_done(StepOutcome(LOAD, LOAD, LOAD), Given.of({0: [1], 1: [1], 2: [1]}))
    assert counted(policy, "trie") == ([1, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0])
