from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.decoding_length.acceptance import AcceptanceModel, Given
from batchserve.decoding_length.budget_kernels import MAX_PROB, TALLY_MEMORY
from batchserve.draft.base import DraftTree
from batchserve.draft.forest import DraftForest
from tests.factories import examples

SLOTS = itertools.count()


def forest(*trees: tuple[list[int], list[int], list[float]]) -> DraftForest:
    return DraftForest.of([DraftTree(*tree) for tree in trees])


def only(slot: int) -> tuple[np.ndarray, np.ndarray]:
    """The slots and places of a step of one request."""
    return np.array([slot]), np.array([0])


def calibrated(model: AcceptanceModel, slot: int, parents: list[int], probs: list[float]) -> list[float]:
    return model.calibrate(forest(([0] * len(parents), parents, probs)), *only(slot)).paths.tolist()


def propose(model: AcceptanceModel, slot: int, tokens: list[int], parents: list[int], probs: list[float]) -> None:
    model.remember(model.calibrate(forest((tokens, parents, probs)), *only(slot)))


def arrive(model: AcceptanceModel, slot: int, tokens: list[int]) -> None:
    model.arrive(Given.of({slot: tokens}))


def start(model: AcceptanceModel, drafter: str) -> int:
    """A new request's slot."""
    slot = next(SLOTS)
    model.start(slot, drafter)
    return slot


def scored(model: AcceptanceModel) -> tuple[list[int], list[int]]:
    """Edges scored, and those that came true, of the first three depths."""
    kept = model.reliability["a"]
    return kept.num_scored[:3], kept.num_accepted[:3]


@examples(100)
@given(st.data())
def test_trees_are_weighed_each_by_itself_whatever_stands_beside_it(data: st.DataObject) -> None:
    """A node's probability is the product of the edges of its path, each the ratio of what was claimed."""
    parts, expected = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        size = data.draw(st.integers(0, 12))
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(size)]
        edges = [data.draw(st.floats(0.01, 0.99)) for _ in range(size)]
        probs: list[float] = []
        for i, parent in enumerate(parents):
            probs.append(edges[i] * (probs[parent] if parent >= 0 else 1.0))
        parts.append(([0] * size, parents, probs))
        expected += probs
    model = AcceptanceModel()
    slots = np.array([start(model, "a") for _ in parts])
    # Whoever was not drafted stands among the others.
    beside, places = np.concatenate(([start(model, "a")], slots)), np.arange(1, len(slots) + 1)
    offered = model.calibrate(forest(*parts), beside, places)
    assert offered.trees[0].tolist() == slots.tolist()
    assert offered.owners.tolist() == [place for place, each in zip(places, parts, strict=True) for _ in each[0]]
    assert offered.paths.tolist() == pytest.approx(expected)
    assert offered.parents.tolist() == [parent for _, parents, _ in parts for parent in parents]


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 5], [-2]])
def test_a_tree_whose_parents_do_not_come_first_is_refused(parents: list[int]) -> None:
    model = AcceptanceModel()
    with pytest.raises(ValueError, match="does not come before it"):
        calibrated(model, start(model, "a"), parents, [0.5] * len(parents))


def test_a_claim_is_believed_until_something_is_known() -> None:
    model = AcceptanceModel()
    assert calibrated(model, start(model, "a"), [-1, 0], [0.8, 0.4]) == pytest.approx([0.8, 0.4])
    assert calibrated(model, start(model, "a"), [-1], [1.0]) == pytest.approx([MAX_PROB])


@pytest.mark.parametrize("truth", [0.2, 0.5, 0.95])
def test_probabilities_become_what_comes_true(truth: float) -> None:
    model, rng = AcceptanceModel(), np.random.default_rng(1)
    for _ in range(40):
        request = start(model, "a")
        for _ in range(25):
            propose(model, request, [7], [-1], [0.6])
            arrive(model, request, [7 if rng.random() < truth else 8])
    assert calibrated(model, start(model, "a"), [-1], [0.6])[0] == pytest.approx(truth, abs=0.08)
    # What was learned of one claim at one depth says nothing of another, nor of another drafter.
    assert calibrated(model, start(model, "a"), [-1], [0.25])[0] == pytest.approx(0.25)
    assert calibrated(model, start(model, "b"), [-1], [0.6])[0] == pytest.approx(0.6)


