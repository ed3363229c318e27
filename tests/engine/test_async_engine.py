"""Streams in front of the engine thread: their shape, every way to end them, and nothing left behind after each."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchserve.config import DraftConfig, EngineConfig
from batchserve.draft.base import NullDrafter
from batchserve.draft.kernels import KernelLoader
from batchserve.draft.router import RoutingDrafter
from batchserve.engine import async_engine, engine_loop
from batchserve.engine.arguments import INLINE_SIZE
from batchserve.engine.async_engine import AsyncEngine
from batchserve.errors import (
    BatchserveError,
    DeadlineExceededError,
    DuplicateRequestError,
    EngineFaultError,
    InvalidRequestError,
    QueueFullError,
    UnavailableError,
    UnknownModelError,
)
from batchserve.request import DraftScope, Request
from batchserve.startup.build import BuiltEngine, build_engine
from batchserve.types import (
    CallOptions,
    Delta,
    FinishReason,
    GenerateCall,
    SamplingParams,
    SpeculationParams,
    Started,
)

PROMPT = [5, 9, 17, 5, 9]
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CONFIG = EngineConfig(dtype="float32", max_num_seqs=4, max_waiting=8, kv_cache_memory=4 << 20)


class StepGate:
    """Lets the engine's steps through one by one, so that a test knows where the engine is; open by default."""

    def __init__(self, step: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._right, self._loop = step, loop
        self._permits = threading.Semaphore(0)
        self._is_open = threading.Event()
        self._is_open.set()
        self._arrivals = asyncio.Queue[None]()

    def __call__(self) -> None:
        if not self._is_open.is_set():
            self._loop.call_soon_threadsafe(self._arrivals.put_nowait, None)
            self._permits.acquire()
        self._right()

    def close(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()
        self._permits.release(1000)

    async def arrival(self) -> None:
        """Until the engine stands before a step."""
        await self._arrivals.get()

    def let_one_through(self) -> None:
        self._permits.release()


@dataclass
class Rig:
    """An engine under test, the gate before its steps, and what it had to throw away when it was shut down."""

    engine: AsyncEngine
    built: BuiltEngine
    gate: StepGate
    leftovers: list[Request] = field(default_factory=list)

    def stream(self, request_id: str = "", params: SamplingParams = LONG, **options: Any) -> Any:
        return aclosing(self.engine.stream(PROMPT, params, request_id=request_id, **options))

    async def finishes(self) -> None:
        """A request of the usual kind still gets its whole answer."""
        output = await self.engine.generate(PROMPT, SHORT)
        assert len(output.token_ids) == 6


@pytest.fixture(scope="module")
def built(tiny_model: dict[str, Path]) -> BuiltEngine:
    """One core for all tests: each must leave it as clean as it found it."""
    return build_engine(EngineConfig(**{**_options(CONFIG), "model": str(tiny_model["llama"])}))


def _options(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__}


@pytest.fixture
async def rig(built: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    core = built.core
    gate = StepGate(core.step, asyncio.get_running_loop())
    monkeypatch.setattr(core, "step", gate)
    rig = Rig(AsyncEngine(built, CONFIG), built, gate)
    yield rig
    gate.open()
    # The inbox is in order: every abort that a test caused comes before the end, so nothing may be left by then.
    right = core.abort_all
    monkeypatch.setattr(core, "abort_all", lambda: rig.leftovers.extend(right()) or rig.leftovers)
    await rig.engine.shutdown()
    assert rig.engine.num_in_flight == 0
    assert rig.leftovers == []
    assert_clean(built)


def assert_clean(built: BuiltEngine) -> None:
    core, allocator = built.core, built.core.executor.allocator
    core.check_integrity()
    assert not core.has_work
    assert not [*core._texts]
    assert allocator.free_tokens == allocator.total_tokens
    assert isinstance(core.drafter, RoutingDrafter)
    assert not core.drafter._chosen


async def collect(rig: Rig, request_id: str = "", params: SamplingParams = SHORT, **options: Any) -> list[Any]:
    async with rig.stream(request_id, params, **options) as events:
        return [event async for event in events]


async def test_a_stream_is_started_then_deltas_then_one_end(rig: Rig) -> None:
    events = await collect(rig, "a")
    assert events[0] == Started("a", len(PROMPT), list(PROMPT))
    deltas = events[1:]
    assert all(isinstance(event, Delta) and event.request_id == "a" for event in deltas)
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert all(d.usage is None and d.timing is None for d in deltas[:-1])
    last = deltas[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert sum(len(d.token_ids) for d in deltas) == last.usage.completion_tokens == 6
    assert last.usage.prompt_tokens == len(PROMPT)
    assert last.usage.accepted_draft_tokens <= last.usage.draft_tokens
    assert 0 <= last.timing.queue_s <= last.timing.first_token_s <= last.timing.total_s


async def test_generate_is_the_stream_put_together(rig: Rig) -> None:
    events = await collect(rig, "a")
    output = await rig.engine.generate(PROMPT, SHORT, request_id="a")
    assert output.token_ids == [token for event in events[1:] for token in event.token_ids]
    assert (output.request_id, output.prompt_token_ids) == ("a", PROMPT)


async def test_many_at_once_get_the_answers_that_each_gets_alone(rig: Rig) -> None:
    prompts = [[3 + i, 40 + i, 7, 3 + i] for i in range(10)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=5 + 3 * i, ignore_eos=True) for i in range(10)]
    alone = [await rig.engine.generate(p, q) for p, q in zip(prompts, params, strict=True)]
    together = await asyncio.gather(*(rig.engine.generate(p, q) for p, q in zip(prompts, params, strict=True)))
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


async def test_of_those_that_wait_the_higher_priority_is_let_in_first(rig: Rig) -> None:
    rig.gate.close()
    ended: list[str] = []

    async def one(name: str, priority: int) -> None:
        await rig.engine.generate(PROMPT, SHORT, request_id=name, priority=priority)
        ended.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(one("first", -1000))
        await rig.gate.arrival()  # it is alone, and takes one of four seats
        for i, priority in enumerate((0, -5, 0, 1000, 7, -5)):
            group.create_task(one(f"{i}: {priority}", priority))
        await asyncio.sleep(0)
        rig.gate.open()
    assert ended[0] == "first"
    assert sorted(ended[1:4]) == ["0: 0", "3: 1000", "4: 7"]
    assert ended[4] == "2: 0"


async def test_an_id_in_flight_is_refused_and_the_first_owner_unharmed(rig: Rig) -> None:
    async with rig.stream("a", SHORT) as events:
        await anext(events)
        with pytest.raises(DuplicateRequestError, match="'a'"):
            await collect(rig, "a")
        rest = [event async for event in events]
    assert rest[-1].finish_reason is FinishReason.LENGTH


async def test_an_id_is_free_again_as_soon_as_the_last_event_is_there(rig: Rig) -> None:
    for _ in range(20):
        async with rig.stream("a", SHORT) as events:
            async for event in events:
                if isinstance(event, Delta) and event.finish_reason is not None:
                    assert len(await collect(rig, "a")) > 1  # before the first stream is even closed


async def test_a_full_queue_refuses_and_takes_again_when_there_is_room(rig: Rig) -> None:
    rig.gate.close()
    places = CONFIG.max_num_seqs + CONFIG.max_waiting
    streams = [rig.engine.stream(PROMPT, SHORT, request_id=f"r{i}") for i in range(places)]
    for stream in streams:
        assert isinstance(await anext(stream), Started)
    with pytest.raises(QueueFullError, match=rf"requests in flight = {places}: .* max_waiting = 8 ") as caught:
        await collect(rig)
    assert caught.value.retry_after_s > 0
    await streams.pop().aclose()
    streams.append(rig.engine.stream(PROMPT, SHORT))
    await anext(streams[-1])
    rig.gate.open()
    for stream in streams:
        assert [event async for event in stream][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"params": SamplingParams(max_tokens=5000)}, InvalidRequestError),
        ({"model": "gpt-9"}, UnknownModelError),
        ({"request_id": "x" * 1000}, InvalidRequestError),
        ({"deadline_s": 0.0}, DeadlineExceededError),
        ({"deadline_s": -5.0}, DeadlineExceededError),
        ({"deadline_s": "5"}, InvalidRequestError),
        ({"deadline_s": 10**400}, InvalidRequestError),
        ({"deadline_s": float("nan")}, InvalidRequestError),
        ({"deadline_s": True}, InvalidRequestError),
        ({"prompt": np.array(5)}, InvalidRequestError),
        ({"params": {}}, InvalidRequestError),
        ({"params": 0}, InvalidRequestError),
        ({"speculation": []}, InvalidRequestError),
        ({"priority": 1001}, InvalidRequestError),
        ({"priority": "high"}, InvalidRequestError),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_a_bad_request_is_refused_before_started_and_harms_nobody(
    rig: Rig, options: dict[str, Any], error: type[BatchserveError]
) -> None:
    async with rig.stream("good", SHORT) as events:
        await anext(events)
        bad = rig.engine.stream(**{"prompt": PROMPT, "params": SHORT, "request_id": "bad", **options})
        with pytest.raises(error):
            await anext(bad)
        assert rig.engine.num_in_flight == 1
        assert [event async for event in events][-1].finish_reason is FinishReason.LENGTH
    assert len(await collect(rig, "bad")) > 1  # the id was given back


@pytest.mark.faults
async def test_an_error_names_the_argument_that_the_caller_has(rig: Rig) -> None:
    bad: dict[str, Any] = {
        "prompt": [5, -1],
        "params": {},
        "request_id": 7,
        "model": "gpt-9",
        "speculation": {},
        "deadline_s": "soon",
        "priority": 1001,
        "tenant": "a/b",
    }
    assert [field.name for field in dataclasses.fields(GenerateCall)] == [*bad]
    assert set(CallOptions.__annotations__) == {*bad} - {"prompt", "params"}
    for name, value in bad.items():
        with pytest.raises((InvalidRequestError, UnknownModelError), match=rf"^{name}(\[1\])? = "):
            await anext(rig.engine.stream(**{"prompt": PROMPT, name: value}))
    for params, name in ((SamplingParams(max_tokens=5000), "max_tokens"), (SamplingParams(top_k=10**6), "top_k")):
        with pytest.raises(InvalidRequestError, match=rf"^{name} = "):
            await rig.engine.generate(PROMPT, params)
    with pytest.raises(InvalidRequestError, match=r"^draft_scope = 7"):
        await rig.engine.clear_draft_scope(draft_scope=7)  # type: ignore[arg-type]


@pytest.mark.faults
async def test_an_engine_whose_start_is_given_up_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate, killed = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        def __init__(self, *arguments: object, **options: object) -> None:
            begun.set()
            gate.wait(60)

        def kill(self) -> None:
            killed.set()

    monkeypatch.setattr(async_engine, "EngineProcess", Slow)
    start = asyncio.create_task(AsyncEngine.start(CONFIG, own_process=True))
    assert await asyncio.to_thread(begun.wait, 60)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    gate.set()
    assert await asyncio.to_thread(killed.wait, 60)


async def test_on_another_loop_it_is_refused_instead_of_waited_for_in_vain(rig: Rig) -> None:
    async def ask() -> None:
        await rig.engine.generate(PROMPT, SHORT)

    for call in (ask, rig.engine.clear_draft_scope):
        with pytest.raises(RuntimeError, match="belongs to the asyncio loop that it was started on"):
            await asyncio.to_thread(asyncio.run, call())
    assert rig.engine.num_in_flight == 0
    await rig.finishes()


async def test_a_stream_that_was_never_begun_takes_no_place(rig: Rig) -> None:
    stream = rig.engine.stream(PROMPT, LONG, request_id="a")
    await stream.aclose()
    assert rig.engine.num_in_flight == 0
    assert len(await collect(rig, "a")) > 1


@pytest.mark.parametrize("num_events", [1, 2, 3, 10])
async def test_closing_a_stream_at_any_event_gives_everything_back(rig: Rig, num_events: int) -> None:
    async with rig.stream("a") as events:
        for _ in range(num_events):
            await anext(events)
    assert rig.engine.num_in_flight == 0
    await rig.finishes()


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
async def test_a_cancelled_client_frees_its_memory_within_one_step(rig: Rig, steps: int) -> None:
    """Wherever the engine is: before the request's first step, in its prefill, while it decodes."""
    rig.gate.close()
    task = asyncio.create_task(collect(rig, "a", LONG))
    for _ in range(steps):
        await rig.gate.arrival()
        rig.gate.let_one_through()
    await rig.gate.arrival()  # the engine stands before its next step
    allocator = rig.built.core.executor.allocator
    assert (allocator.free_tokens < allocator.total_tokens) == (steps > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.engine.num_in_flight == 0
    other = asyncio.create_task(collect(rig, "b", SHORT))
    rig.gate.let_one_through()  # the step that was about to run, at most
    await rig.gate.arrival()  # before the next one the abort was seen
    assert "a" not in {r.request_id for r in rig.built.core.scheduler.requests()}
    rig.gate.open()
    assert (await other)[-1].finish_reason is FinishReason.LENGTH


async def test_cancelled_between_its_last_token_and_its_last_event(rig: Rig) -> None:
    """The engine has finished the request, but has not said so."""
    rig.gate.close()
    task = asyncio.create_task(collect(rig, "a", SamplingParams(temperature=0.0, max_tokens=1)))
    await rig.gate.arrival()
    rig.gate.let_one_through()
    await rig.gate.arrival()  # the next step would only publish
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    rig.gate.open()
    assert len(await collect(rig, "a")) > 1


async def test_cancelled_while_its_prompt_is_tokenised(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only await before the queue: the id is taken by then, and must be given back."""
    begun, never = asyncio.Event(), asyncio.Event()

    async def slow(*arguments: object) -> list[int]:
        begun.set()
        await never.wait()
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(async_engine, "run_off_loop", slow)
        task = asyncio.create_task(collect(rig, "a", LONG))
        await begun.wait()
        with pytest.raises(DuplicateRequestError):
            await collect(rig, "a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert rig.engine.num_in_flight == 0
    assert len(await collect(rig, "a")) > 1


async def test_long_references_are_tokenised_beside_the_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    right = rig.built.processor.new_request

    def recording(*arguments: Any, **options: Any) -> Request:
        threads.append(threading.current_thread())
        return right(*arguments, **options)

    monkeypatch.setattr(rig.built.processor, "new_request", recording)
    for length in (10, INLINE_SIZE + 1):
        await collect(rig, speculation=SpeculationParams(references=[[5] * length]))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@pytest.mark.parametrize("unit", ["a ", [5]], ids=["text", "token_ids"])
async def test_long_prompts_are_looked_at_beside_the_loop(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, unit: str | list[int]
) -> None:
    threads: list[threading.Thread] = []

    def recording(prompt: object) -> list[int]:
        threads.append(threading.current_thread())
        return PROMPT

    monkeypatch.setattr(rig.built.processor, "tokenize", recording)
    for count in (10, INLINE_SIZE + 1):
        await rig.engine.generate(unit * count, SHORT)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_a_scope_is_cleared_by_the_engine_thread_idle_or_at_work(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[tuple[DraftScope, str]] = []

    def clear_scope(scope: DraftScope) -> None:
        cleared.append((scope, threading.current_thread().name))

    monkeypatch.setattr(rig.built.core.drafter, "clear_scope", clear_scope)
    await rig.engine.clear_draft_scope()
    await rig.engine.clear_draft_scope("request")  # shares nothing
    async with rig.stream("a") as events:
        await anext(events)
        await rig.engine.clear_draft_scope("team")
    names = ("default", "team")
    assert cleared == [(DraftScope("default", name), "batchserve-engine") for name in names]
    for bad in ("x" * 257, 5):
        with pytest.raises(InvalidRequestError, match="draft_scope"):
            await rig.engine.clear_draft_scope(bad)  # type: ignore[arg-type]


async def test_a_ping_is_answered_between_two_steps(rig: Rig) -> None:
    await rig.engine.ping()
    rig.gate.close()
    stream = asyncio.create_task(collect(rig, "a", LONG))
    await rig.gate.arrival()  # in the midst of one
    answer = asyncio.create_task(rig.engine.ping())
    await asyncio.sleep(0.05)
    assert not answer.done()
    rig.gate.open()
    await answer
    await stream
    await rig.engine.shutdown()
    with pytest.raises(UnavailableError):
        await rig.engine.ping()


async def test_a_scope_is_not_cleared_by_an_engine_that_has_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for it is told so."""
    rig.gate.close()
    stream = asyncio.create_task(collect(rig, "a", LONG))
    await rig.gate.arrival()
    waiting = asyncio.create_task(rig.engine.clear_draft_scope())
    await asyncio.sleep(0)

    def failing(name: str) -> None:
        raise RuntimeError("torn")

    monkeypatch.setattr(rig.built.core, "clear_draft_scope", failing)
    rig.gate.open()
    with pytest.raises(EngineFaultError):
        await waiting
    with pytest.raises(EngineFaultError):
        await stream
    await rig.finishes()
    await rig.engine.shutdown()
    with pytest.raises(UnavailableError):
        await rig.engine.clear_draft_scope()


async def test_a_request_is_answered_without_drafts_until_its_drafter_is_ready(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    unready: list[str] = []

    def is_ready(self: KernelLoader, module: str) -> bool:
        unready.append(module)
        return len(unready) > 20

    monkeypatch.setattr(KernelLoader, "is_ready", is_ready)
    messages: list[str] = []
    options = {**_options(CONFIG), "model": str(tiny_model["llama"]), "max_waiting": 8}
    engine = await AsyncEngine.start(EngineConfig(**options), messages.append)
    assert any("requests are answered without drafts" in message for message in messages)
    assert len(set(unready)) == len(unready) == 3, "drafter, forest and budget are prepared before the first request"
    early = await engine.generate([5, 6, 5, 6, 5, 6, 5, 6], SHORT)
    late = await engine.generate([5, 6, 5, 6, 5, 6, 5, 6], LONG)
    assert early.usage.draft_tokens == 0
    assert late.usage.draft_tokens > 0
    assert late.token_ids[: len(early.token_ids)] == early.token_ids
    await engine.shutdown()


class Store(RoutingDrafter):
    """Keeps what is saved in memory."""

    saved: list[tuple[Path, str]]
    error: Exception | None = None

    def save(self, path: Path, fingerprint: str) -> None:
        if self.error is not None:
            raise self.error
        self.saved.append((path, fingerprint))


@pytest.fixture
def store(built: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store("none", {"none": NullDrafter()}, KernelLoader(in_background=False))
    store.saved = []
    monkeypatch.setattr(built.core.drafts, "drafter", store)
    return store


CACHED = dataclasses.replace(CONFIG, draft=DraftConfig(draft_cache="drafts"))


async def test_the_draft_cache_is_saved_once_at_the_end(built: BuiltEngine, store: Store) -> None:
    engine = AsyncEngine(built, CACHED)
    assert store.saved == []
    await engine.shutdown()
    await engine.shutdown()
    assert store.saved == [(Path("drafts"), built.processor.vocabulary_fingerprint())]


async def test_a_draft_cache_that_cannot_be_saved_is_logged(
    built: BuiltEngine, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.error = OSError("no space left")
    await AsyncEngine(built, CACHED).shutdown()
    assert "cannot be saved to drafts: no space left" in caplog.text
    assert "Traceback" not in caplog.text
    assert "no space left" in caplog.text


async def test_an_engine_that_has_failed_saves_nothing(
    built: BuiltEngine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncEngine(built, CACHED)
    with monkeypatch.context() as patch:
        for name in ("step", "abort_all"):
            patch.setattr(built.core, name, lambda: 1 / 0)
        with pytest.raises(EngineFaultError):
            await engine.generate(PROMPT, SHORT)
        await engine.wait_failed()
        await engine.shutdown()
    assert store.saved == []
    built.core.abort_all()


async def test_a_cancelled_generate_aborts_its_request(rig: Rig) -> None:
    rig.gate.close()
    task = asyncio.create_task(rig.engine.generate(PROMPT, LONG, request_id="a"))
    await rig.gate.arrival()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.engine.num_in_flight == 0
    rig.gate.open()
    await rig.finishes()


async def test_a_storm_of_cancellations_at_every_event_and_turn_of_the_loop(rig: Rig) -> None:
    """100 clients in ten waves under the same ten ids, each gone at another moment, beside one who stays."""
    patient = asyncio.create_task(collect(rig, "patient", LONG))
    outcomes: list[str] = []

    async def impatient(i: int) -> None:
        num_events, num_turns = i % 7, i % 11
        seen = asyncio.Semaphore(0)

        async def listen() -> None:
            try:
                async with rig.stream(f"r{i % 10}", SamplingParams(temperature=1.0, max_tokens=8)) as events:
                    async for _ in events:
                        seen.release()
            finally:
                for _ in range(num_events):  # nobody waits for an event that will not come
                    seen.release()

        task = asyncio.create_task(listen())
        for _ in range(num_events):
            await seen.acquire()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        outcomes.append("cancelled" if task.cancelled() else "failed" if task.exception() else "finished")

    for wave in range(10):
        await asyncio.gather(*(impatient(10 * wave + i) for i in range(10)))
        assert {*rig.engine._ids} <= {"patient"}, "who is not cancelled ends some time"
    assert len(outcomes) == 100
    assert "failed" not in outcomes
    assert outcomes.count("cancelled") > 50
    patient.cancel()
    await asyncio.wait([patient])
    await rig.finishes()


async def test_a_flood_gets_one_end_each(rig: Rig) -> None:
    """200 requests against a queue of 8: answered or refused, and nothing else."""
    results = await asyncio.gather(*(collect(rig, f"r{i}") for i in range(200)), return_exceptions=True)
    answered = [r for r in results if isinstance(r, list)]
    assert all(isinstance(r, QueueFullError) for r in results if not isinstance(r, list))
    assert len(answered) == CONFIG.max_num_seqs + CONFIG.max_waiting
    for events in answered:
        assert [e.finish_reason is not None for e in events[1:]] == [False] * (len(events) - 2) + [True]


async def test_deadlines_end_queued_and_running_requests_with_their_error(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core's clock is stopped, and then set behind the deadlines."""
    monkeypatch.setattr(rig.built.core, "_clock", lambda: 0.0)
    rig.gate.close()
    running = [rig.engine.stream(PROMPT, LONG, request_id=f"run{i}", deadline_s=50) for i in range(4)]
    queued = rig.engine.stream(PROMPT, LONG, request_id="queued", deadline_s=50)
    patient = rig.engine.stream(PROMPT, SHORT, request_id="patient")
    for stream in [*running, queued, patient]:
        await anext(stream)
    for _ in range(3):  # the first may have found only the first request
        await rig.gate.arrival()
        rig.gate.let_one_through()
    for stream in running:
        assert isinstance(await anext(stream), Delta)
    monkeypatch.setattr(rig.built.core, "_clock", lambda: float("inf"))
    rig.gate.open()
    for stream in [*running, queued]:
        with pytest.raises(DeadlineExceededError, match="waiting" if stream is queued else "running"):
            async for _ in stream:
                pass
    assert [event async for event in patient][-1].finish_reason is FinishReason.LENGTH


async def test_drain_lets_those_in_flight_finish_and_takes_no_more(rig: Rig) -> None:
    rig.gate.close()
    task = asyncio.create_task(collect(rig, "a", SHORT))
    await rig.gate.arrival()
    drained = asyncio.create_task(rig.engine.drain(60.0))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="draining") as caught:
        await collect(rig, "b")
    assert caught.value.retry_after_s > 0
    rig.gate.open()
    assert await drained
    assert (await task)[-1].finish_reason is FinishReason.LENGTH
    assert await rig.engine.drain(0.0)  # nobody left: at once, and repeatable


async def test_drain_gives_up_in_time_and_shutdown_ends_the_rest(rig: Rig) -> None:
    rig.gate.close()
    task = asyncio.create_task(collect(rig, "a", LONG))
    await rig.gate.arrival()
    assert not await rig.engine.drain(0.0)
    rig.gate.open()
    await rig.engine.shutdown()
    with pytest.raises(UnavailableError, match="shutting down"):
        await task


async def test_shutdown_ends_everyone_in_flight_with_one_error(rig: Rig) -> None:
    rig.gate.close()
    tasks = [asyncio.create_task(collect(rig, f"r{i}", LONG)) for i in range(8)]
    await rig.gate.arrival()
    rig.gate.open()
    await rig.engine.shutdown()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, UnavailableError) for result in results)
    with pytest.raises(UnavailableError):
        await collect(rig)
    await rig.engine.shutdown()  # harmless


@pytest.mark.parametrize("at_step", [0, 1, 4])
async def test_a_fault_ends_those_in_flight_and_the_engine_serves_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, at_step: int
) -> None:
    rig.gate.close()
    tasks = [asyncio.create_task(collect(rig, f"r{i}", LONG)) for i in range(6)]
    await rig.gate.arrival()
    for _ in range(at_step):
        rig.gate.let_one_through()
        await rig.gate.arrival()
    runner = rig.built.core.executor
    right, calls = runner.forward, 0

    def faulty(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a bit fell over")
        return right(batch)

    monkeypatch.setattr(runner, "forward", faulty)
    rig.gate.open()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineFaultError) for result in results)
    assert rig.engine.num_in_flight == 0
    assert "a bit fell over" not in str(results[0])  # the log knows; the client need not
    assert len(await collect(rig, "r0")) > 1
    await rig.finishes()


async def test_a_caller_may_do_with_its_lists_what_it_likes(rig: Rig) -> None:
    expected = (await rig.engine.generate(PROMPT, SHORT)).token_ids
    async with rig.stream(params=SHORT) as events:
        async for event in events:
            if isinstance(event, Started):
                token_ids = event.prompt_token_ids
            else:
                token_ids += event.token_ids
                event.token_ids.clear()
    assert token_ids == [*PROMPT, *expected]
    # How many tokens were drafted depends on how long steps took; what was counted as the answer does not.
    assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (len(PROMPT), len(expected))


async def test_nobody_waits_for_the_check_of_the_books(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long where there is much memory, and waits for a lull."""
    core, checked = rig.built.core, asyncio.Event()
    right, loop, num_checks = core.check_integrity, asyncio.get_running_loop(), 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        right()
        loop.call_soon_threadsafe(checked.set)

    monkeypatch.setattr(core, "check_integrity", check)
    monkeypatch.setattr(engine_loop, "LULL_S", 30.0)
    await rig.finishes()  # wakes the engine, which waits for as long as it was told before
    num_checks = 0
    for _ in range(20):
        await rig.finishes()
    assert num_checks == 0
    monkeypatch.setattr(engine_loop, "LULL_S", 0.01)
    await rig.finishes()
    await asyncio.wait_for(checked.wait(), 20)
    await rig.finishes()


@pytest.mark.parametrize("broken", ["check_integrity", "abort_all", "executor.check_device"])
async def test_an_engine_that_cannot_recover_ends_everyone_too_and_refuses_the_next(
    built: BuiltEngine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A step fails, and so does the cleaning up: every accepted request still gets its one end."""
    engine, core, num_steps = AsyncEngine(built, CONFIG), built.core, 0

    def failing(*args: object) -> None:
        nonlocal num_steps
        num_steps += 1
        *owner, method = broken.split(".")
        monkeypatch.setattr(getattr(core, owner[0]) if owner else core, method, failing_too)
        raise RuntimeError("a step failed")

    def failing_too(*args: object) -> None:
        raise RuntimeError("broken beyond repair")

    monkeypatch.setattr(core, "step", failing)
    tasks = [asyncio.create_task(engine.generate(PROMPT, LONG)) for _ in range(5)]
    done, pending = await asyncio.wait(tasks, timeout=20)
    for task in pending:
        task.cancel()
    assert not pending, "these clients would wait for ever"
    assert all(isinstance(task.exception(), EngineFaultError) for task in done)
    with pytest.raises(EngineFaultError):
        await engine.generate(PROMPT, LONG)
    assert engine.num_in_flight == 0
    await engine.shutdown()
    assert num_steps == 1, "a broken engine goes on stepping"
    monkeypatch.undo()
    core.abort_all()
    assert_clean(built)


async def test_refusals_do_not_pile_up_in_one_exception(rig: Rig) -> None:
    """A closed engine may refuse for hours: each refusal is its own, or tracebacks would keep every prompt alive."""
    await rig.engine.drain(1.0)
    depths = []
    for _ in range(5):
        with pytest.raises(UnavailableError) as caught:
            await rig.engine.generate(PROMPT, SHORT)
        depths.append(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert len(set(depths)) == 1, depths
