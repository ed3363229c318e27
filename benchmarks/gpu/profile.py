"""(c) Where the time of a step goes: the device's kernels by name, and the stages of the launch on the host.

Kernels are seen in a process of their own: once torch's profiler has been on, a process's graphs take the host ten
times as long to replay.
"""

from __future__ import annotations

import functools
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from torch.profiler import ProfilerActivity, profile

from batchserve.attention.paged import PagedBackend
from batchserve.runner import cuda_graphs, queued_step
from batchserve.runner.cuda_graphs import StepGraphs
from batchserve.sampling.device import DeviceSampler
from benchmarks.gpu.kit import Kit, Report
from benchmarks.gpu.models import backend_options
from benchmarks.gpu.step_bench import StepBench

KERNELS = "profile"
CONTEXT = 1024
PROFILED = ((1, 1), (1, 16), (16, 1), (16, 4))  # requests, and rows of each
MAX_REQUESTS, MAX_ROWS = max(size for size, _ in PROFILED), max(size * rows for size, rows in PROFILED)
WARM_STEPS, STEPS, TIMED_STEPS = 3, 4, 40
MAX_SECONDS = 90.0  # of a process that profiles, its engine's start included
MAX_KERNELS, MAX_CHARS = 24, 100
# Each with what it calls: what is in several counts in all of them.
STAGES: dict[str, tuple[Any, str]] = {
    "fill": (StepGraphs, "_fill"),
    "describe sampling": (DeviceSampler, "build_metadata"),
    "describe rows": (cuda_graphs, "step_arrays"),
    "begin step": (PagedBackend, "begin_static"),
    "copy to host": (queued_step.HostCopy, "__init__"),
    "read": (DeviceSampler, "to_verified"),
}


def run(kit: Kit, report: Report, shapes: Sequence[str]) -> None:
    for shape in shapes:
        report.cell(f"{shape}/{KERNELS}", partial(_elsewhere, kit, shape))


def _elsewhere(kit: Kit, shape: str) -> dict[str, Any]:
    """kernels() of a process of its own, which must not take what is left of the part's time with it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, kit, shape), daemon=True)
    process.start()
    theirs.close()  # else its end would not be seen
    try:
        if not ours.poll(MAX_SECONDS):
            raise RuntimeError(f"no profile after {MAX_SECONDS:.0f} s")
        found: dict[str, Any] = ours.recv()
    except EOFError:
        # Not in its own words: a fault of its device is none of this process's.
        raise RuntimeError("the process that was to profile has failed; its error is on stderr") from None
    finally:
        process.kill()
        process.join()
    return found


def _send(pipe: Connection, kit: Kit, shape: str) -> None:
    pipe.send(kernels(kit, shape))


def stages(kit: Kit, bench: StepBench, requests: int, rows: int) -> dict[str, Any]:
    """Microseconds of the host in steps of `requests` requests with so many rows each, medians."""
    with _steps(kit, bench, requests, rows) as step:
        return {**bench.ran_on(), "requests": requests, "rows_each": rows, "host_us": _host_stages(bench, step)}


def kernels(kit: Kit, shape: str) -> dict[str, Any]:
    """Microseconds of the device in such steps, by kernel, means."""
    options = {"max_num_seqs": MAX_REQUESTS, "max_model_len": 2 * CONTEXT, "max_graph_rows": MAX_ROWS}
    bench = StepBench(kit, shape, 1.0, {**options, **backend_options(kit, 128)})
    found: dict[str, Any] = {**bench.ran_on(), "steps": {}}
    for requests, rows in kit.pick(PROFILED, PROFILED[:1]):
        with _steps(kit, bench, requests, rows) as step:
            found["steps"][f"b{requests}/r{rows}"] = _kernels(kit, step)
    return found


@contextmanager
def _steps(kit: Kit, bench: StepBench, requests: int, rows: int) -> Iterator[Callable[[], tuple[float, float, int]]]:
    kit.beat()
    context = kit.pick(CONTEXT, 64)
    with bench.contexts(requests, context, rows) as names:
        rng = random.Random(rows)

        def step() -> tuple[float, float, int]:
            return bench.step(rng, names, context, rows)

        for _ in range(WARM_STEPS):
            step()
        yield step


def _host_stages(bench: StepBench, step: Callable[[], tuple[float, float, int]]) -> dict[str, float]:
    samples: dict[str, list[float]] = {}
    with _timed_stages(samples, bench.runner.graphs):
        steps = [step() for _ in range(TIMED_STEPS)]
    found = {name: statistics.median(of) for name, of in samples.items()}
    found["launch"] = statistics.median(launched for _, launched, _ in steps)
    found["step"] = statistics.median(total for total, _, _ in steps)
    return {name: round(seconds * 1e6, 1) for name, seconds in found.items()}


@contextmanager
def _timed_stages(samples: dict[str, list[float]], graphs: StepGraphs | None) -> Iterator[None]:
    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        of = samples.setdefault(name, [])

        @functools.wraps(call)
        def run(*arguments: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            found = call(*arguments, **options)
            of.append(time.perf_counter() - began_s)
            return found

        return run

    patches = [
        mock.patch.object(owner, name, timed(what, getattr(owner, name))) for what, (owner, name) in STAGES.items()
    ]
    for each in patches:
        each.start()
    kept = {} if graphs is None else {bucket: graph.replay for bucket, graph in graphs._graphs.items()}
    try:
        for bucket, replay in kept.items():
            assert graphs is not None
            object.__setattr__(graphs._graphs[bucket], "replay", timed("replay", replay))
        yield
    finally:
        for bucket, replay in kept.items():
            assert graphs is not None
            object.__setattr__(graphs._graphs[bucket], "replay", replay)
        for each in patches:
            each.stop()
        for name in [name for name, of in samples.items() if not of]:
            del samples[name]


def _kernels(kit: Kit, step: Callable[[], Any]) -> dict[str, Any]:
    """By kernel: how often a step has it, and how long all of these take together."""
    activities = [ProfilerActivity.CPU if kit.is_dry else ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step()
        kit.sync()
    times = {
        each.key: (
            each.count / STEPS,
            (each.self_cpu_time_total if kit.is_dry else each.self_device_time_total) / STEPS,
        )
        for each in profiler.key_averages()
    }
    ordered = sorted(times.items(), key=lambda each: -each[1][1])
    return {
        "kernels": round(sum(count for count, _ in times.values())),
        "kernels_us": round(sum(us for _, us in times.values()), 1),
        "by_kernel": [
            {"name": name[:MAX_CHARS], "count": round(count, 2), "us": round(us, 1)}
            for name, (count, us) in ordered[:MAX_KERNELS]
        ],
    }
