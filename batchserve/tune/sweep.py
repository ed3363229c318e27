"""The sweep: one engine per thread count, which runs every max_num_seqs with speculation off and adaptive."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, fields
from threading import current_thread, main_thread
from typing import TYPE_CHECKING

from batchserve.bench.latencies import percentile
from batchserve.config import PRIVATE_SCOPE, EngineConfig
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.policy import DraftPolicy, FixedDrafting
from batchserve.decoding_length.step_time import StepTimeModel, StepTimeTable
from batchserve.engine.async_engine import AsyncEngine
from batchserve.errors import ConfigError, InvalidRequestError
from batchserve.startup.build import build_engine
from batchserve.types import SpeculationParams, Started

if TYPE_CHECKING:
    from types import FrameType

    from batchserve.startup.build import BuiltEngine
    from batchserve.tune.workload import WorkloadRequest

SCOPE = "tune"  # plus a number: the scope in which one setting's requests share drafts and prefixes
WARM_UP_TOKENS = 16


def threads_text(num_threads: int) -> str:
    return "1 thread" if num_threads == 1 else f"{num_threads} threads"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the sweep. is_adaptive: drafts with the adaptive decoding length; False: no speculation."""

    num_threads: int
    max_num_seqs: int
    is_adaptive: bool

    def __str__(self) -> str:
        speculation = "adaptive" if self.is_adaptive else "speculation off"
        return f"{threads_text(self.num_threads)}, max_num_seqs {self.max_num_seqs}, {speculation}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a setting under closed load. Rates are of the whole engine. Times are of single requests, in seconds.

    tpot: time from the first to the last token over the tokens after the first, with percentiles by nearest rank; nan
    if no answer has a second token. acceptance_length: tokens of one request's decoding step. draft_rows_per_request:
    K, the draft rows of one request's decoding step. turn: the round in which every setting was measured once.
    """

    setting: Setting
    tokens_per_s: float
    p50_tpot_s: float
    p99_tpot_s: float
    p50_ttft_s: float
    acceptance_length: float
    draft_rows_per_request: float
    seconds: float
    turn: int = 0


FIGURES = tuple(each.name for each in fields(Measured) if each.name not in ("setting", "turn"))


@dataclass(frozen=True, slots=True)
class Repeated:
    """One setting with all of its runs."""

    setting: Setting
    runs: tuple[Measured, ...]

    def median(self, figure: str) -> float:
        """Returns the median of a field of Measured; nan if any run's value is nan."""
        values = self._values(figure)
        return math.nan if any(map(math.isnan, values)) else statistics.median(values)

    def range(self, figure: str) -> tuple[float, float]:
        """Returns (minimum, maximum) of a field of Measured."""
        values = self._values(figure)
        return min(values), max(values)

    def _values(self, figure: str) -> list[float]:
        return [getattr(run, figure) for run in self.runs]


