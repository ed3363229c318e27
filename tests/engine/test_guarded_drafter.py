"""Drafters that fail: a fault costs one request its drafts, and nobody its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree
from batchserve.draft.forest import DraftForest, DraftQueries
from batchserve.engine import drafting
from batchserve.engine.guarded_drafter import GuardedDrafter
from batchserve.errors import EngineFaultError
from batchserve.faults import Faults
from batchserve.native.pool import ONE_THREAD
from batchserve.request import DraftScope
from tests.engine.scripted import PerfectDrafter, ScriptedEngine, add, scripted_engine

pytestmark = pytest.mark.faults
NAMES = ("a", "bad", "c", "d")
ANSWER = "abcdefghij" * 4


class FaultyDrafter(PerfectDrafter):
    """Perfect, but for one method, which fails whenever it is called for the request "bad"."""

    def __init__(self, method: str, error: type[BaseException] = ZeroDivisionError, calls: int = 1) -> None:
        super().__init__()
        self.method, self.error, self.calls_left = method, error, calls

    def _fail(self, method: str, request_ids: Any) -> None:
        if method == self.method and "bad" in request_ids:
            self.calls_left -= 1
            if self.calls_left <= 0:
                raise self.error("of one request")

    def start(self, request: DraftRequest) -> None:
        super().start(request)
        self._fail("start", [request.request_id])

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        self._fail("propose", [query.request_id for query in queries])
        return super().propose(queries)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        super().accept(request_id, token_ids)
        self._fail("accept", [request_id])

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        super().share(request_id, token_ids)
        self._fail("share", [request_id])

    def observe(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._fail("observe", [request_id])

    def end(self, request_id: str) -> None:
        self._fail("end", [request_id])
        super().end(request_id)


def engine_with(drafter: PerfectDrafter, **options: Any) -> ScriptedEngine:
    engine = scripted_engine(is_drafting=True, decoding_length=4, **options)
    drafter.runner = engine.runner
    engine.drafter = engine.core.drafts.drafter = drafter
    return engine


def run_all(engine: ScriptedEngine) -> dict[str, int]:
    """Every answer is what it would have been; returns how many drafts each had."""
    for name in NAMES:
        add(engine, name, ANSWER)
    engine.run()
    assert {name: engine.text(name) for name in NAMES} == dict.fromkeys(NAMES, ANSWER)
    return {name: engine.deltas(name)[-1].usage.draft_tokens for name in NAMES}  # type: ignore[union-attr]


def drafted_alone() -> int:
    return run_all(engine_with(PerfectDrafter()))["a"]


def faults_of(engine: ScriptedEngine) -> dict[str, int]:
    return engine.core.metrics.reading().faults


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("method", ["start", "propose", "accept", "share"])
def test_a_fault_costs_one_request_its_drafts(method: str, calls: int, caplog: pytest.LogCaptureFixture) -> None:
    calls = 1 if method == "start" else calls
    engine = engine_with(FaultyDrafter(method, calls=calls))
    drafts = run_all(engine)
    usual = drafted_alone()
    for name in ("a", "c", "d"):  # found out within few steps, which the others may have spent without drafts
        assert drafts[name] >= usual // 2
    assert drafts["bad"] < usual
    assert 1 <= sum(faults_of(engine).values()) <= 4
    assert all(where.startswith("drafter.") for where in faults_of(engine))
    told = [record for record in caplog.records if record.name == "batchserve.faults"]
    assert 1 <= len(told) <= sum(faults_of(engine).values())
    assert all(record.exc_info is not None for record in told)
    add(engine, "next", ANSWER)
    engine.run()
    assert engine.deltas("next")[-1].usage.draft_tokens == usual  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [MemoryError, RecursionError, KeyError, AssertionError])
def test_whatever_it_raises(error: type[Exception]) -> None:
    engine = engine_with(FaultyDrafter("propose", error))
    assert run_all(engine)["bad"] == 0
    assert not engine.core.drafts._guarded.failed


def test_only_ctrl_c_and_its_like_pass() -> None:
    engine = engine_with(FaultyDrafter("propose", KeyboardInterrupt))
    add(engine, "bad", ANSWER)
    with pytest.raises(KeyboardInterrupt):
        engine.run()


def test_a_fault_at_a_request_s_end_is_that_request_s_alone() -> None:
    engine = engine_with(FaultyDrafter("end"))
    for name in NAMES:
        add(engine, name, ANSWER)
    while engine.core.has_work:
        engine.step()
    assert {name: engine.text(name) for name in NAMES} == dict.fromkeys(NAMES, ANSWER)
    assert faults_of(engine) == {"drafter.end": 1}
    drafts = engine.core.drafts
    assert not drafts._started
    assert not drafts._guarded.failed


def test_a_request_with_the_id_of_one_that_failed_is_drafted() -> None:
    drafter = FaultyDrafter("propose")
    engine = engine_with(drafter)
    add(engine, "bad", ANSWER)
    engine.run()
    drafter.method = ""
    add(engine, "bad", ANSWER)
    engine.run()
    assert engine.deltas("bad")[-1].usage.draft_tokens > 0  # type: ignore[union-attr]


def test_a_drafter_that_always_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(FaultyDrafter("propose"))
    for _ in range(5):
        add(engine, "bad", ANSWER)
        engine.run()
    assert faults_of(engine) == {"drafter.propose_all": 5}
    assert len([record for record in caplog.records if record.name == "batchserve.faults"]) == 1


class BatchOnly(PerfectDrafter):
    """Fails whenever it is asked for more than one request at a time."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        if len(queries) > 1:
            raise ValueError("too many")
        return super().propose(queries)

    def accept_all(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        super().accept_all(token_ids)
        if len(token_ids) > 1:
            raise ValueError("too many")


def test_where_nobody_is_to_blame_requests_are_drafted_one_by_one() -> None:
    engine = engine_with(BatchOnly())
    drafts = run_all(engine)
    assert set(drafts.values()) == {drafts["a"]}
    assert drafts["a"] >= drafted_alone() // 2
    assert sum(faults_of(engine).values()) <= 2, "it fails once, and is not asked so again"


BAD_TREES: dict[str, Callable[[DraftTree], object]] = {
    "a parent that comes later": lambda tree: tree.parents.__setitem__(0, 1),
    "a parent that is none": lambda tree: tree.parents.__setitem__(0, -2),
    "a parent far away": lambda tree: tree.parents.__setitem__(0, 1 << 40),
    "a token below the vocabulary": lambda tree: tree.token_ids.__setitem__(1, -1),
    "a token beyond the vocabulary": lambda tree: tree.token_ids.__setitem__(1, 1 << 31),
    "a token that is no integer": lambda tree: tree.token_ids.__setitem__(1, "a"),  # type: ignore[call-overload]
    "a token beyond int64": lambda tree: tree.token_ids.__setitem__(1, 1 << 70),
    "more tokens than parents": lambda tree: tree.token_ids.append(65),
    "fewer probs": lambda tree: tree.probs.pop(),
    "a probability that is no number": lambda tree: tree.probs.__setitem__(0, float("nan")),
    "an infinite probability": lambda tree: tree.probs.__setitem__(0, float("inf")),
    "a negative probability": lambda tree: tree.probs.__setitem__(0, -0.5),
    "two equal children": lambda tree: tree.add(tree.token_ids[0], -1),
    "more nodes than were asked for": lambda tree: [tree.add(65 + i, -1) for i in range(9)],
    "a verified child of one that is not": lambda tree: tree.is_verified.__setitem__(0, False),
}


@pytest.mark.parametrize("spoil", BAD_TREES.values(), ids=BAD_TREES)
def test_a_tree_that_breaks_the_contract_is_a_fault_of_its_request(spoil: Callable[[DraftTree], object]) -> None:
    class Spoiling(PerfectDrafter):
        def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
            trees = super().propose(queries)
            for query, tree in zip(queries, trees, strict=True):
                if query.request_id == "bad" and len(tree) > 1:
                    spoil(tree)
            return trees

    engine = engine_with(Spoiling())
    drafts = run_all(engine)
    assert drafts["bad"] == 0
    assert {drafts[name] for name in ("a", "c", "d")} == {drafted_alone()}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        DraftForest.empty(0),
        DraftForest.empty(7),
        DraftForest(np.array([0, 99, 1]), *DraftForest.of([DraftTree([65], [-1], [1.0])])[1:]),
        DraftForest(np.array([0, 1]), np.zeros(1, np.int64), *DraftForest.empty(1)[2:]),
    ],
    ids=["nothing", "a list", "no tree", "too many", "places beyond the nodes", "arrays of different lengths"],
)
def test_what_is_no_forest_ends_no_request(answer: object) -> None:
    class Wrong(PerfectDrafter):
        def propose_all(self, queries: DraftQueries) -> Any:
            return answer

    assert set(run_all(engine_with(Wrong())).values()) == {0}


