"""The draft stage in a core whose every answer is known: what the adaptive decoding length tells of itself."""

from __future__ import annotations

from typing import Any

import pytest

from batchserve.attention.base import LayerShape
from batchserve.decoding_length.acceptance import NUM_DEPTHS
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.policy import FixedDrafting
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from batchserve.draft.base import DraftTree, NullDrafter
from batchserve.draft.forest import DraftForest, DraftQueries
from batchserve.engine.drafting import LATE_STEPS, DraftStage, depth_labels
from batchserve.kv.slab import EXTENT, SlabAllocator
from batchserve.metrics import GAUGES
from batchserve.types import SpeculationParams
from tests.engine.scripted import ScriptedEngine, add, scripted_engine
from tests.factories import make_request

TABLE = StepTimeTable((1, 64), (0.010, 0.0163))  # a row for a hundredth of a step
SLOWNESS = 2.0
ANSWER = "abcdefghij" * 12


def adaptive_engine() -> ScriptedEngine:
    """Every step takes SLOWNESS times what was measured of as many rows."""
    engine = scripted_engine(is_drafting=True)
    core, measured = engine.core, StepTimeModel(TABLE)
    assert engine.drafter is not None
    adaptive = AdaptiveDrafting(StepTimeModel(TABLE), 1.25)
    core.drafts = DraftStage(engine.drafter, adaptive, core.executor.allocator, lambda: engine.now_s)
    launch = core.executor.launch

    def timed_launch(batch: Any) -> Any:
        engine.now_s += SLOWNESS * measured.predict(StepLoad(batch.num_rows, batch.num_rows, len(batch.requests)))
        return launch(batch)

    core.executor.launch = timed_launch  # type: ignore[method-assign]
    return engine


def test_the_adaptive_decoding_length_shows_what_it_goes_by() -> None:
    engine = adaptive_engine()
    for names in ("ab", "cd"):  # drafts that are always right end an answer within some ten steps
        for name in names:
            add(engine, name, ANSWER, max_tokens=len(ANSWER))
        engine.run()
    metrics = engine.core.metrics
    values, acceptance = metrics.snapshot(), metrics.acceptance()["mixture"]  # the requests' drafter, by name
    assert {*metrics.gauges, *metrics.adaptive()} == set(GAUGES)
    assert 0.8 * SLOWNESS < values["step_time_factor"] <= SLOWNESS, "the neighbour was noticed"
    assert values["actual_step_seconds"] == pytest.approx(values["predicted_step_seconds"], rel=0.2)
    assert values["actual_step_seconds"] > SLOWNESS * TABLE.seconds[0]
    # A drafter that is always right: more tokens a second than two requests have without drafts.
    assert values["price_tokens_per_second"] > 2 * 2 / (SLOWNESS * TABLE.seconds[0])
    assert values["accepted_draft_tokens_total"] == values["draft_tokens_total"] == values["draft_rows_total"] > 0
    assert values["rows_total"] == sum(batch.num_rows for batch in engine.runner.batches)
    assert acceptance.depths == depth_labels() == ("1", "2", "3", "4", "5-6", "7-8", "9+")
    assert len(acceptance.depths) == len(acceptance.tested) == NUM_DEPTHS
    assert acceptance.accepted == acceptance.tested, "every edge came true"
    assert sum(acceptance.tested) >= values["accepted_draft_tokens_total"]
    assert 0 <= acceptance.calibration_error < 0.1


def test_drafts_of_a_fixed_length_are_counted_by_drafter_and_depth() -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    for name in "ab":
        add(engine, name, ANSWER, max_tokens=60)
    engine.run()
    metrics = engine.core.metrics
    acceptance, values = metrics.acceptance(), metrics.snapshot()
    assert {*metrics.gauges, *metrics.adaptive()} == {"draft_rows_per_request"}
    assert [*acceptance] == ["mixture"]
    tested = acceptance["mixture"].tested
    assert tested[:4] == acceptance["mixture"].accepted[:4], "every edge came true"
    assert all(tested[:4])
    assert not any(tested[4:])
    assert sum(tested) == values["accepted_draft_tokens_total"] > 80


def test_a_fixed_length_shows_how_well_steps_are_predicted() -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    core = engine.core
    allocator, step_time = core.executor.allocator, StepTimeModel(TABLE)
    core.drafts = DraftStage(core.drafter, FixedDrafting(step_time), allocator, lambda: engine.now_s)
    add(engine, "a", ANSWER, max_tokens=60)
    engine.run()
    assert set(GAUGES) - {*core.metrics.gauges, *core.metrics.adaptive()} == {"price_tokens_per_second"}