def by_setting(measured: Sequence[Measured]) -> list[Repeated]:
    """Groups runs by setting, in the order of the sweep."""
    runs: dict[Setting, list[Measured]] = {}
    for each in measured:
        runs.setdefault(each.setting, []).append(each)
    settings = sorted(runs, key=lambda setting: (setting.num_threads, setting.max_num_seqs, setting.is_adaptive))
    return [Repeated(setting, tuple(runs[setting])) for setting in settings]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The step time by number of rows for one thread count, measured at start, and the sweep's KV cache memory."""

    num_threads: int
    table: StepTimeTable
    kv_cache_bytes: int

    @property
    def critical_length(self) -> int:
        """The most rows of a step within 1.25 times the time of the fewest (Lookahead, KDD'24, definition 2)."""
        return StepTimeModel(self.table).critical_length()


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a sweep so far: step times of each thread count and all finished runs."""

    step_times: list[StepTimes] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Listener:
    """Progress callbacks of a sweep: for a message, a finished request and a finished setting."""

    say: Callable[[str], None] = lambda line: None
    request_done: Callable[[], None] = lambda: None
    setting_done: Callable[[Measured], None] = lambda measured: None


def sweep_threads(
    config: EngineConfig,
    sizes: Sequence[int],
    requests: Sequence[WorkloadRequest],
    results: Results,
    listener: Listener,
    rounds: Sequence[int] = (0,),
) -> None:
    """Measures every setting with config.num_threads threads. Adds to `results` as it goes. Loads the model once.

    rounds: round numbers. Each round measures every setting. Odd rounds go through them backwards, so that a machine
    that becomes slower or faster favours none. config.max_num_seqs is the largest of `sizes`. A smaller size is a
    closed load of that many requests. Raises ConfigError.
    """
    with _no_interrupt_lost():
        built = build_engine(config, listener.say)
    _check(built, requests)
    adaptive = built.core.drafts.policy
    if not isinstance(adaptive, AdaptiveDrafting) or config.num_threads is None:
        raise RuntimeError("the sweep needs an adaptive engine and a number of threads")
    allocator = built.core.executor.allocator
    kv_cache_bytes = allocator.total_tokens * allocator.bytes_per_token
    if all(times.num_threads != config.num_threads for times in results.step_times):
        results.step_times.append(StepTimes(config.num_threads, adaptive.step_time.table, kv_cache_bytes))
    asyncio.run(_sweep(built, adaptive, config, sizes, requests, results, listener, rounds))
    del built, adaptive
    gc.collect()  # an engine has reference cycles, and two models may not fit into memory


@contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Makes sure that Ctrl-C raises KeyboardInterrupt, at the latest when the context ends.

    Python only prints one that is raised while an object is being freed, and loading frees objects all the time.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current_thread() is not main_thread():
        yield
        return
    has_come = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if has_come:
        raise KeyboardInterrupt


def _check(built: BuiltEngine, requests: Sequence[WorkloadRequest]) -> None:
    """Raises ConfigError for a request that the engine would refuse."""
    for request in requests:
        speculation = SpeculationParams(references=request.references)
        try:
            token_ids = built.processor.tokenize(request.prompt)
            built.processor.make_request("tune", token_ids, request.sampling, speculation, 0.0)
        except InvalidRequestError as error:
            default = "" if request.has_max_tokens else "no max_tokens is given, and the default does not fit: "
            raise ConfigError(f"{request.where}: {default}{error}") from error


async def _sweep(
    built: BuiltEngine,
    adaptive: AdaptiveDrafting,
    config: EngineConfig,
    sizes: Sequence[int],
    requests: Sequence[WorkloadRequest],
    results: Results,
    listener: Listener,
    rounds: Sequence[int],
) -> None:
    engine = AsyncEngine(built, config)
    policies: tuple[DraftPolicy, DraftPolicy] = FixedDrafting(adaptive.step_time), adaptive
    modes = (False, True) if config.drafter != "none" else (False,)
    try:
        listener.say("warming up")
        await asyncio.gather(*(_warm_up(engine, request) for request in requests[: max(sizes)]))
        each_once = [*itertools.product(sizes, modes)]
        order = [(turn, *each) for turn in rounds for each in each_once[:: -1 if turn % 2 else 1]]
        for number, (turn, max_num_seqs, is_adaptive) in enumerate(order):
            setting = Setting(built.core.executor.num_threads, max_num_seqs, is_adaptive)
            # Each setting has its own scope, so none gains from the answers of another.
            scope = PRIVATE_SCOPE if config.default_draft_scope == PRIVATE_SCOPE else f"{SCOPE}-{number}"
            await engine.clear_draft_scope(f"{SCOPE}-{number - 1}")
            # Setting the policy is safe: all requests have ended and clear_draft_scope is done, so the engine is idle.
            # Without speculation no time must be spent on choosing drafts.
            built.core.drafts.policy = policies[is_adaptive]
            listener.say(str(setting))
            done = await _ClosedLoad(engine, requests, setting, scope, listener.request_done, turn).run()
            results.measured.append(done)
            listener.setting_done(done)
    finally:
        await engine.shutdown()


async def _warm_up(engine: AsyncEngine, request: WorkloadRequest) -> None:
    """Runs the start of a request, not measured. This triggers lazy set-up and gives the policy first estimates."""
    speculation = SpeculationParams(draft_scope=PRIVATE_SCOPE, references=request.references)
    async with aclosing(engine.stream(request.prompt, request.sampling, speculation=speculation)) as events:
        num_tokens = 0
        async for event in events:
            num_tokens += 0 if isinstance(event, Started) else len(event.token_ids)
            if num_tokens >= WARM_UP_TOKENS:
                break


@dataclass(slots=True)
class _ClosedLoad:
    """Keeps max_num_seqs requests in flight, from the first to the last measured request.

    When all have been sent, requests are sent again to keep up the load. Their tokens count, because the engine
    generates them, but their times do not. They share no drafts, because real requests are not repeated.
    """

    engine: AsyncEngine
    requests: Sequence[WorkloadRequest]
    setting: Setting
    scope: str
    on_done: Callable[[], None]
    turn: int = 0
    num_tokens: int = 0
    num_done: int = 0
    tpot_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    async def run(self) -> Measured:
        waiting, is_over = iter(self.requests), asyncio.Event()
        before, started_s = self.engine.metrics.reading().numbers(), time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                workers = [
                    group.create_task(self._work(waiting, place, is_over)) for place in range(self.setting.max_num_seqs)
                ]
                await is_over.wait()
                seconds, num_tokens = time.perf_counter() - started_s, self.num_tokens
                after = self.engine.metrics.reading().numbers()
                for worker in workers:
                    worker.cancel()
        except ExceptionGroup as failed:  # all have the same reason, so one is enough
            raise failed.exceptions[0] from None
        steps, accepted, drafted = (
            after[name] - before[name]
            for name in ("decoding_requests_total", "accepted_draft_tokens_total", "draft_rows_total")
        )
        return Measured(
            setting=self.setting,
            tokens_per_s=num_tokens / seconds,
            p50_tpot_s=percentile(self.tpot_s, 50),
            p99_tpot_s=percentile(self.tpot_s, 99),
            p50_ttft_s=percentile(self.ttft_s, 50),
            acceptance_length=1 + accepted / max(1.0, steps),
            draft_rows_per_request=drafted / max(1.0, steps),
            seconds=seconds,
            turn=self.turn,
        )

    async def _work(self, waiting: Iterator[WorkloadRequest], place: int, is_over: asyncio.Event) -> None:
        for request in waiting:  # the iterator is shared by all workers
            await self._ask(request, self.scope, is_measured=True)
            self.num_done += 1
            self.on_done()
            if self.num_done == len(self.requests):
                is_over.set()
        for request in itertools.islice(itertools.cycle(self.requests), place, None):
            await self._ask(request, PRIVATE_SCOPE, is_measured=False)

    async def _ask(self, request: WorkloadRequest, scope: str, *, is_measured: bool) -> None:
        speculation = SpeculationParams(
            is_enabled=self.setting.is_adaptive, draft_scope=scope, references=request.references
        )
        async with aclosing(self.engine.stream(request.prompt, request.sampling, speculation=speculation)) as events:
            async for event in events:
                if isinstance(event, Started):
                    continue
                self.num_tokens += len(event.token_ids)
                if is_measured and event.usage is not None and event.timing is not None:
                    self.ttft_s.append(event.timing.first_token_s)
                    tpot_s = event.timing.tpot_s(event.usage.completion_tokens)
                    if tpot_s is not None:
                        self.tpot_s.append(tpot_s)
