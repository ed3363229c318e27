from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.scheduler.acceptance import MOST_PROB, AcceptanceModel, RequestOdds, lay_out, path_products
from tests.factories import examples


def calibrated(model: AcceptanceModel, request: RequestOdds, parents: list[int], probs: list[float]) -> list[float]:
    candidates = lay_out([parents], [probs])
    return model.calibrate(candidates, [request])[0].tolist()


def propose(
    model: AcceptanceModel, request: RequestOdds, tokens: list[int], parents: list[int], probs: list[float]
) -> None:
    candidates = lay_out([parents], [probs])
    _, edges = model.calibrate(candidates, [request])
    model.propose(request, tokens, slice(0, len(tokens)), candidates, edges)


def test_trees_are_laid_out_behind_each_other() -> None:
    candidates = lay_out([[-1, 0, 0], [], [-1, 0]], [[0.8, 0.4, 0.2], [], [0.5, 0.5]])
    assert candidates.owners.tolist() == [0, 0, 0, 2, 2]
    assert candidates.parents.tolist() == [-1, 0, 0, -1, 3]
    assert candidates.depths.tolist() == [1, 2, 2, 1, 2]
    assert candidates.edges.tolist() == pytest.approx([0.8, 0.5, 0.25, 0.5, 1.0])


@examples(100)
@given(st.data())
def test_path_products_are_those_of_every_single_path(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 40))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(size)]
    edges = [data.draw(st.floats(0.01, 1.0)) for _ in range(size)]
    expected: list[float] = []
    for i, parent in enumerate(parents):
        expected.append(edges[i] * (expected[parent] if parent >= 0 else 1.0))
    found = path_products(np.array(parents, np.int64), np.array(edges))
    assert found.tolist() == pytest.approx(expected)


def test_a_claim_is_believed_until_something_is_known() -> None:
    model = AcceptanceModel()
    assert calibrated(model, model.start("a"), [-1, 0], [0.8, 0.4]) == pytest.approx([0.8, 0.4])
    assert calibrated(model, model.start("a"), [-1], [1.0]) == [MOST_PROB]


@pytest.mark.parametrize("truth", [0.2, 0.5, 0.95])
def test_probabilities_become_what_comes_true(truth: float) -> None:
    model, rng = AcceptanceModel(), np.random.default_rng(1)
    for _ in range(40):
        request = model.start("a")
        for _ in range(25):
            propose(model, request, [7], [-1], [0.6])
            model.arrive(request, [7 if rng.random() < truth else 8])
    assert calibrated(model, model.start("a"), [-1], [0.6])[0] == pytest.approx(truth, abs=0.08)
    # What was learned of one claim at one depth says nothing of another, nor of another drafter.
    assert calibrated(model, model.start("a"), [-1], [0.25])[0] == pytest.approx(0.25)
    assert calibrated(model, model.start("b"), [-1], [0.6])[0] == pytest.approx(0.6)


def test_one_request_s_record_moves_its_own_odds_only() -> None:
    model = AcceptanceModel()
    unlucky = model.start("a")
    for _ in range(6):
        propose(model, unlucky, [7], [-1], [0.6])
        model.arrive(unlucky, [8])
    assert calibrated(model, unlucky, [-1], [0.25])[0] < 0.15
    assert calibrated(model, model.start("a"), [-1], [0.25])[0] == pytest.approx(0.25)


def test_a_tree_is_scored_to_its_end_whenever_its_tokens_arrive_and_whatever_was_run_of_it() -> None:
    model = AcceptanceModel()
    request = model.start("a")
    #       1 -> 2 -> 3
    #         -> 9
    propose(model, request, [1, 2, 9, 3], [-1, 0, 0, 1], [0.9, 0.6, 0.2, 0.5])
    model.arrive(request, [1])
    assert model.tested["a"][:, :3].tolist() == [[1, 0, 0], [1, 0, 0]]
    model.arrive(request, [2, 5])
    assert model.tested["a"][:, :3].tolist() == [[1, 2, 1], [1, 1, 0]]
    assert not request.open
    model.arrive(request, [3])
    assert model.tested["a"].sum() == 6


def test_two_proposals_are_open_at_once() -> None:
    model = AcceptanceModel()
    request = model.start("a")
    propose(model, request, [1, 2], [-1, 0], [0.5, 0.5])
    model.arrive(request, [1])
    propose(model, request, [2, 3], [-1, 0], [0.5, 0.5])
    model.arrive(request, [2])
    assert len(request.open) == 1
    assert model.tested["a"][:, :2].tolist() == [[2, 1], [2, 1]]


def test_a_drafter_that_is_always_sure_and_always_wrong_is_found_out_quickly() -> None:
    model = AcceptanceModel()
    request = model.start("a")
    for _ in range(32):
        propose(model, request, [1], [-1], [1.0])
        model.arrive(request, [2])
    assert calibrated(model, request, [-1], [1.0])[0] < 0.02


def test_calibration_error_is_the_distance_of_claims_from_the_truth() -> None:
    model, rng = AcceptanceModel(), np.random.default_rng(2)
    for _ in range(2000):
        request = model.start("a")
        propose(model, request, [7], [-1], [0.3])
        model.arrive(request, [7 if rng.random() < 0.3 else 8])
    assert model.reliability["a"].error() < 0.05
    assert model.reliability["a"].count.sum() == 2000
