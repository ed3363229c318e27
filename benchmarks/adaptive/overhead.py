"""What a step costs beside its forward, part by part, at 16 requests on one core.

    python -m benchmarks.adaptive.overhead FOLDER [--quick]

Real steps: the bundled model's own answers, and recorded answers forced through a random Llama of about 90M
parameters. One compute thread. "host" is all of a step but the forward, the sampling (the argmax over the logits, which
plain decoding pays too) and the look-up of the recorded answers (which nobody but a benchmark has): only these are
timed in those runs. There are five, for the machine's moment; the figure is the median of theirs. In one more run every
part is, in place, between forwards that leave the caches as forwards do. From that one come what schedules, drafts,
chooses and learns, and what stands between the commit of a step and the launch of the next; its own reading of the
clock, some dozens of times a step, is in there, too.

The same twice more without a forward. While it is only waited for, as long as it took, the host's caches are its own,
as they are where the forward runs on a GPU. And with steps one right behind the other, while the engine's clock goes on
as if there had been a forward: that is what the code itself takes, whoever else uses the machine meanwhile.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch

from batchserve.engine.engine_core import EngineCore
from batchserve.runner import step_handle
from batchserve.runner.ragged_batch import RaggedBatch
from batchserve.sampling.sampler import RowSampler
from benchmarks.adaptive.driver import Contender, Run, fixed
from benchmarks.adaptive.workloads import (
    Lab,
    Options,
    Workload,
    lab,
    new_drafter,
    own_text,
    read_options,
    recorded_sets,
    say,
    write,
)
from benchmarks.common import refusing_bad_input

SIZE = 16
STEPS = 150
RUNS = 5
RECORDED = "gsm_qwen2_7b"
SHOWN = 25  # functions of the profile
LAUNCHING = ("schedule", "drafter", "choose", "draft stage", "drafter learns", "build")
DECIDING = ("schedule", "drafter", "choose", "draft stage", "drafter learns", "adaptive learns")


class Parts:
    """Seconds by part, step by step. A part that runs inside another one is taken off it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._inner: list[float] = []  # seconds of what has run inside, of each open part

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - started_s
                self._now[name] = self._now.get(name, 0.0) + seconds - self._inner.pop()
                if self._inner:
                    self._inner[-1] += seconds

        return wrapped

    def step(self, function: Callable[[], None]) -> Callable[[], None]:
        """The whole step; what no part accounts for is "other"."""
        timed = self.timed("other", function)

        def wrapped() -> None:
            self._now = {}
            timed()
            self.steps.append(self._now)

        return wrapped


@contextmanager
def instrumented(bench: Lab, parts: Parts, *, is_host_split: bool) -> Iterator[None]:
    """Times what is no host work, and the parts of what is, if it is to be split."""
    core = bench.engine.core
    places: list[tuple[Any, str, str]] = [
        (core.executor, "forward", "forward"),
        (core.executor.forced, "places", "recordings"),
    ]
    with ExitStack() as stack:
        for owner, attribute, name in places + (host_parts(core) if is_host_split else []):
            stack.enter_context(mock.patch.object(owner, attribute, parts.timed(name, getattr(owner, attribute))))
        sampled = parts.timed("sampling", RowSampler._find_best)
        stack.enter_context(mock.patch.object(RowSampler, "_find_best", lambda *args: sampled(*args)))
        stack.enter_context(mock.patch.object(core, "step", parts.step(core.step)))
        yield


def host_parts(core: EngineCore) -> list[tuple[Any, str, str]]:
    policy = core.drafts.policy
    places: list[tuple[Any, str, str]] = [
        (core.scheduler, "schedule", "schedule"),
        (core.drafts, "propose", "draft stage"),
        (core.drafts.drafter, "propose_all", "drafter"),
        (core.drafts.drafter, "accept_all", "drafter learns"),
        (core.drafts, "step_done", "adaptive learns"),
        (core, "_build", "build"),
        (step_handle, "verify_batch", "verify"),
        (core, "_commit", "commit"),
        (core, "_publish", "publish"),
    ]
    return [*places, (policy, "choose", "choose")]


@contextmanager
def clock_put_forward(bench: Lab) -> Iterator[Callable[[float], None]]:
    """Gives what puts the engine's clock forward by some seconds."""
    core, ahead_s = bench.engine.core, 0.0
    clock = core._clock

    def put_forward(seconds: float) -> None:
        nonlocal ahead_s
        ahead_s += seconds

    def now_s() -> float:
        return clock() + ahead_s

    with mock.patch.object(core, "_clock", now_s), mock.patch.object(core.drafts, "_clock", now_s):
        yield put_forward


