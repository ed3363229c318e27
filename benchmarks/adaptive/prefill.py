"""What a long prompt does to those who are already being answered.

    python -m benchmarks.adaptive.prefill FOLDER [--quick]

Eight requests decode on a random Llama of about 90M parameters (recorded answers, forced; drafts as in any engine) when
a prompt of 2,000 tokens arrives. Inter-token latency is the time between two deltas of a request: a step's. "quiet": no
prompt; "bounded": chunks as a max_itl_inflation of 1.25 has them; "default": as they are where nobody asks for one;
"whole": the prompt in as few steps as max_num_batched_tokens allows. All take turns in one process, and every round is
quiet both before and after "bounded", for about as many steps in all: a shared machine changes its pace within a
minute. A round has too few steps for its p99 to be more than its worst steps, so all rounds are pooled as well. Also
what the bound costs the prompt: its time to first token.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from itertools import count, cycle
from typing import Any

from batchserve.bench.replay import ReplayRecord
from batchserve.config import PROMPT_INFLATION, EngineConfig
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.errors import ConfigError
from batchserve.request import Request, ResolvedSampling
from benchmarks.adaptive.driver import MAX_DRAFT_TOKENS, Contender, Flight, Run, median_interval
from benchmarks.adaptive.workloads import (
    Lab,
    Options,
    Workload,
    lab,
    new_drafter,
    read_options,
    recorded_sets,
    say,
    write,
)
from benchmarks.common import refusing_bad_input, spread

RUNNING, PROMPT_TOKENS, MAX_ROWS = 8, 2000, 2304
ROUNDS, BEFORE, QUIET_STEPS = 10, 12, 180
MIN_ANSWER = 1200  # tokens; of which a request may have half when it begins
RECORDED = "gsm_qwen2_7b"
UNBOUNDED = 1e6


@dataclasses.dataclass(slots=True)
class Window:
    """The steps between a prompt's arrival and its first token."""

    step_s: list[float]

    @property
    def first_token_s(self) -> float:
        return sum(self.step_s)

    @property
    def p99_ms(self) -> float:
        return p99(self.step_s) * 1e3


def p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def without_end(records: Sequence[ReplayRecord]) -> list[ReplayRecord]:
    """Answers behind each other, too long to end beside the prompt: whoever came next would be a prompt, too."""
    long = []
    for place, record in enumerate(records):
        tokens: list[int] = []
        for other in (*records[place:], *records[:place]):
            tokens += other.response_token_ids
            if len(tokens) >= MIN_ANSWER:
                break
        long.append(dataclasses.replace(record, response_token_ids=tokens))
    return long


