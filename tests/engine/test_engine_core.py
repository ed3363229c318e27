"""The step: what each one emits, when an answer ends and why, and that nothing is left behind. No model, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from batchserve.config import DRAFTERS
from batchserve.draft.base import DraftQuery, DraftTree
from batchserve.draft.kernels import KernelLoader
from batchserve.draft.router import RoutingDrafter
from batchserve.engine import answer_texts
from batchserve.errors import DeadlineExceededError, EngineFaultError
from batchserve.metrics import EngineMetrics
from batchserve.request import DraftScope
from batchserve.sampling.sampler import NO_TOKEN
from batchserve.sampling.verify import VerifiedTokens
from batchserve.types import FinishReason, SpeculationParams
from tests.engine.scripted import Letters, PerfectDrafter, ScriptedEngine, _Handle, add, scripted_engine

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
END = 2  # a special token


@pytest.fixture(params=[False, True], ids=["plain", "drafting"])
def engine(request: pytest.FixtureRequest) -> ScriptedEngine:
    return scripted_engine(is_drafting=request.param, decoding_length=8)


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 10, 11, 31])
def test_max_tokens_is_exact(engine: ScriptedEngine, max_tokens: int) -> None:
    add(engine, "a", "abcdefghij", max_tokens=max_tokens)
    engine.run()
    assert engine.text("a") == ("abcdefghij" + "." * 30)[:max_tokens]
    assert engine.reason("a") is LENGTH
    usage = engine.deltas("a")[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, max_tokens)


def test_load_is_told_while_requests_run_and_wait_and_when_they_are_gone() -> None:
    engine = scripted_engine(max_num_seqs=1, total_tokens=1024)
    for name in ("a", "b", "c"):
        add(engine, name, "text", max_tokens=5)
    engine.core.step()
    told = engine.core.metrics.snapshot()
    assert (told["requests_running"], told["requests_waiting"]) == (1, 2)
    assert 0 < told["kv_used_tokens"] < told["kv_total_tokens"] == 1024
    engine.run()
    told = engine.core.metrics.snapshot()
    assert (told["requests_running"], told["requests_waiting"], told["kv_used_tokens"]) == (0, 0, 0)


@pytest.mark.parametrize("length", range(12))
def test_an_end_token_ends_the_answer_wherever_it_falls_in_an_accepted_run(engine: ScriptedEngine, length: int) -> None:
    """It is neither shown nor counted, and what was accepted behind it is gone."""
    answer = "abcdefghijkl"[:length]
    add(engine, "a", answer + chr(END) + "behind", end_token_ids=frozenset({END}))
    engine.run()
    assert (engine.text("a"), engine.reason("a")) == (answer, STOP)
    assert engine.tokens("a") == [ord(c) for c in answer]
    assert engine.deltas("a")[-1].usage.completion_tokens == length  # type: ignore[union-attr]


@pytest.mark.parametrize("length", range(12))
def test_a_stop_string_ends_the_answer_wherever_it_falls_in_an_accepted_run(
    engine: ScriptedEngine, length: int
) -> None:
    answer = "abcdefghijkl"[:length]
    add(engine, "a", answer + "##" + "behind", stop=("##",))
    add(engine, "other", "0123456789", max_tokens=10)
    engine.run()
    assert (engine.text("a"), engine.reason("a")) == (answer, STOP)
    # Counted: the tokens that made the stop string; not counted or shared: what the surplus step gave.
    assert engine.tokens("a") == [ord(c) for c in answer + "##"]
    assert engine.deltas("a")[-1].usage.completion_tokens == length + 2  # type: ignore[union-attr]
    if engine.drafter is not None and engine.drafter.shared.get("a"):
        assert set(engine.drafter.shared["a"]) <= {ord(c) for c in answer + "##"}
    assert (engine.text("other"), engine.reason("other")) == ("0123456789", LENGTH)


@pytest.mark.faults
@pytest.mark.parametrize("end", ["##", chr(END), "#", ""], ids=["stop string", "end token", "a token's stop", "length"])
def test_accepted_drafts_are_at_most_the_answers_tokens(end: str) -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=8)
    for length in range(12):
        how = {"stop": (end,)} if end.startswith("#") else {"end_token_ids": frozenset({END})}
        answer = "abcdefghijkl"[:length] + end + "after the end"
        add(engine, str(length), answer, max_tokens=40 if end else max(1, length), **how)
    engine.run()
    for length in range(12):
        usage = engine.deltas(str(length))[-1].usage
        assert usage is not None
        assert usage.completion_tokens == len(engine.tokens(str(length)))
        assert 0 <= usage.accepted_draft_tokens <= min(usage.completion_tokens, usage.draft_tokens)


def test_a_stop_string_on_the_last_allowed_token_is_a_stop(engine: ScriptedEngine) -> None:
    add(engine, "a", "abc##", stop=("##",), max_tokens=5)
    add(engine, "b", "abc##", stop=("##",), max_tokens=4)
    engine.run()
    assert (engine.text("a"), engine.reason("a")) == ("abc", STOP)
    assert (engine.text("b"), engine.reason("b")) == ("abc#", LENGTH)


def test_one_delta_carries_all_tokens_of_one_verified_step() -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    add(engine, "a", "abcdefghijklmno", max_tokens=12)
    engine.run()
    # The prompt's step gives one token; then 4 accepted drafts and the bonus token, as far as max_tokens goes.
    assert [delta.text for delta in engine.deltas("a")] == ["a", "bcdef", "ghijk", "l"]
    usage = engine.deltas("a")[-1].usage
    assert usage is not None
    assert usage.accepted_draft_tokens == usage.draft_tokens == 8  # the last place is the bonus token's: never drafted


def test_a_cap_on_draft_tokens_and_speculation_off_are_honoured_per_request() -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    add(engine, "off", "abcdefghij", max_tokens=10, speculation=SpeculationParams(is_enabled=False))
    add(engine, "two", "abcdefghij", max_tokens=10, speculation=SpeculationParams(max_draft_tokens=2))
    engine.run()
    assert [len(d.token_ids) for d in engine.deltas("off")] == [1] * 10
    assert [len(d.token_ids) for d in engine.deltas("two")] == [1, 3, 3, 3]
    assert engine.deltas("off")[-1].usage.draft_tokens == 0  # type: ignore[union-attr]


def test_caps_on_branches_are_honoured_per_request() -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=4, branch_length=3)
    add(engine, "server's", "abcdefghij", max_tokens=10)
    add(engine, "one", "abcdefghij", max_tokens=10, speculation=SpeculationParams(branch_length=1))
    engine.run()
    assert [len(d.token_ids) for d in engine.deltas("server's")] == [1, 4, 4, 1]
    assert [len(d.token_ids) for d in engine.deltas("one")] == [1, 2, 2, 2, 2, 1]


def test_a_drafter_is_told_all_that_the_request_says_of_drafts() -> None:
    engine = scripted_engine(is_drafting=True, default_draft_scope="team")
    references = [(1, 2), (3,)]
    add(engine, "a", "abc", speculation=SpeculationParams(drafter="jacobi", references=references), temperature=0.5)
    add(engine, "b", "abc", speculation=SpeculationParams(draft_scope="mine"), seed=7)
    add(engine, "c", "abc", speculation=SpeculationParams(draft_scope="request"))
    engine.run()
    assert engine.drafter is not None
    a, b, c = (engine.drafter.started[name] for name in "abc")
    assert [list(reference) for reference in a.references] == [[1, 2], [3]]
    assert (a.drafter, a.scope, a.temperature) == ("jacobi", DraftScope("default", "team"), 0.5)
    assert (b.drafter, b.scope, b.seed) == (engine.config.drafter, DraftScope("default", "mine"), 7)
    assert c.scope is None


def test_a_request_whose_drafter_is_not_ready_decodes_without_drafts_until_it_is() -> None:
    """And is drafted then as if it had been from the start: nothing of its answer is missing."""
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    drafter = engine.drafter
    assert drafter is not None
    drafter.unready = {"jacobi"}
    slow, quick = SpeculationParams(drafter="jacobi"), SpeculationParams(drafter="trie")
    add(engine, "slow", "abcdefghijklmnop", max_tokens=16, speculation=slow)
    add(engine, "quick", "abcdefghijklmnop", max_tokens=16, speculation=quick)
    for _ in range(4):
        engine.step()
    assert set(drafter.started) == {"quick"}
    drafter.unready = set()
    engine.run()
    assert [len(d.token_ids) for d in engine.deltas("slow")] == [1, 1, 1, 1, 5, 5, 2]
    assert [len(d.token_ids) for d in engine.deltas("quick")] == [1, 5, 5, 5]
    for name in ("slow", "quick"):
        assert engine.text(name) == "abcdefghijklmnop"
    assert bytes(drafter.shared["slow"]).decode() == "abcdefghijklmnop"


def test_what_a_request_was_given_before_its_scope_was_cleared_is_not_shared_when_its_drafter_gets_ready() -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    drafter = engine.drafter
    assert drafter is not None
    drafter.unready = {"jacobi"}
    for name, scope in (("a", "team"), ("b", "other")):
        speculation = SpeculationParams(drafter="jacobi", draft_scope=scope)
        add(engine, name, "abcdefghijklmnop", max_tokens=16, speculation=speculation)
    for _ in range(4):
        engine.step()
    assert engine.text("a") == "abc"
    engine.core.clear_draft_scope(DraftScope("default", "team"))
    drafter.unready = set()
    engine.run()
    assert bytes(drafter.shared["a"]).decode() == "defghijklmnop"
    assert bytes(drafter.shared["b"]).decode() == "abcdefghijklmnop"
    assert engine.text("a") == "abcdefghijklmnop"


def test_a_request_that_ends_before_its_drafter_is_ready_leaves_nothing_behind() -> None:
    engine = scripted_engine(is_drafting=True)
    assert engine.drafter is not None
    engine.drafter.unready = {engine.config.drafter}
    add(engine, "a", "abcdef", max_tokens=6)
    engine.run()
    assert engine.text("a") == "abcdef"
    assert not engine.drafter.started


def test_a_drafter_that_is_ready_late_hears_in_one_piece_what_was_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine(is_drafting=True)
    drafter, caught_up = engine.drafter, []
    assert drafter is not None

    def catch_up(token_ids: Mapping[str, Sequence[int]]) -> None:
        caught_up.append({name: len(tokens) for name, tokens in token_ids.items()})
        drafter.accept_all(token_ids)

    monkeypatch.setattr(drafter, "catch_up", catch_up)
    drafter.unready = {engine.config.drafter}
    add(engine, "a", "abcdefghij" * 4, max_tokens=40)
    for _ in range(20):
        engine.core.step()
    drafter.unready = set()
    engine.run()
    assert engine.text("a") == "abcdefghij" * 4
    assert caught_up == [{"a": 20}]


def test_different_drafters_in_one_batch_each_draft_their_own_requests() -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    drafters = {name: PerfectDrafter() for name in DRAFTERS}
    for drafter in drafters.values():
        drafter.runner = engine.runner
    engine.core.drafts.drafter = RoutingDrafter("trie", drafters, KernelLoader(in_background=False))
    for name in DRAFTERS:
        add(engine, name, name * 5, max_tokens=20, speculation=SpeculationParams(drafter=name))
    engine.run()
    for name, drafter in drafters.items():
        assert engine.text(name) == (name * 5 + "." * 20)[:20]
        assert list(drafter.started) == ([name] if name != "none" else [])
        assert not drafter.lengths
        steps = 1 + 4 if name != "none" else 20  # the prompt's, and then five tokens a step
        assert len(engine.deltas(name)) == steps


def test_clearing_a_scope_reaches_the_drafter_under_the_one_tenant_that_there_is() -> None:
    engine = scripted_engine(is_drafting=True)
    engine.core.clear_draft_scope(DraftScope("default", "team"))
    assert engine.drafter is not None
    assert engine.drafter.cleared == [DraftScope("default", "team")]


def test_events_of_a_step_are_published_while_the_next_one_runs() -> None:
    """One call of emit a step, behind the launch of the following step."""
    engine = scripted_engine()
    add(engine, "a", "abc", max_tokens=3)
    add(engine, "b", "xyz", max_tokens=3)
    launched = []
    engine.core.emit = lambda events: launched.append(
        (len(engine.runner.batches), [(request.request_id, event.token_ids) for request, event in events])  # type: ignore[union-attr]
    )
    engine.run()
    assert [steps for steps, _ in launched] == [2, 3, 3]  # the last has no step to hide behind
    assert launched[0][1] == [("a", [ord("a")]), ("b", [ord("x")])]


def test_requests_join_and_leave_between_any_two_steps(engine: ScriptedEngine) -> None:
    long = add(engine, "long", "abcdefghijklmnopqrstuvwxyz" * 4, max_tokens=104)
    for i in range(12):
        joined = add(engine, f"r{i}", "0123456789", max_tokens=10)
        engine.step()
        if i % 3 == 0:
            engine.core.abort(joined)
    engine.run()
    assert engine.text("long") == "abcdefghijklmnopqrstuvwxyz" * 4
    assert long.is_finished
    for i in range(12):
        assert engine.text(f"r{i}") == "0123456789"[: len(engine.tokens(f"r{i}"))]
        assert (engine.deltas(f"r{i}") != [] and engine.reason(f"r{i}") is LENGTH) or i % 3 == 0


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_says_nothing_more_and_frees_everything_at_once(engine: ScriptedEngine, num_steps: int) -> None:
    request = add(engine, "a", "abcdefghijklmnopqrstuvwxyz" * 3, max_tokens=78)
    for _ in range(num_steps):
        engine.step()
    said = len(engine.deltas("a"))
    engine.core.abort(request)
    engine.core.abort(request)  # harmless
    allocator = engine.core.executor.allocator
    assert allocator.free_tokens == allocator.total_tokens
    engine.run()
    assert len(engine.deltas("a")) == said
    add(engine, "a", "again", max_tokens=5)  # the id is free
    engine.core.abort(request)  # and an abort of its former owner does nothing to the new one
    engine.run()
    assert engine.text("a").endswith("again")


def test_a_deadline_ends_a_request_queued_or_running_with_one_error() -> None:
    engine = scripted_engine(max_num_seqs=1)
    add(engine, "running", "abcdef", deadline_s=3.0)
    add(engine, "queued", "abcdef", deadline_s=2.0)
    add(engine, "patient", "abcdef", max_tokens=6)
    for second in range(1, 5):
        engine.step()
        engine.now_s = float(second)
    engine.run()
    for name, status in (("running", "running"), ("queued", "waiting")):
        (failure,) = engine.failures(name)
        assert isinstance(failure, DeadlineExceededError)
        assert f"while {status}, after" in str(failure)
    assert engine.deltas("queued") == []
    assert len(engine.tokens("running")) < 6
    assert engine.text("patient") == "abcdef"


def test_a_deadline_after_the_last_token_was_made_does_not_spoil_the_answer() -> None:
    engine = scripted_engine()
    add(engine, "a", "x", max_tokens=1, deadline_s=5.0)
    engine.step()
    engine.now_s = 10.0
    engine.run()
    assert (engine.text("a"), engine.failures("a")) == ("x", [])


@pytest.mark.parametrize(("stop", "text", "num_failures"), [(("lo",), "hel", 0), ((), "hello", 1)])
def test_what_came_before_a_deadline_is_given(stop: tuple[str, ...], text: str, num_failures: int) -> None:
    """The fifth token comes in the last step that begins in time; with it the stop string is complete."""
    engine = scripted_engine()
    add(engine, "a", "hello world", stop=stop, max_tokens=11, deadline_s=0.45)
    while engine.core.has_work:
        engine.step()
        engine.now_s += 0.1
    assert engine.text("a") == text
    assert len(engine.tokens("a")) == 5
    assert len(engine.failures("a")) == num_failures


def test_preemption_changes_nothing_but_the_time(engine: ScriptedEngine) -> None:
    """Memory for 128 tokens, and two that need 110 each."""
    small = scripted_engine(is_drafting=engine.drafter is not None, total_tokens=128)
    answer = "abcdefghijklmnopqrstuvwxyz" * 3
    requests = [add(small, name, answer, prompt="p" * 40, max_tokens=70) for name in ("a", "b")]
    small.run()
    assert [r.num_preemptions for r in requests] == [0, 1]
    for name in ("a", "b"):
        assert small.text(name) == answer[:70]
    assert small.core.metrics.snapshot()["preemptions_total"] == 1


def test_nobody_is_preempted_for_what_wrong_guesses_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three extents, and two requests that need one and two; the first guesses more than a whole one, in vain."""

    def wrong(self: PerfectDrafter, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        trees = [range(1, 1 + query.max_tokens) for query in queries]
        return [DraftTree([*tokens], [-1] * len(tokens), [1.0] * len(tokens)) for tokens in trees]

    monkeypatch.setattr(PerfectDrafter, "propose", wrong)
    engine = scripted_engine(is_drafting=True, total_tokens=192, decoding_length=48, prefix_cache=False)
    first = add(engine, "a", "x" * 100, prompt="p" * 20, max_tokens=44)
    other = add(engine, "b", "y" * 100, prompt="q" * 31, max_tokens=60)
    engine.run()
    assert first.num_draft_tokens > 100
    assert (first.num_preemptions, other.num_preemptions) == (0, 0)
    assert (engine.text("a"), engine.text("b")) == ("x" * 44, "y" * 60)


def test_stop_found_in_the_very_step_that_preempts_the_request() -> None:
    """The stop string is in the text of the step before; the request has lost its memory by then."""
    for length in range(10, 30):  # one of these ends just as the memory runs out
        engine = scripted_engine(total_tokens=128)
        add(engine, "old", "x" * 100, prompt="p" * 50, max_tokens=60)
        add(engine, "new", "y" * length + "##", prompt="p" * 50, max_tokens=60, stop=("##",))
        engine.run()
        assert (engine.text("new"), engine.reason("new")) == ("y" * length, STOP)
        assert engine.text("old") == "x" * 60


@pytest.mark.parametrize("fail_at", range(4))
def test_after_a_failed_step_everyone_can_be_ended_and_the_core_goes_on(engine: ScriptedEngine, fail_at: int) -> None:
    requests = [add(engine, name, "abcdefghijklmnopqrstuvwxyz" * 2, max_tokens=50) for name in ("a", "b")]
    for _ in range(fail_at):
        engine.step()
    engine.runner.error = RuntimeError("out of order")
    with pytest.raises(RuntimeError, match="out of order"):
        engine.core.step()
    assert engine.core.abort_all() == requests
    engine.assert_clean()
    add(engine, "a", "hello", max_tokens=5)
    engine.run()
    assert engine.text("a").endswith("hello")


def test_an_id_in_flight_is_refused() -> None:
    engine = scripted_engine()
    add(engine, "a", "abc")
    with pytest.raises(RuntimeError, match="in flight"):
        add(engine, "a", "abc")


@pytest.mark.faults
def test_a_drafter_that_breaks_its_contract_is_not_asked_any_more() -> None:
    engine = scripted_engine(is_drafting=True)
    add(engine, "a", "abcdef")
    engine.step()
    assert engine.drafter is not None
    right = engine.drafter.propose

    def too_long(queries):  # type: ignore[no-untyped-def]
        trees = right(queries)
        for tree in trees:
            for _ in range(20):
                tree.add(5, len(tree) - 1)
        return trees

    engine.drafter.propose = too_long  # type: ignore[method-assign]
    engine.run()
    assert engine.text("a") == ("abcdef" + "." * 40)[:40]
    assert engine.deltas("a")[-1].usage.draft_tokens == 0  # type: ignore[union-attr]
    assert engine.core.metrics.reading().faults == {"drafter.propose_all": 1}


class _Torn(Letters):
    """Cannot decode one letter."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        if ord("!") in token_ids:
            raise ZeroDivisionError("secret")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.faults
@pytest.mark.parametrize("place", [0, 3, 6, 7])
@pytest.mark.parametrize("options", [{}, {"stop": ("##",)}], ids=["text", "stop strings"])
@pytest.mark.parametrize("is_drafting", [False, True])
def test_a_text_that_cannot_be_made_ends_its_request_alone(
    is_drafting: bool, options: dict[str, Any], place: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = scripted_engine(is_drafting=is_drafting, decoder=_Torn())
    answer = "abcdefgh"
    add(engine, "bad", answer[:place] + "!" + answer[place:], max_tokens=8, **options)
    add(engine, "good", "0123456789", max_tokens=10, **options)
    engine.run()
    (failure,) = engine.failures("bad")
    assert isinstance(failure, EngineFaultError)
    assert "'bad'" in str(failure)
    assert "secret" not in str(failure)
    assert answer.startswith(engine.text("bad"))
    assert (engine.text("good"), engine.reason("good")) == ("0123456789", LENGTH)
    reading = engine.core.metrics.reading()
    assert reading.faults == {"detokenizer": 1}
    assert reading.values["requests_failed_total"] == reading.values["requests_finished_total"] == 1
    assert [record.exc_info is not None for record in caplog.records] == [True]
    engine.events.clear()
    add(engine, "bad", "again", max_tokens=5)
    engine.run()
    assert engine.text("bad") == "again"


@pytest.mark.faults
def test_a_request_whose_detokenizer_cannot_be_made_ends_at_once_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine()
    add(engine, "good", "0123456789", max_tokens=10)
    with monkeypatch.context() as patch:
        patch.setattr(answer_texts, "IncrementalDetokenizer", lambda *arguments: 1 // 0)
        add(engine, "bad", "abc")
    assert [type(each) for each in engine.failures("bad")] == [EngineFaultError]
    engine.run()
    assert engine.text("good") == "0123456789"
    add(engine, "bad", "abc", max_tokens=3)
    engine.run()
    assert engine.text("bad") == "abc"


@pytest.mark.faults
@pytest.mark.parametrize("name", ["step_done", "begun", "preempted", "given", "finished", "unfinished"])
def test_a_metric_that_cannot_be_counted_ends_nobody(
    monkeypatch: pytest.MonkeyPatch, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*arguments: Any, **more: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(EngineMetrics, name, failing)
    engine = scripted_engine(is_drafting=True)
    add(engine, "a", "abcdefghij", max_tokens=10)
    add(engine, "late", "abcdefghij", max_tokens=10, deadline_s=-1.0)
    engine.run()
    assert (engine.text("a"), engine.reason("a")) == ("abcdefghij", LENGTH)
    assert engine.core.metrics.reading().faults["metrics"] >= 1
    assert len([record for record in caplog.records if record.exc_info]) == 1, "logged once"


@pytest.mark.faults
@pytest.mark.parametrize("name", ["load", "adaptive", "acceptance", "draft_faults"])
def test_figures_that_cannot_be_told_leave_the_others_as_they_are(name: str) -> None:
    engine = scripted_engine(is_drafting=True)
    add(engine, "a", "abcdefghij", max_tokens=10)
    engine.run()
    setattr(engine.core.metrics, name, lambda: 1 // 0)
    reading = engine.core.metrics.reading()
    assert reading.values["requests_finished_total"] == 1
    assert reading.faults == {"metrics": 1}


@pytest.mark.faults
def test_drafts_are_tried_again_behind_numbers_that_were_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 8 tokens without drafts, then 16, then 32; and never again where they are always the reason."""
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    steps: list[tuple[int, int]] = []  # the tokens that the request had, and how many drafts its step had

    def spoilt(handle: _Handle, index: int) -> VerifiedTokens:
        rows = handle.batch.requests[index]
        steps.append((rows.context_len + rows.num_pending - len("prompt"), rows.num_draft_tokens))
        if rows.num_draft_tokens:
            return VerifiedTokens([NO_TOKEN], [])
        return right(handle, index)

    right = _Handle._walk
    monkeypatch.setattr(_Handle, "_walk", spoilt)
    add(engine, "a", "abcdefghij" * 10, max_tokens=100)
    engine.run()
    assert engine.text("a") == "abcdefghij" * 10
    assert [length for length, drafts in steps if drafts] == [1, 9, 25, 57]
    assert engine.core.metrics.snapshot()["draft_pauses_total"] == 4


@pytest.mark.faults
def test_one_step_of_numbers_that_are_not_finite_costs_few_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    right, spoilt = _Handle._walk, []

    def once(handle: _Handle, index: int) -> VerifiedTokens:
        if handle.batch.requests[index].num_draft_tokens and not spoilt:
            spoilt.append(None)
            return VerifiedTokens([NO_TOKEN], [])
        return right(handle, index)

    monkeypatch.setattr(_Handle, "_walk", once)
    add(engine, "a", "abcdefghij" * 10, max_tokens=100)
    engine.run()
    assert engine.text("a") == "abcdefghij" * 10
    assert [len(delta.token_ids) for delta in engine.deltas("a")][:12] == [1] * 9 + [5] * 3


def test_metrics_agree_with_what_was_given() -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    add(engine, "a", "abcdefghij", max_tokens=10)
    add(engine, "b", "abcde##", stop=("##",))
    engine.run()
    values = engine.core.metrics.snapshot()
    last = [engine.deltas(name)[-1].usage for name in ("a", "b")]
    assert values["requests_finished_total"] == 2
    assert values["completion_tokens_total"] == sum(u.completion_tokens for u in last if u) == 17
    assert values["prompt_tokens_total"] == 12
    assert values["accepted_draft_tokens_total"] <= values["draft_tokens_total"]
    assert values["steps_total"] == len(engine.runner.batches)
    batches = engine.runner.batches
    assert values["rows_total"] == sum(batch.num_rows for batch in batches)
    decoding = [rows for batch in batches for rows in batch.requests if rows.context_len]
    # b was stopped while its last step was under way, which is neither in K's rows nor in its requests.
    assert values["decoding_requests_total"] == len(decoding) - 1
    drafted = sum(rows.num_draft_tokens for rows in decoding)
    assert drafted > values["draft_rows_total"] == sum(u.draft_tokens for u in last if u) > 0


def test_metrics_know_of_those_who_do_not_finish() -> None:
    """Their first token and what they were given counts, and so does how they ended."""
    engine = scripted_engine(max_num_seqs=2)
    add(engine, "late", "abcdef", deadline_s=3.0)
    gone = add(engine, "gone", "abcdef")
    add(engine, "never", "abcdef", deadline_s=2.0)
    engine.now_s = 1.0
    for _ in range(2):
        engine.step()
        engine.now_s += 1.0
    engine.core.abort(gone)
    engine.core.abort(gone)
    engine.run()
    values = engine.core.metrics.snapshot()
    ended = {name: values[f"requests_{name}_total"] for name in ("finished", "aborted", "expired", "failed")}
    assert ended == {"finished": 0, "aborted": 1, "expired": 2, "failed": 0}
    assert values["completion_tokens_total"] == len(engine.tokens("late")) + len(engine.tokens("gone")) == 3
    assert values["prompt_tokens_total"] == 12, "of those that were begun"
    first = engine.core.metrics.reading().histograms["time_to_first_token_seconds"]
    assert (sum(first.counts), first.total) == (2, 2.0)


@pytest.mark.parametrize("answer", ["ab", "abcdefghij", ""])
def test_an_end_token_in_a_step_of_its_own_takes_no_part_in_times(answer: str) -> None:
    engine = scripted_engine()
    launch = engine.runner.launch

    def timed_launch(batch: Any) -> Any:
        engine.now_s += 0.01
        return launch(batch)

    engine.runner.launch = timed_launch  # type: ignore[method-assign]
    add(engine, "a", answer + chr(END), end_token_ids=frozenset({END}))
    engine.run()
    timing = engine.deltas("a")[-1].timing
    assert timing is not None
    assert timing.tpot_s(len(answer)) == (pytest.approx(0.01) if answer else None)
    histograms = engine.core.metrics.reading().histograms
    assert histograms["inter_token_latency_seconds"].total == pytest.approx(0.01 * max(0, len(answer) - 1))
    assert sum(histograms["time_to_first_token_seconds"].counts) == bool(answer)
    assert timing.total_s == pytest.approx(0.01 * max(1, len(answer)))


@pytest.mark.parametrize("is_in_time", [True, False])
def test_what_is_given_at_the_end_is_neither_shared_nor_counted_before(is_in_time: bool) -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    assert engine.drafter is not None
    request = add(engine, "a", "abcdefghijklmnop", max_tokens=16, deadline_s=1.0, is_whole=True)
    for _ in range(3):
        engine.step()
    assert request.num_output_tokens > 0
    assert engine.deltas("a") == [] == engine.drafter.shared["a"]
    assert engine.core.metrics.snapshot()["completion_tokens_total"] == 0
    engine.now_s = 0.5 if is_in_time else 1.5
    engine.run()
    given = [ord(c) for c in "abcdefghijklmnop"] if is_in_time else []
    assert engine.drafter.shared["a"] == given
    assert engine.core.metrics.snapshot()["completion_tokens_total"] == len(given)


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_one_callers_answers_are_drafted_from_before_they_are_given(stop: tuple[str, ...]) -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    assert engine.drafter is not None
    options = {"is_whole": True, "is_sharing_early": True, "stop": stop}
    request = add(engine, "a", "abcdefghijklmnop", max_tokens=16, **options)
    for _ in range(3):
        engine.step()
    shared = len(engine.drafter.shared["a"])
    assert 0 < shared <= request.num_output_tokens
    assert engine.core.metrics.snapshot()["completion_tokens_total"] >= shared
    assert engine.deltas("a") == []
    engine.run()
    assert bytes(engine.drafter.shared["a"]).decode() == engine.text("a") == "abcdefghijklmnop"
    assert len(engine.deltas("a")) == 1
    assert engine.core.metrics.snapshot()["completion_tokens_total"] == 16


def test_a_request_that_its_front_takes_back_at_its_deadline_has_expired() -> None:
    engine = scripted_engine()
    late = add(engine, "late", "abcdef", deadline_s=2.0)
    early = add(engine, "early", "abcdef", deadline_s=9.0)
    engine.step()
    engine.now_s = 1.99
    engine.core.abort(late)
    engine.core.abort(early)
    values = engine.core.metrics.snapshot()
    assert (values["requests_expired_total"], values["requests_aborted_total"]) == (1, 1)


def test_a_drafter_hears_of_a_short_answers_last_tokens_too() -> None:
    engine = scripted_engine(is_drafting=True, decoding_length=4)
    assert engine.drafter is not None
    heard = []
    engine.drafter.accept = lambda request_id, token_ids: heard.extend(token_ids)  # type: ignore[method-assign]
    engine.drafter.propose = lambda queries: [DraftTree() for _ in queries]  # type: ignore[method-assign]
    add(engine, "a", "abcdef", max_tokens=6)
    engine.run()
    assert heard == [ord(c) for c in "abcdef"]
