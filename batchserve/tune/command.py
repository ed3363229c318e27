"""`batchserve tune`: sweep, show, write, recommend."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchserve.config import EngineConfig
from batchserve.errors import ConfigError
from batchserve.tune.sweep import sweep_threads
from batchserve.tune.view import plot_frontier, plot_step_times, require_matplotlib, show, sweep_progress
from batchserve.tune.workload import load_workload
from batchserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.tune.sweep import Measured, StepTimes
    from batchserve.tune.workload import Count, WorkloadRequest

REQUESTS_PER_SEQ = 4
PERCENTILE = "p99 time per output token"  # over requests


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What to sweep and on what; `batchserve tune --help` explains each option.

    config: of the server, whatever the sweep decides left out. serve_flags: what it is given as on the command line.
    Raises ConfigError.
    """

    config: EngineConfig
    workload: Path
    max_num_seqs: tuple[int, ...] = (2, 4, 8, 16)
    threads: tuple[int, ...] | None = None
    tpot_target_ms: float | None = None
    num_requests: int | None = None
    out: Path = Path("batchserve-tune")
    has_plots: bool = True
    serve_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        cores = available_cores()
        if self.threads is None:
            object.__setattr__(self, "threads", tuple(sorted({n for n in (cores // 4, cores // 2, cores) if n})))
        for name, values in (("max_num_seqs", self.max_num_seqs), ("threads", self.thread_counts)):
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} = {', '.join(map(str, values))}: must name each only once")
            if min(values) < 1:
                raise ConfigError(f"{name} = {min(values)}: must be at least 1")
        if max(self.thread_counts) > cores:
            raise ConfigError(f"threads = {max(self.thread_counts)}: must be at most {cores}, this machine's cores")
        if self.num_requests is not None and self.num_requests < max(self.max_num_seqs):
            raise ConfigError(
                f"requests = {self.num_requests}: must be at least max_num_seqs = {max(self.max_num_seqs)}"
            )
        for num_threads in self.thread_counts:
            self.engine_config(num_threads)
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"out = {str(self.out)!r}: must be a folder")

    @property
    def thread_counts(self) -> tuple[int, ...]:
        return self.threads or ()

    @property
    def most_requests(self) -> int:
        return self.num_requests or REQUESTS_PER_SEQ * max(self.max_num_seqs)

    def engine_config(self, num_threads: int) -> EngineConfig:
        """One engine for all that is measured with so many threads. Raises ConfigError."""
        return dataclasses.replace(
            self.config,
            num_threads=num_threads,
            max_num_seqs=max(self.max_num_seqs),
            tpot_target_ms=self.tpot_target_ms,
            adaptive=True,
            decoding_length=None,
            wait_for_drafter=True,
        )


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One measured setting, why it, and the command line that serves with it."""

    measured: Measured
    meets_target: bool | None  # None: there is no target
    reason: str
    command: str


def run_tune(options: TuneOptions) -> int:
    """Measure, show, write; returns the exit status. Raises ConfigError, for bad input before a model is loaded."""
    if options.has_plots:
        require_matplotlib()
    requests = read_workload(options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out = {str(options.out)!r}: cannot be made: {error.strerror}") from error

    step_times: list[StepTimes] = []
    measured: list[Measured] = []
    with sweep_progress(options, len(requests)) as listener:
        for num_threads in options.thread_counts:
            config = options.engine_config(num_threads)
            times, done = sweep_threads(config, options.max_num_seqs, requests, listener)
            step_times.append(times)
            measured += done
    kv_cache_bytes = {times.num_threads: times.kv_cache_bytes for times in step_times}
    recommendation = recommend(options, measured, kv_cache_bytes)
    try:
        written = as_json(options, len(requests), step_times, measured, recommendation)
        (options.out / "tune.json").write_text(json.dumps(written, indent=1) + "\n")
        if options.has_plots:
            plot_frontier(options.out / "frontier.png", options, measured, recommendation)
            plot_step_times(options.out / "step_time.png", step_times)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from error
    finally:  # an hour's measurement is not lost to a full disk
        show(options, len(requests), step_times, measured, recommendation)
    return 0


def read_workload(options: TuneOptions) -> list[WorkloadRequest]:
    """Raises ConfigError."""
    requests = load_workload(options.workload, _counter(options.config), options.most_requests)
    least = options.num_requests or max(options.max_num_seqs)
    if len(requests) < least:
        name = "requests" if options.num_requests else "max_num_seqs"
        raise ConfigError(
            f"workload = {str(options.workload)!r}: holds {len(requests)} requests, must be at least {name} = {least}"
        )
    if all(request.max_tokens == 1 for request in requests):
        raise ConfigError(
            f"workload = {str(options.workload)!r}: max_tokens = 1 everywhere: must be at least 2 somewhere, as there "
            "is no time per output token otherwise"
        )
    return requests


def _counter(config: EngineConfig) -> Count:
    """Counts the tokens of a text; the model's tokenizer is loaded when it is first needed."""
    tokenizer: Any = None

    def count(text: str) -> int:
        nonlocal tokenizer
        if tokenizer is None:
            from batchserve.runner.loader import load_tokenizer, resolve_model

            tokenizer = load_tokenizer(resolve_model(config.model), config)
            if tokenizer is None:
                raise ConfigError(f"model = {config.model!r}: has no tokenizer to read the workload's texts with")
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count


def recommend(options: TuneOptions, measured: Sequence[Measured], kv_cache_bytes: Mapping[int, int]) -> Recommendation:
    """The highest throughput whose p99 TPOT meets the target; where none does, the lowest p99 TPOT.

    kv_cache_bytes: the K/V memory that was measured with, by the number of threads.
    """
    known = [each for each in measured if not math.isnan(each.p99_tpot_s)]
    if not known:
        raise ConfigError(f"workload = {str(options.workload)!r}: no answer has a second token: nothing to compare")
    target_ms = options.tpot_target_ms
    meeting = known if target_ms is None else [each for each in known if each.p99_tpot_s * 1e3 <= target_ms]
    if meeting:
        best = max(meeting, key=lambda each: each.tokens_per_s)
        bound = "no target was given" if target_ms is None else f"{PERCENTILE} <= {target_ms:g} ms"
        reason = f"the highest throughput ({bound}): {_figures(best)}"
    else:
        best = min(known, key=lambda each: each.p99_tpot_s)
        reason = f"no setting has a {PERCENTILE} <= {target_ms:g} ms; the lowest: {_figures(best)}"
    command = serve_command(options, best, kv_cache_bytes[best.setting.num_threads])
    return Recommendation(best, None if target_ms is None else bool(meeting), reason, command)


def _figures(each: Measured) -> str:
    return f"{each.tokens_per_s:.0f} tokens/s, {PERCENTILE} {each.p99_tpot_s * 1e3:.1f} ms ({each.setting})"


def serve_command(options: TuneOptions, best: Measured, kv_cache_bytes: int) -> str:
    """The command line of a server with this setting, and with the K/V memory that it was measured with."""
    setting = best.setting
    flags = ["--max-num-seqs", str(setting.max_num_seqs), "--num-threads", str(setting.num_threads)]
    if options.config.kv_cache_memory is None and setting.max_num_seqs < max(options.max_num_seqs):
        flags += ["--kv-cache-memory", str(kv_cache_bytes)]  # fewer requests would be given less
    if not setting.is_adaptive:
        flags += ["--decoding-length", "0"]
    elif options.tpot_target_ms is not None:
        flags += ["--tpot-target-ms", f"{options.tpot_target_ms:g}"]
    return shlex.join(["batchserve", "serve", *options.serve_flags, *flags])


def as_json(
    options: TuneOptions,
    num_requests: int,
    step_times: Sequence[StepTimes],
    measured: Sequence[Measured],
    recommendation: Recommendation,
) -> dict[str, Any]:
    """Everything; an unknown figure is null."""
    return {
        "version": __version__,
        "model": options.config.model,
        "workload": options.workload.name,
        "num_requests": num_requests,
        "tpot_target_ms": options.tpot_target_ms,
        "percentile": f"{PERCENTILE}, over requests, nearest rank",
        "results": [_flat(each) for each in measured],
        "step_times": [
            {
                "num_threads": times.num_threads,
                "critical_length": times.critical_length,
                **dataclasses.asdict(times.table),
            }
            for times in step_times
        ],
        "recommended": {
            **_flat(recommendation.measured),
            "meets_target": recommendation.meets_target,
            "reason": recommendation.reason,
            "command": recommendation.command,
        },
    }


def _flat(each: Measured) -> dict[str, Any]:
    figures = dataclasses.asdict(each)
    setting = figures.pop("setting")
    return {**setting, **{name: None if math.isnan(value) else round(value, 6) for name, value in figures.items()}}


def available_cores() -> int:
    """Of this process, which may have been given a part of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
