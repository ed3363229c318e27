"""`batchserve tune`: runs the sweep, recommends a setting, and writes and shows the results."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from typing import TYPE_CHECKING, Any

from batchserve.errors import ConfigError
from batchserve.files import check_writable, writing
from batchserve.tune.recommend import COMPARED, PERCENTILE, recommend
from batchserve.tune.report import make_report
from batchserve.tune.sweep import FIGURES, Results, by_setting, sweep_threads
from batchserve.tune.view import show, sweep_progress
from batchserve.tune.workload import load_workload
from batchserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from batchserve.config import EngineConfig
    from batchserve.tune.options import TuneOptions
    from batchserve.tune.recommend import Recommendation
    from batchserve.tune.sweep import Repeated
    from batchserve.tune.workload import Count, WorkloadRequest


def run_tune(options: TuneOptions) -> int:
    """Measures, writes, shows. Returns the exit status. Raises ConfigError, for bad input before a model is loaded.

    Whatever ends the sweep early, including Ctrl-C, is raised after the results so far have been reported.
    """
    if options.html is not None:
        check_writable(options.html, "html")
    requests = read_workload(options)
    if options.out is not None:
        _make_folder(options.out)
    results = Results()
    try:
        with sweep_progress(options, len(requests)) as listener:
            for rounds, num_threads in sweep_order(options):
                config = options.engine_config(num_threads)
                sweep_threads(config, options.max_num_seqs, requests, results, listener, rounds)
    finally:
        if results.measured:
            _report(options, len(requests), results)
    return 0


def sweep_order(options: TuneOptions) -> list[tuple[Sequence[int], int]]:
    """Returns (rounds, threads) of each engine. Thread counts take turns, although each turn loads the model again."""
    rounds = range(options.num_repeats)
    if len(options.thread_counts) == 1:
        return [(rounds, options.thread_counts[0])]
    return [((each,), n) for each in rounds for n in options.thread_counts[:: -1 if each % 2 else 1]]


def _report(options: TuneOptions, num_requests: int, results: Results) -> None:
    kv_cache_bytes = {times.num_threads: times.kv_cache_bytes for times in results.step_times}
    recommendation = recommend(options, results.measured, kv_cache_bytes)
    written: list[Path] = []
    try:
        if options.out is not None:
            with writing(options.out / "tune.json") as path:
                path.write_text(json.dumps(as_json(options, num_requests, results, recommendation), indent=1) + "\n")
            written.append(path)
        if options.html is not None:
            with writing(options.html) as path:
                path.write_text(make_report(options, num_requests, results, recommendation))
            written.append(options.html)
    finally:  # a full disk must not lose an hour of measurements
        show(options, num_requests, results, recommendation, written)


def _make_folder(out: Path) -> None:
    """Makes the output folder and checks that it is writable, before the long sweep. Raises ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out = {str(out)!r}: cannot be made: {error.strerror}") from error
    try:
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"out = {str(out)!r}: cannot be written to: {error.strerror}") from error


def read_workload(options: TuneOptions) -> list[WorkloadRequest]:
    """Reads and checks the requests of the workload. Raises ConfigError."""
    requests = load_workload(options.workload, _counter(options.config), options.max_requests)
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
    """Returns a function that counts the tokens of a text. It loads the model's tokenizer on first use."""
    tokenizer: Any = None

    def count(text: str) -> int:
        nonlocal tokenizer
        if tokenizer is None:
            from batchserve.runner.model_folder import resolve_model
            from batchserve.runner.tokenizer import load_tokenizer

            tokenizer = load_tokenizer(resolve_model(config.model), config)
            if tokenizer is None:
                raise ConfigError(f"model = {config.model!r}: has no tokenizer to read the workload's texts with")
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count


def as_json(
    options: TuneOptions, num_requests: int, results: Results, recommendation: Recommendation
) -> dict[str, Any]:
    """Returns all results as JSON data. An unknown figure is null."""
    return {
        "version": __version__,
        "model": options.config.model,
        "workload": options.workload.name,
        "num_requests": num_requests,
        "num_repeats": options.num_repeats,
        "is_complete": len(results.measured) == options.num_runs,
        "tpot_target_ms": options.tpot_target_ms,
        "percentile": f"{PERCENTILE}, over requests, nearest rank",
        "results": [_flat(each) for each in by_setting(results.measured)],
        "step_times": [
            {
                "num_threads": times.num_threads,
                "critical_length": times.critical_length,
                **dataclasses.asdict(times.table),
            }
            for times in results.step_times
        ],
        "recommended": {
            **_flat(recommendation.measured),
            "meets_target": recommendation.meets_target,
            "reason": recommendation.reason,
            "command": recommendation.command,
        },
        "cannot_be_told_apart": [dataclasses.asdict(each.setting) for each in recommendation.equals],
    }


def _flat(each: Repeated) -> dict[str, Any]:
    """Returns the medians, and the values of all runs for the figures that settings are compared by."""

    def plain(value: float) -> float | None:
        return None if math.isnan(value) else round(value, 6)

    return {
        **dataclasses.asdict(each.setting),
        **{name: plain(each.median(name)) for name in FIGURES},
        **{f"{name}_runs": [plain(getattr(run, name)) for run in each.runs] for name in COMPARED},
    }