@pytest.mark.parametrize("num_unverified", [0, 6])
@pytest.mark.parametrize("first", ["a", "b"])
def test_where_memory_is_short_the_likelier_tree_is_run_and_the_first_nodes_of_the_other(
    num_unverified: int, first: str
) -> None:
    """Both were promised the one extent that is free; who comes later has what is left of his own."""
    allocator = SlabAllocator([LayerShape(1, 1, 1)], "float32", 3 * EXTENT)
    for name in "ab":
        assert allocator.reserve(name, EXTENT)
        allocator.commit(name, range(EXTENT - 4))
    stage = DraftStage(NullDrafter(), FixedDrafting(), allocator, lambda: 0.0)
    is_verified = [True] * (8 - num_unverified) + [False] * num_unverified
    trees = [DraftTree([*range(8)], [*range(-1, 7)], [0.6 if name == first else 0.5] * 8, is_verified) for name in "ab"]
    requests = [make_request(name, [1]) for name in ("a", "none", "b")]
    forest = stage._with_memory(requests, DraftForest.of([trees[0], DraftTree(), trees[1]]))
    sizes = {"a": int(forest.sizes[0]), "b": int(forest.sizes[2])}
    second = "b" if first == "a" else "a"
    assert sizes == {first: 8, second: 3 if num_unverified == 0 else 2}, "a window is run whole or not at all"
    assert allocator.reservable_tokens([second]) == [4]
    allocator.check_integrity({"a", "b"})


def test_a_drafter_that_is_seldom_asked_hears_in_one_piece_what_it_has_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = adaptive_engine()
    drafter, told = engine.drafter, []
    assert drafter is not None

    def propose_nothing(queries: DraftQueries) -> DraftForest:
        told.append(("asked", 0))
        return DraftForest.of([DraftTree()] * len(queries.request_ids))

    monkeypatch.setattr(drafter, "propose_all", propose_nothing)
    for how in ("accept_all", "catch_up"):
        monkeypatch.setattr(drafter, how, lambda tokens, how=how: told.append((how, len(tokens["a"]))))
    add(engine, "a", ANSWER, max_tokens=len(ANSWER))
    engine.run()
    missed = [count for how, count in told if how == "catch_up"]
    assert missed, "it was asked in every step"
    assert min(missed) > LATE_STEPS
    assert all(count <= LATE_STEPS for how, count in told if how == "accept_all")


@pytest.mark.parametrize("earned", [3, 0])
def test_a_window_is_worth_what_the_drafter_says_it_has_earned(monkeypatch: pytest.MonkeyPatch, earned: int) -> None:
    engine = adaptive_engine()
    drafter = engine.drafter
    assert drafter is not None
    window = DraftTree([1, 2], [-1, 0], [0.0, 0.0], [False, False])
    monkeypatch.setattr(drafter, "propose_all", lambda queries: DraftForest.of([window] * len(queries.request_ids)))
    monkeypatch.setattr(drafter, "window_tokens", lambda request_id: earned)
    add(engine, "a", ANSWER, max_tokens=100)
    engine.run()
    steps = [batch.num_rows - len(batch.request_ids) for batch in engine.runner.batches[1:]]
    num_run = sum(rows == 2 for rows in steps)
    assert set(steps) <= {0, 2}
    assert num_run > 90 if earned else 2 <= num_run < 15


def test_a_request_without_speculation_decodes_beside_one_that_drafts() -> None:
    engine = adaptive_engine()
    add(engine, "off", ANSWER, max_tokens=40, speculation=SpeculationParams(is_enabled=False))
    add(engine, "on", ANSWER, max_tokens=40)
    engine.run()
    assert engine.text("off") == engine.text("on") == ANSWER[:40]
    assert [len(delta.token_ids) for delta in engine.deltas("off")] == [1] * 40
    assert engine.core.metrics.snapshot()["draft_rows_total"] > 0


def test_gaps_between_tokens_and_times_of_requests_are_counted() -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=3)
    launch = engine.runner.launch

    def timed_launch(batch: Any) -> Any:
        engine.now_s += 0.012
        return launch(batch)

    engine.runner.launch = timed_launch  # type: ignore[method-assign]
    add(engine, "a", ANSWER, max_tokens=9)  # 1 of the prompt's step, then 4 and 4
    engine.run()
    histograms = engine.core.metrics.reading().histograms
    itl, ttft, tpot = (
        histograms[name]
        for name in ("inter_token_latency_seconds", "time_to_first_token_seconds", "time_per_output_token_seconds")
    )
    assert itl.total == pytest.approx(0.024)
    assert itl.counts[itl.bounds.index(0.004)] == sum(itl.counts) == 8, "of 3 ms each"
    assert (ttft.total, sum(ttft.counts)) == (pytest.approx(0.012), 1)
    assert tpot.total == pytest.approx(0.003)
    assert tpot.counts[tpot.bounds.index(0.004)] == sum(tpot.counts) == 1
    assert histograms["request_seconds"].total == pytest.approx(3 * 0.012)
    assert (histograms["request_queue_seconds"].total, sum(histograms["request_queue_seconds"].counts)) == (0, 1)