@pytest.mark.parametrize("name", ["begin_step", "bound", "choose", "step_done", "are_asked", "skip", "end"])
def test_a_fault_of_the_policy_costs_a_step_its_drafts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    engine = engine_with(PerfectDrafter())
    policy = engine.core.drafts.policy
    right, calls = getattr(policy, name), []

    def failing(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise ZeroDivisionError
        return right(*arguments)

    monkeypatch.setattr(policy, name, failing)
    assert run_all(engine)["a"] >= drafted_alone() // 2
    assert faults_of(engine) == ({"draft policy": 1} if len(calls) >= 2 else {})


def test_a_scope_that_cannot_be_forgotten_is_said_to_be_so() -> None:
    """Whoever asked for it must know: what the scope's requests wrote may still be proposed."""

    class Keeping(PerfectDrafter):
        def clear_scope(self, scope: DraftScope) -> None:
            raise ZeroDivisionError

    engine = engine_with(Keeping())
    request = add(engine, "a", ANSWER)
    request.prefix_scope = DraftScope("default", "team")
    engine.core.step()
    with pytest.raises(EngineFaultError, match="'team'"):
        engine.core.clear_draft_scope(DraftScope("default", "team"))
    assert request.prefix_scope is None, "all else is forgotten"
    engine.run()
    assert engine.text("a") == ANSWER


def test_the_guard_takes_nothing_from_a_sound_drafter() -> None:
    """One call for all requests, and no more of them."""
    calls: list[tuple[str, ...]] = []

    class Noting(PerfectDrafter):
        def propose_all(self, queries: DraftQueries) -> DraftForest:
            calls.append(tuple(queries.request_ids))
            return super().propose_all(queries)

    run_all(engine_with(Noting()))
    assert set(calls) == {NAMES}


def test_draft_state_is_ended_where_a_start_fails_half_way() -> None:
    drafter: Drafter = FaultyDrafter("start")
    guarded = GuardedDrafter(drafter, drafting.ANY_TOKEN, Faults())
    assert not guarded.start(DraftRequest("bad", [1, 2]))
    assert drafter.lengths == {}  # type: ignore[attr-defined]


class _Meddling(PerfectDrafter):
    """Changes what it is asked, and then proposes more than that."""

    def propose_all(self, queries: Any) -> Any:
        forest = super().propose_all(queries)
        queries.bounds[:] = 10**6
        queries.request_ids.clear()
        return forest


class _Flat(PerfectDrafter):
    """Its fields are lists."""

    def propose_all(self, queries: Any) -> Any:
        forest = super().propose_all(queries)
        return forest._replace(token_ids=forest.token_ids.tolist())


def test_what_a_drafter_does_to_its_query_changes_nothing() -> None:
    assert run_all(engine_with(_Meddling()))["a"] == drafted_alone()


def test_fields_that_are_no_arrays_end_no_request() -> None:
    assert set(run_all(engine_with(_Flat())).values()) == {0}


def test_a_drafter_that_cannot_use_threads_drafts_on() -> None:
    engine = engine_with(PerfectDrafter())
    engine.drafter.use_threads = lambda team: 1 // 0  # type: ignore[method-assign]
    engine.core.drafts.use_threads(ONE_THREAD)
    assert run_all(engine)["a"] == drafted_alone()
    assert engine.core.metrics.reading().faults["drafter.use_threads"] == 1