class Scene:
    """Requests that decode for ever, so that something can happen beside them."""

    def __init__(self, bench: Lab, workload: Workload) -> None:
        self._driver = bench.driver
        core = bench.engine.core
        # As in any engine, drafts and prompts go by the same step times.
        drafting = AdaptiveDrafting(core.scheduler._step_time, EngineConfig().draft_inflation)
        self._contender = Contender("adaptive", MAX_DRAFT_TOKENS, drafting)
        self._source = cycle(without_end(workload.records))
        self._rng, self._ids = random.Random(0), count()
        self._vocab_size = bench.engine.info.vocab_size

    def watch(self, inflation: float, prompt_tokens: int, num_steps: int) -> Window:
        """The steps until the prompt has its first token, or num_steps of them without any prompt."""
        core = self._driver.core
        core.drafts.policy = self._contender.adaptive
        scheduler = core.scheduler
        scheduler._config = dataclasses.replace(scheduler._config, max_itl_inflation=inflation)
        flights: list[Flight] = []
        for _ in range(BEFORE):
            flights = self._step(flights, Run())
        run, prompt = Run(), self._prompt(prompt_tokens)
        if prompt is not None:
            core.add(prompt)
        while (prompt.first_token_s is None) if prompt is not None else len(run.step_s) < num_steps:
            flights = self._step(flights, run)
        self._driver.clear()
        return Window(run.step_s)

    def _step(self, flights: list[Flight], run: Run) -> list[Flight]:
        while len(flights) < RUNNING:
            flights.append(self._join())
        self._driver.step(flights, run)
        return self._driver.land(flights)

    def _join(self) -> Flight:
        """Somewhere in the first half of the next answer."""
        record = next(self._source)
        given = 1 + self._rng.randrange(max(1, len(record.response_token_ids) // 2))
        return self._driver.join(record, self._contender, given)

    def _prompt(self, num_tokens: int) -> Request | None:
        if num_tokens == 0:
            return None
        token_ids = [self._rng.randrange(3, self._vocab_size) for _ in range(num_tokens)]
        sampling = ResolvedSampling(0.0, 0, 1.0, 0, 4, frozenset())
        return Request(f"prompt-{next(self._ids)}", token_ids, sampling, time.perf_counter())


def measure(scene: Scene, options: Options) -> dict[str, Any]:
    bound = EngineConfig().draft_inflation
    prompt_tokens = 200 if options.is_quick else PROMPT_TOKENS
    bounds = {"bounded": bound, "default": PROMPT_INFLATION, "whole": UNBOUNDED}
    cases = {"quiet": (bound, 0), **{name: (each, prompt_tokens) for name, each in bounds.items()}}
    windows: dict[str, list[Window]] = {name: [] for name in cases}
    for number in range((1 if options.is_quick else ROUNDS) + 1):
        round_: dict[str, list[float]] = {name: [] for name in cases}
        for name in ("quiet", "bounded", "quiet", "default", "whole"):
            window = scene.watch(*cases[name], 10 if options.is_quick else QUIET_STEPS)
            say(f"{name}: {len(window.step_s)} steps, p99 {window.p99_ms:.1f} ms, {sum(window.step_s):.2f} s")
            round_[name] += window.step_s
        for name, step_s in round_.items():
            if number:
                windows[name].append(Window(step_s))
    return {
        "bounds": bounds,
        "prompt_tokens": prompt_tokens,
        "cases": {name: _figures(of, windows["quiet"]) for name, of in windows.items()},
    }


def _figures(windows: Sequence[Window], quiet: Sequence[Window]) -> dict[str, Any]:
    pooled, still = ([s for window in each for s in window.step_s] for each in (windows, quiet))
    return {
        "pooled_p99_ms": round(p99(pooled) * 1e3, 3),
        "pooled_p99_over_quiet": round(p99(pooled) / p99(still), 4),
        "p99_ms": spread([window.p99_ms for window in windows]),
        "max_ms": spread([max(window.step_s) * 1e3 for window in windows]),
        "median_ms": spread([statistics.median(window.step_s) * 1e3 for window in windows]),
        "p99_over_quiet": median_interval([a.p99_ms / b.p99_ms for a, b in zip(windows, quiet, strict=True)]),
        "median_over_quiet": median_interval(
            [statistics.median(a.step_s) / statistics.median(b.step_s) for a, b in zip(windows, quiet, strict=True)]
        ),
        "steps": statistics.median(len(window.step_s) for window in windows),
        "first_token_s": spread([window.first_token_s for window in windows]),
    }


@refusing_bad_input()
def main() -> None:
    started_s = time.perf_counter()
    options = read_options(__doc__, (RECORDED,))
    (workload,) = recorded_sets(options)
    total = sum(len(record.response_token_ids) for record in workload.records)
    if total < MIN_ANSWER:
        raise ConfigError(f"{workload.name}: the measured answers have {total} tokens; must be at least {MIN_ANSWER}")
    with lab("90m", max_num_batched_tokens=MAX_ROWS) as bench:
        bench.use(new_drafter(options.drafter), workload.warm)
        results = measure(Scene(bench, workload), options)
        write(options, "prefill", {"running": RUNNING, "model": bench.about(), **results}, started_s)


if __name__ == "__main__":
    main()