@pytest.mark.parametrize("prob", [0.05, 0.3, 0.6, 0.95])
def test_a_drafter_that_knows_its_odds_is_hardly_corrected(prob: float) -> None:
    """After any few edges there is some difference, all of it chance; what is rare weighs a little too much."""
    rng, seen, believed = np.random.default_rng(7), [], []
    for _ in range(300):
        model = AcceptanceModel()
        request = start(model, "a")
        hits = rng.random(12) < prob
        for is_hit in hits:
            propose(model, request, [7], [-1], [prob])
            arrive(model, request, [7 if is_hit else 8])
        seen.append(abs(hits.mean() - prob))
        believed.append(calibrated(model, start(model, "a"), [-1], [prob])[0] - prob)
    assert np.abs(believed).mean() < 0.8 * np.mean(seen)
    assert abs(np.mean(believed)) < 0.02


def test_one_request_s_record_moves_its_own_odds_only() -> None:
    model = AcceptanceModel()
    unlucky = start(model, "a")
    for _ in range(6):
        propose(model, unlucky, [7], [-1], [0.6])
        arrive(model, unlucky, [8])
    assert calibrated(model, unlucky, [-1], [0.25])[0] < 0.15
    assert calibrated(model, start(model, "a"), [-1], [0.25])[0] == pytest.approx(0.25)


def test_a_tree_is_scored_to_its_end_whenever_its_tokens_arrive_and_whatever_was_run_of_it() -> None:
    model = AcceptanceModel()
    request = start(model, "a")
    #       1 -> 2 -> 3
    #         -> 9
    propose(model, request, [1, 2, 9, 3], [-1, 0, 0, 1], [0.9, 0.6, 0.2, 0.5])
    arrive(model, request, [1])
    assert scored(model) == ([1, 0, 0], [1, 0, 0])
    arrive(model, request, [2, 5])
    assert scored(model) == ([1, 2, 1], [1, 1, 0])
    assert model.num_open == 0
    arrive(model, request, [3])
    assert scored(model) == ([1, 2, 1], [1, 1, 0])


def test_two_proposals_are_open_at_once() -> None:
    model = AcceptanceModel()
    request = start(model, "a")
    propose(model, request, [1, 2], [-1, 0], [0.5, 0.5])
    arrive(model, request, [1])
    propose(model, request, [2, 3], [-1, 0], [0.5, 0.5])
    arrive(model, request, [2])
    assert model.num_open == 1
    assert scored(model) == ([2, 1, 0], [2, 1, 0])


def test_a_drafter_that_is_always_sure_and_always_wrong_is_found_out_quickly() -> None:
    model = AcceptanceModel()
    request = start(model, "a")
    for _ in range(32):
        propose(model, request, [1], [-1], [1.0])
        arrive(model, request, [2])
    assert calibrated(model, request, [-1], [1.0])[0] < 0.02


def test_calibration_error_is_the_distance_of_claims_from_the_truth() -> None:
    model, rng = AcceptanceModel(), np.random.default_rng(2)
    for _ in range(2000):
        request = start(model, "a")
        propose(model, request, [7], [-1], [0.3])
        arrive(model, request, [7 if rng.random() < 0.3 else 8])
    assert model.reliability["a"].error() < 0.05
    assert sum(model.reliability["a"].count) == 2000


def test_calibration_error_is_that_of_the_edges_of_late() -> None:
    """A server that has run for weeks says how its drafters do now."""
    model, size = AcceptanceModel(), 500
    step = list(range(size)), [-1] * size, [1.0 / size] * size
    counts = []
    for _ in range(3 * int(TALLY_MEMORY) // size):
        request = start(model, "a")
        propose(model, request, *step)
        arrive(model, request, [7])
        kept = model.reliability["a"]
        counts.append(sum(kept.count))
    assert max(counts) == TALLY_MEMORY
    assert counts[-1] > TALLY_MEMORY / 2
    assert sum(kept.hits) == pytest.approx(counts[-1] / size), "what is forgotten takes its hits along"
    assert kept.num_scored[0] == 3 * TALLY_MEMORY, "the counters of edges are totals"


def test_tokens_of_requests_that_were_never_drafted_change_nothing() -> None:
    """Their slots may be beyond all that the model knows."""
    model = AcceptanceModel()
    slot = start(model, "a")
    propose(model, slot, [1, 2], [-1, 0], [0.5, 0.25])
    model.arrive(Given.of({slot + (1 << 20): [1, 2], slot: [1, 3]}))
    assert scored(model) == ([1, 1, 0], [1, 0, 0])
