"""The benchmark of the draft budget: its trees are what it says they are, and what it reports is what it has run."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from batchserve.decoding_length.step_time import StepTimeTable
from batchserve.draft.base import DraftQuery
from benchmarks.adaptive.budget import CANDIDATES, VOCAB_SIZE, accepted, grown_tree, measure, truth_of

TABLE = StepTimeTable((4, 16, 64), (0.010, 0.013, 0.030))


@pytest.mark.parametrize("confidence", [0.3, 0.95])
def test_trees_grow_where_they_are_likeliest(confidence: float) -> None:
    for seed in range(20):
        tree = grown_tree(random.Random(seed), CANDIDATES, confidence)
        tree.check(DraftQuery("a", CANDIDATES, CANDIDATES))
        assert len(tree) == CANDIDATES
        for parent in range(-1, CANDIDATES):
            children = [prob for prob, above in zip(tree.probs, tree.parents, strict=True) if above == parent]
            assert sum(children) <= (tree.probs[parent] if parent >= 0 else 1.0) + 1e-9
        # What is added next was there to be added before: a smaller tree is the beginning of a larger one.
        small = grown_tree(random.Random(seed), CANDIDATES // 2, confidence)
        assert small.parents == tree.parents[: CANDIDATES // 2]


def test_they_come_true_as_often_as_they_claim() -> None:
    rng = random.Random(1)
    tree = grown_tree(rng, 12, 0.6)
    reached = Counter[int]()
    for _ in range(4000):
        truth = truth_of(rng, tree)
        assert truth[-1] == VOCAB_SIZE
        path = accepted(tree, np.ones(12, np.bool_), truth)
        assert path == truth, "all of the truth that is in the tree"
        reached[len(path) - 1] += 1
    first = sum(prob for prob, parent in zip(tree.probs, tree.parents, strict=True) if parent == -1)
    assert 1 - reached[0] / 4000 == pytest.approx(first, abs=0.03)
    assert accepted(tree, np.zeros(12, np.bool_), [5, 6]) == [5]


def test_it_counts_the_steps_behind_the_first_ones() -> None:
    between: list[int] = []
    found = measure(TABLE, 5, lambda: between.append(1))
    assert {part["steps"] for part in found["parts"].values()} == {5}
    assert len(between) > 5
    assert all(0 < part["median_ms"] <= part["p90_ms"] for part in found["parts"].values())
    assert 0 < found["rows_bought_per_step"] <= 16 * CANDIDATES
