"""What the host does for a step of the GPU path at 16 requests, measured where there is no GPU.

    python -m benchmarks.adaptive.device_host FOLDER [--quick]

The path is the real one, with graphs, slots, pinned buffers and the device's sampler, but for the device and the kernel
(torch, which plans nothing): a graph's replay does nothing, and what a step would have given is made up from the
recorded answers while it is waited for, for as long as a step of a 7B model takes on a large GPU, however many rows it
has. So rows look free, and drafts become as large as they would be there. The device has nothing to do while the host
reads what came back, in the gap from wait()'s end to launch() (benchmarks/gpu/gap.py has the same), and in the launch
itself, up to the replay; answers are published behind that. Of the gap's parts another run tells. One core for
everything; and once more with a second thread for the drafter. The same also with steps one right behind the other,
while the engine's clock goes on as if the device had been waited for: that is what the code itself takes, whoever else
uses the machine meanwhile.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from batchserve.bench.replay import ReplayRecord
from batchserve.native import pool
from batchserve.runner.queued_step import QueuedStep
from batchserve.sampling.device import DeviceSampler
from batchserve.sampling.verify import VerifiedTokens
from batchserve.startup import modules
from benchmarks.adaptive.driver import Contender, fixed
from benchmarks.adaptive.overhead import Parts, clock_put_forward, instrumented, spin
from benchmarks.adaptive.workloads import Lab, Options, lab, new_drafter, read_options, recorded_sets, say, write
from benchmarks.common import refusing_bad_input

SIZE, STEPS = 16, 200
RECORDED = "gsm_qwen2_7b"
FORWARD_S = 5e-3
MAX_ROWS = 512  # of a graph, and of a step: none is eager


class IdleCapturer:
    """A Capturer whose replays do nothing."""

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        return run(), lambda: None


def wait(step: QueuedStep) -> list[VerifiedTokens | None]:
    """QueuedStep.wait in a device's stead."""
    return step._sampler.to_verified(made_up(step), step._batch, step._verify_on_host)


def made_up(step: QueuedStep) -> np.ndarray:
    """The device's part of a step: takes its time, and gives what the sampler would have sent back."""
    spend()
    sampler, batch = step._sampler, step._batch
    metadata = sampler.build_metadata(batch, len(step._logits), step._forced)
    logits = torch.zeros(len(step._logits), 2)  # the recorded answers say what is behind each row
    return sampler.sample(logits, torch.from_numpy(metadata.blob), metadata.kind).numpy()


def spend() -> None:
    """The time of a step on the device."""
    spin(FORWARD_S)


@contextmanager
def without_pause(bench: Lab) -> Iterator[None]:
    with (
        clock_put_forward(bench) as put_forward,
        mock.patch.object(sys.modules[__name__], "spend", partial(put_forward, FORWARD_S)),
    ):
        yield


@contextmanager
def pretended() -> Iterator[None]:
    with (
        mock.patch.object(modules, "choose_capturer", return_value=IdleCapturer()),
        mock.patch.object(QueuedStep, "wait", wait),
    ):
        yield


@contextmanager
def watched(bench: Lab, parts: Parts, *, is_gap_split: bool) -> Iterator[None]:
    """The launch, the device's own part, what wait() makes of what came back, and publishing; the gap in one or split
    into overhead's parts.
    """
    core = bench.engine.core
    launch, publish = parts.timed("launch", core.executor.launch), parts.timed("publish", core._publish)
    device, reading = parts.timed("device", made_up), parts.timed("reading", DeviceSampler.to_verified)
    with (
        mock.patch.object(core, "_publish", publish),
        mock.patch.object(core.executor, "launch", launch),
        instrumented(bench, parts, is_host_split=is_gap_split),
        mock.patch.object(sys.modules[__name__], "made_up", device),
        mock.patch.object(DeviceSampler, "to_verified", lambda *arguments: reading(*arguments)),
    ):
        yield


def measure(bench: Lab, records: Sequence[ReplayRecord], contender: Contender, options: Options) -> dict[str, Any]:
    bench.driver.run(records, [(SIZE, SIZE * 8)], contender)  # warms up
    load = [(SIZE, SIZE * (6 if options.is_quick else STEPS))]
    found = timed_parts(bench, records, contender, load)
    with without_pause(bench):
        found["without_pause"] = timed_parts(bench, records, contender, load)
    say(f"{contender.name}: {found}")
    return found


def timed_parts(
    bench: Lab, records: Sequence[ReplayRecord], contender: Contender, load: list[tuple[int, int]]
) -> dict[str, Any]:
    whole, parts = Parts(), Parts()
    for timed in (whole, parts):
        with watched(bench, timed, is_gap_split=timed is parts):
            run = bench.driver.run(records, load, contender)

    def median_ms(name: str, timed: Parts = whole) -> float:
        return round(statistics.median(step.get(name, 0.0) for step in timed.steps) * 1e3, 4)

    names = sorted({name for step in parts.steps for name in step} - {"device"})
    return {
        "steps": len(run.step_s),
        "reading_ms": median_ms("reading"),
        "gap_ms": median_ms("other"),
        "launch_ms": median_ms("launch"),
        "publish_ms": median_ms("publish"),
        "median_ms_by_part": {name: median_ms(name, parts) for name in names},
        "draft_rows_per_step": round(run.draft_rows / len(run.step_s), 1),
        "acceptance_length": round(run.tokens_per_step, 3),
    }


@refusing_bad_input()
def main() -> None:
    started_s = time.perf_counter()
    options = read_options(__doc__, (RECORDED,))
    (workload,) = recorded_sets(options)
    changes = {"attention_backend": "torch", "dtype": "float32", "max_num_batched_tokens": MAX_ROWS}
    with pretended(), lab("90m", num_threads=1, **changes) as bench:
        drafter = new_drafter(options.drafter)
        bench.use(drafter, workload.warm)
        contenders = (fixed(0), fixed(4), bench.adaptive())
        cells = {each.name: measure(bench, workload.records, each, options) for each in contenders}
        drafter.use_threads(pool.team(2))
        cells["adaptive, 2 threads"] = measure(bench, workload.records, bench.adaptive(), options)
    about = {"requests": SIZE, "forward_ms": FORWARD_S * 1e3, "workload": workload.name}
    write(options, "device_host", {**about, "contenders": cells}, started_s)


if __name__ == "__main__":
    main()
