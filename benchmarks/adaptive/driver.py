"""Drives an engine core through recorded requests, with the number of requests at once held where it is wanted.

One engine serves all contenders: between two runs only its decoding length changes hands. A prompt's K/V is taken as
computed (a forced answer does not depend on what stands in it), so that every step is one of decoding.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle, islice
from math import comb

from batchserve.bench.replay import SCOPE, ReplayRecord
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.policy import FixedDrafting
from batchserve.engine.engine_core import EngineCore, Event
from batchserve.errors import BatchserveError, ConfigError
from batchserve.request import Request, ResolvedSampling, ResolvedSpeculation
from benchmarks.adaptive.warm_drafter import WarmDrafter

MAX_DRAFT_TOKENS = 64
BRANCH_LENGTH = 32
CONFIDENCE = 0.9
CONTROL = "off again"


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """A decoding length: `max_draft_tokens` for every request in every step, or what `adaptive` chooses of so many."""

    name: str
    max_draft_tokens: int
    adaptive: AdaptiveDrafting | None = None


def fixed(length: int) -> Contender:
    return Contender(str(length) if length else "off", length)


def control() -> Contender:
    """The same as fixed(0) but for its name: what it shows against that is the machine's noise."""
    return Contender(CONTROL, 0)


@dataclasses.dataclass(slots=True)
class Run:
    """What one contender did with the records; the lists have an entry a step."""

    seconds: float = 0.0
    tokens: int = 0
    step_s: list[float] = dataclasses.field(default_factory=list)
    step_rows: list[int] = dataclasses.field(default_factory=list)  # drafts included
    step_draft_rows: list[int] = dataclasses.field(default_factory=list)
    requests_steps: int = 0  # steps of one request each
    request_rates: list[float] = dataclasses.field(default_factory=list)  # tokens/s of each that had some steps
    all_tokens: int = 0  # of all steps, where `tokens` are those of some requests only

    @property
    def draft_rows(self) -> int:
        return sum(self.step_draft_rows)

    @property
    def draft_rows_per_token(self) -> float:
        return self.draft_rows / (self.all_tokens or self.tokens)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Of one request: the acceptance length."""
        return self.tokens / self.requests_steps


@dataclasses.dataclass(slots=True)
class Flight:
    """A request under way: where its answer began, and its seconds."""

    request: Request
    start: int  # tokens of the answer that it had when it joined
    seconds: float = 0.0
    steps: int = 0

    @property
    def num_tokens(self) -> int:
        return self.request.num_output_tokens - self.start


class Driver:
    """Runs contenders on one core. clock: the one that the core was built with, or a finer one."""

    def __init__(self, core: EngineCore, clock: Callable[[], float]) -> None:
        self.core = core
        self._clock = clock
        self._fixed = FixedDrafting(core.scheduler._step_time)
        self._ids = count()
        core.emit = _check

    def run(
        self,
        records: Sequence[ReplayRecord],
        load: Sequence[tuple[int, int]],
        contender: Contender,
        *,
        seed: int = 0,
        is_cut: bool = False,
    ) -> Run:
        """Hold the load's numbers of requests, each until so many tokens were given, then drop what is under way.

        load: (requests at once, tokens). A request joins when one leaves; where the load falls, requests leave as they
        end, or is_cut: the youngest are dropped at once; the records come round again when they are
        used up. Those of the beginning stand somewhere in the first half of their answers, as in an engine that has
        been running.
        """
        run, rng = Run(), random.Random(seed)
        self._begin(contender)
        first = seed * max(size for size, _ in load) % len(records)
        source = islice(cycle(records), first, None)
        flights: list[Flight] = []
        done = 0
        for size, num_tokens in load:
            if is_cut:
                flights = self._cut(flights, size, run)
            while run.tokens - done < num_tokens:
                while len(flights) < size:
                    record = next(source)
                    half = max(1, len(record.response_token_ids) // 2)
                    flights.append(self.join(record, contender, 1 + (rng.randrange(half) if run.tokens == 0 else 0)))
                self.step(flights, run)
                for flight in flights:
                    if flight.request.is_finished:
                        _note(flight, run)
                flights = self.land(flights)
            done = run.tokens
        for flight in flights:
            _note(flight, run)
        self.clear()
        return run

    def run_parts(
        self, records: Sequence[ReplayRecord], size: int, num_tokens: int, contender: Contender, *, seed: int = 0
    ) -> Run:
        """Hold `size` requests until the first of them have all been given num_tokens, from anywhere in their answers.

        Every contender gives the same tokens, so that none is judged by texts that are easy for it: in a short run held
        by its tokens, the easy ones give most of them. tokens, seconds, steps and rates are those of these requests;
        seconds are their mean, so that tokens_per_s is what the engine gives as long as it goes on like this.
        """
        run, rng = Run(), random.Random(seed)
        self._begin(contender)
        source = islice(cycle(records), seed * size % len(records), None)

        def part() -> Flight:
            record = next(source)
            last = max(1, len(record.response_token_ids) - num_tokens)
            return self.join(record, contender, 1 + rng.randrange(last), num_tokens)

        measured = [part() for _ in range(size)]
        flights = measured.copy()
        while not all(flight.request.is_finished for flight in measured):
            self.step(flights, run)
            flights = self.land(flights)
            flights += [part() for _ in range(size - len(flights))]
        self.clear()
        run.all_tokens = run.tokens
        run.tokens = sum(flight.num_tokens for flight in measured)
        run.seconds = sum(flight.seconds for flight in measured) / size
        run.requests_steps = sum(flight.steps for flight in measured)
        run.request_rates = [flight.num_tokens / flight.seconds for flight in measured]
        return run

    def _cut(self, flights: list[Flight], most: int, run: Run) -> list[Flight]:
        """The oldest; the others are dropped."""
        for flight in flights[most:]:
            _note(flight, run)
            self.core.abort(flight.request)
            del self.core.executor.forced[flight.request.request_id]
        return flights[:most]

    def _begin(self, contender: Contender) -> None:
        drafts = self.core.drafts
        drafts.policy = contender.adaptive or self._fixed
        if isinstance(drafts.drafter, WarmDrafter):
            drafts.drafter.renew()

    def clear(self) -> None:
        """Drop what is under way."""
        self.core.abort_all()
        self.core.executor.forced.clear()
        self.core.check_integrity()

    def join(self, record: ReplayRecord, contender: Contender, given: int = 1, num_tokens: int | None = None) -> Flight:
        """A request whose prompt, and so many tokens of its answer, have been computed; it ends num_tokens later."""
        name, answer = f"bench-{next(self._ids)}", record.response_token_ids
        answer = answer if num_tokens is None else answer[: given + num_tokens]
        sampling = ResolvedSampling(0.0, 0, 1.0, 0, len(answer), frozenset())
        speculation = ResolvedSpeculation()
        if contender.max_draft_tokens:
            speculation = ResolvedSpeculation(
                "", contender.max_draft_tokens, BRANCH_LENGTH, SCOPE, tuple(record.references)
            )
        request = Request(name, record.prompt_token_ids, sampling, self._clock(), speculation)
        request.token_ids += answer[:given]
        request.num_computed_tokens = len(request.token_ids) - 1
        self._fill(name, request.num_computed_tokens)
        self.core.executor.forced[name] = record.prompt_token_ids + answer
        self.core.add(request)
        return Flight(request, given)

    def _fill(self, name: str, num_tokens: int) -> None:
        """K/V that attention takes as long to read as any other."""
        allocator = self.core.executor.allocator
        if not allocator.reserve(name, num_tokens + 1):
            free = allocator.free_tokens
            raise ConfigError(f"K/V memory: {free} tokens are free, must be {num_tokens + 1} for one more request")
        allocator.commit(name, range(num_tokens))
        allocator.touch(name)

    def step(self, flights: list[Flight], run: Run) -> None:
        """One step of the engine, in which all of these decode."""
        had = [flight.num_tokens for flight in flights]
        before = self._rows()
        started_s = self._clock()
        self.core.step()
        seconds = self._clock() - started_s
        run.seconds += seconds
        run.step_s.append(seconds)
        for rows, now, then in zip((run.step_rows, run.step_draft_rows), self._rows(), before, strict=True):
            rows.append(int(now - then))
        for flight, num_tokens in zip(flights, had, strict=True):
            run.tokens += flight.num_tokens - num_tokens
            run.requests_steps += 1
            flight.seconds += seconds
            flight.steps += 1

    def _rows(self) -> tuple[float, float]:
        """Rows and draft rows until now. Nobody reads all metrics between two steps: it would cost the next one."""
        values = self.core.metrics.values
        return values["rows_total"], values["draft_rows_total"]

    def land(self, flights: list[Flight]) -> list[Flight]:
        """Those that go on."""
        for flight in flights:
            if flight.request.is_finished:
                del self.core.executor.forced[flight.request.request_id]
        return [flight for flight in flights if not flight.request.is_finished]


MIN_STEPS = 8  # of a request whose own rate is worth looking at


def _note(flight: Flight, run: Run) -> None:
    if flight.steps >= MIN_STEPS:
        run.request_rates.append(flight.num_tokens / flight.seconds)


def _check(events: list[Event]) -> None:
    for _, event in events:
        if isinstance(event, BatchserveError):
            raise event


def interleave(
    contenders: Sequence[Contender], rounds: int, run: Callable[[Contender, int], Run]
) -> dict[str, list[Run]]:
    """Every contender once a round: run(contender, number of the round); each round begins with another one.

    The first round warms up and is not counted.
    """
    runs: dict[str, list[Run]] = {each.name: [] for each in contenders}
    for number in range(rounds + 1):
        for contender in _rotated(contenders, number):
            done = run(contender, number)
            if number:
                runs[contender.name].append(done)
    return runs


def _rotated(contenders: Sequence[Contender], by: int) -> Iterator[Contender]:
    for i in range(len(contenders)):
        yield contenders[(i + by) % len(contenders)]


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """The median and a distribution-free interval of at least CONFIDENCE around it, of order statistics; of fewer than
    five values it is their extremes, which is less.

    P(x[k] <= median <= x[n - 1 - k]) = 1 - 2 P(Binomial(n, 1/2) <= k).
    """
    ordered, n = sorted(values), len(values)
    tail, k = 0.0, 0
    for skipped in range(n // 2):
        tail += comb(n, skipped) / 2**n
        if 1 - 2 * tail < CONFIDENCE:
            break
        k = skipped
    return {"median": statistics.median(ordered), "low": ordered[k], "high": ordered[n - 1 - k], "pairs": n}


def over(runs: Sequence[Run], base: Sequence[Run]) -> dict[str, float]:
    """Pair by pair: tokens/s of `runs` over those of `base`."""
    return median_interval([a.tokens_per_s / b.tokens_per_s for a, b in zip(runs, base, strict=True)])


def summary(runs: Sequence[Run], base: Sequence[Run]) -> dict[str, object]:
    """One contender's figures. Each request is held against itself in the base's run of the same pair, where both are
    of the same parts of answers, otherwise against the median request of that run.
    """
    tokens = sum(run.tokens for run in runs)
    each = [
        rate / own
        for a, b in zip(runs, base, strict=True)
        if b.request_rates
        for rate, own in zip(
            a.request_rates,
            b.request_rates if b.all_tokens else [statistics.median(b.request_rates)] * len(a.request_rates),
            strict=True,
        )
    ]
    rounded = {key: round(value, 4) for key, value in over(runs, base).items()}
    return {
        "over_off": rounded,
        "tokens_per_s": round(statistics.median(run.tokens_per_s for run in runs), 2),
        "step_ms": round(statistics.median(s for run in runs for s in run.step_s) * 1e3, 3),
        "acceptance_length": round(tokens / sum(run.requests_steps for run in runs), 3),
        "draft_rows_per_token": round(statistics.mean(run.draft_rows_per_token for run in runs), 3),
        "draft_row_share": round(sum(run.draft_rows for run in runs) / sum(sum(run.step_rows) for run in runs), 4),
        "requests": len(each),
        "slowest_request_over_off": round(min(each), 3) if each else None,
        "p10_request_over_off": round(statistics.quantiles(each, n=10)[0], 3) if len(each) > 1 else None,
    }