def spin(seconds: float) -> None:
    """Do nothing, but keep the core."""
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


@contextmanager
def without_forward(bench: Lab, pass_time: Callable[[], None]) -> Iterator[None]:
    """No forward runs: its time passes. Tokens are those of the recorded answers anyway."""

    def forward(batch: RaggedBatch) -> torch.Tensor:
        pass_time()
        return torch.zeros(len(batch.logit_rows), 2)

    with mock.patch.object(bench.engine.core.executor, "forward", forward):
        yield


def measure(bench: Lab, workload: Workload, contender: Contender, options: Options) -> dict[str, Any]:
    load = [(SIZE, SIZE * (4 if options.is_quick else STEPS))]
    bench.driver.run(workload.records, [(SIZE, SIZE * 8)], contender)  # warms up
    found = timed_parts(bench, workload, contender, load, options)
    forward_s = found["median_ms_by_part"]["forward"] / 1e3
    with clock_put_forward(bench) as put_forward:
        for name, pass_time in (("caches_left_alone", spin), ("without_pause", put_forward)):
            with without_forward(bench, partial(pass_time, forward_s)):
                found[name] = timed_parts(bench, workload, contender, load, options)
    say(f"{workload.name}, {contender.name}: {found}")
    return found


def timed_parts(
    bench: Lab, workload: Workload, contender: Contender, load: list[tuple[int, int]], options: Options
) -> dict[str, Any]:
    def run_timed(*, is_host_split: bool) -> tuple[Parts, Run]:
        parts = Parts()
        with instrumented(bench, parts, is_host_split=is_host_split):
            return parts, bench.driver.run(workload.records, load, contender)

    wholes = [run_timed(is_host_split=False)[0] for _ in range(1 if options.is_quick else RUNS)]
    parts, run = run_timed(is_host_split=True)
    names = sorted({name for step in parts.steps for name in step})
    beside = [[step["other"] for step in whole.steps] for whole in wholes]

    def median_ms(chosen: tuple[str, ...]) -> float:
        return round(statistics.median(sum(step.get(name, 0.0) for name in chosen) for step in parts.steps) * 1e3, 4)

    medians = [statistics.median(each) for each in beside]
    return {
        "steps": len(parts.steps),
        "host_ms": round(statistics.median(medians) * 1e3, 4),
        "host_ms_of_runs": [round(median * 1e3, 4) for median in medians],
        "scheduler_and_drafts_ms": median_ms(DECIDING),
        "commit_to_launch_ms": median_ms(LAUNCHING),
        "host_ms_p90": round(statistics.quantiles([*chain(*beside)] * 2, n=10)[-1] * 1e3, 4),  # of one step, too
        "mean_ms_by_part": {
            name: round(statistics.mean(step.get(name, 0.0) for step in parts.steps) * 1e3, 4) for name in names
        },
        "median_ms_by_part": {name: median_ms((name,)) for name in names},
        "acceptance_length": round(run.tokens_per_step, 3),
        "draft_rows_per_step": round(run.draft_rows / len(run.step_s), 2),
    }


def profile(bench: Lab, workload: Workload, contender: Contender, options: Options) -> list[str]:
    """The functions that took most, forward included: own time, beside the instrumented runs."""
    profiler = cProfile.Profile()
    load = [(SIZE, SIZE * (4 if options.is_quick else STEPS // 3))]
    profiler.enable()
    bench.driver.run(workload.records, load, contender)
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(SHOWN)
    return [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]


@refusing_bad_input()
def main() -> None:
    started_s = time.perf_counter()
    options = read_options(__doc__, (RECORDED,))
    (forced,) = recorded_sets(options)
    results: dict[str, Any] = {}
    for model, workload in (("bundled", own_text(options)), ("90m", forced)):
        with lab(model, num_threads=1) as bench:
            bench.use(new_drafter(options.drafter), workload.warm)
            contenders = (fixed(0), fixed(4), bench.adaptive())
            results[model] = {
                "workload": workload.name,
                "contenders": {each.name: measure(bench, workload, each, options) for each in contenders},
                "profile": profile(bench, workload, contenders[-1], options),
            }
    write(options, "overhead", {"requests": SIZE, "models": results}, started_s)


if __name__ == "__main__":
    main()
