"""The output of tuning: progress on standard error, a table and a command on standard output, two plots."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from batchserve.bench.tokenizer import require
from batchserve.decoding_length.step_time import CRITICAL_RATIO, StepLoad, StepTimeModel
from batchserve.tune.sweep import Listener, by_setting, threads_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batchserve.tune.options import TuneOptions
    from batchserve.tune.recommend import Recommendation
    from batchserve.tune.sweep import Measured, Repeated, Results, StepTimes

REFRESH_PER_S = 2  # low, because the bar shares the CPU with the measurement


@contextmanager
def sweep_progress(options: TuneOptions, num_requests: int) -> Iterator[Listener]:
    """Shows a bar over all requests of all settings. Without a terminal it prints one line per setting."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, refresh_per_second=REFRESH_PER_S, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=options.num_runs * num_requests)

        def setting_done(measured: Measured) -> None:
            if not console.is_terminal:
                console.print(f"{measured.setting}: {measured.tokens_per_s:.0f} tokens/s", soft_wrap=True)

        yield Listener(
            say=lambda line: progress.update(task, description=escape(line[:60])),
            request_done=lambda: progress.advance(task),
            setting_done=setting_done,
        )


def show(
    options: TuneOptions, num_requests: int, results: Results, recommendation: Recommendation, *, is_written: bool
) -> None:
    """Prints one row per setting, the step times, and last the recommended command line."""
    console = Console(highlight=False)
    how_often = "once" if options.num_repeats == 1 else f"{options.num_repeats} times"
    title = escape(f"{options.config.model}: {num_requests} requests a setting, {how_often}; medians")
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("threads", "seqs", "drafts", *_COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    measured = by_setting(results.measured)
    previous = measured[0].setting.num_threads
    for each in measured:
        if each.setting.num_threads != previous:
            table.add_section()
        previous = each.setting.num_threads
        table.add_row(
            str(each.setting.num_threads),
            str(each.setting.max_num_seqs),
            "adaptive" if each.setting.is_adaptive else "off",
            *(form(each) for form in _COLUMNS.values()),
            style="bold" if each.setting == recommendation.measured.setting else None,
        )
    console.print(table)
    for times in results.step_times:
        console.print(
            f"{threads_text(times.num_threads)}: a step of {times.table.rows[0]} rows takes "
            f"{times.table.seconds[0] * 1e3:.2f} ms; critical decoding length {times.critical_length} rows",
            soft_wrap=True,
        )
    console.print(
        "seqs: max_num_seqs, all in flight. TPOT: a request's first to last token over the tokens behind the first; "
        "percentiles are over requests, TTFT is their median. +-: half the spread of tokens/s over the runs. tokens a "
        "step: of one request. K: its draft rows a step.",
        soft_wrap=True,
    )
    if len(results.measured) < options.num_runs:
        console.print(
            f"ended early: {len(measured)} of {options.num_settings} settings were measured, in "
            f"{len(results.measured)} of {options.num_runs} runs",
            soft_wrap=True,
        )
    if is_written:
        console.print(escape(f"written to {options.out}"), soft_wrap=True)
    console.print(escape(recommendation.reason), soft_wrap=True)
    console.print(escape(recommendation.command), soft_wrap=True)


def require_matplotlib() -> Any:
    """Returns matplotlib's figure module, which has no global state. Raises ConfigError if it is not installed."""
    return require("matplotlib.figure", "plots (--no-plots goes without)")


def plot_frontier(
    path: Path, options: TuneOptions, measured: Sequence[Repeated], recommendation: Recommendation
) -> None:
    """Plots tokens per second against p50 and p99 time per output token, one line per thread count and mode."""
    figure = require_matplotlib().Figure(figsize=(10.0, 4.5), layout="constrained")
    groups: dict[tuple[int, bool], list[Repeated]] = {}
    for each in measured:
        groups.setdefault((each.setting.num_threads, each.setting.is_adaptive), []).append(each)
    colours = {num_threads: f"C{i}" for i, num_threads in enumerate(options.thread_counts)}
    both = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(both, ("p50", "p99"), strict=True):
        for (num_threads, is_adaptive), group in groups.items():
            points = [_point(each, name) for each in group]
            axes.plot(
                *zip(*points, strict=True),
                color=colours[num_threads],
                linestyle="-" if is_adaptive else "--",
                marker="o",
                label=f"{threads_text(num_threads)}, {'adaptive' if is_adaptive else 'off'}",
            )
            for point, each in zip(points, group, strict=True):
                text = str(each.setting.max_num_seqs)
                axes.annotate(text, point, textcoords="offset points", xytext=(4, -10), fontsize=8)
        axes.plot(*frontier(measured, name), color="0.7", linewidth=5, zorder=0, label="frontier")
        best = recommendation.measured
        axes.plot(*_point(best, name), "*", color="k", markersize=14, label="recommended")
        axes.set_xlabel(f"{name} time per output token (ms); numbers: max_num_seqs")
        axes.grid(alpha=0.3)
    if options.tpot_target_ms is not None:
        both[1].axvline(options.tpot_target_ms, color="k", linestyle=":", label="target")
    both[0].set_ylabel("tokens per second")
    both[1].legend(fontsize=8)
    figure.savefig(path, format="png", dpi=150)


def _point(each: Repeated, name: str) -> tuple[float, float]:
    return each.median(f"{name}_tpot_s") * 1e3, each.median("tokens_per_s")


def frontier(measured: Sequence[Repeated], name: str) -> tuple[list[float], list[float]]:
    """Returns (milliseconds, tokens per second) of the settings that no other beats in both, lowest TPOT first."""
    points = sorted((milliseconds, -rate) for milliseconds, rate in (_point(each, name) for each in measured))
    best: list[tuple[float, float]] = []
    for milliseconds, negative in points:
        if milliseconds == milliseconds and (not best or -negative > best[-1][1]):  # nan: no TPOT is known
            best.append((milliseconds, -negative))
    return [x for x, _ in best], [y for _, y in best]


def plot_step_times(path: Path, step_times: Sequence[StepTimes]) -> None:
    """Plots step time by number of rows, one line per thread count, with its critical decoding length."""
    figure = require_matplotlib().Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, times in enumerate(step_times):
        model, critical = StepTimeModel(times.table), times.critical_length
        rows = range(1, times.table.rows[-1] + 1)
        milliseconds = [model.predict(StepLoad(count, count, 1)) * 1e3 for count in rows]
        label = f"{threads_text(times.num_threads)}, critical length {critical}"
        axes.plot(rows, milliseconds, color=f"C{i}", label=label)
        axes.plot(times.table.rows, np.interp(times.table.rows, rows, milliseconds), ".", color=f"C{i}")
        axes.axvline(critical, color=f"C{i}", linestyle=":")
        axes.plot(critical, milliseconds[critical - 1], "o", color=f"C{i}", markersize=9, fillstyle="none")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("rows of one step")
    axes.set_ylabel("step time (ms)")
    axes.set_title(f"critical decoding length: rows within {CRITICAL_RATIO:g} x the time of the fewest", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


# The columns fit into 80 characters, even if answers take minutes.
_COLUMNS: dict[str, Callable[[Repeated], str]] = {
    "tokens\n/s": lambda each: f"{each.median('tokens_per_s'):.0f}",
    "+-\n%": lambda each: _spread(each),
    "TPOT p50\n(ms)": lambda each: f"{each.median('p50_tpot_s') * 1e3:.2f}",
    "TPOT p99\n(ms)": lambda each: f"{each.median('p99_tpot_s') * 1e3:.2f}",
    "TTFT\n(ms)": lambda each: f"{each.median('p50_ttft_s') * 1e3:.0f}",
    "tokens\na step": lambda each: f"{each.median('acceptance_length'):.2f}",
    "K": lambda each: f"{each.median('draft_rows_per_request'):.1f}",
}


def _spread(each: Repeated) -> str:
    """Formats half the range from the slowest to the fastest run, as a percentage of the median."""
    low, high = each.range("tokens_per_s")
    return "-" if len(each.runs) == 1 else f"{50 * (high - low) / each.median('tokens_per_s'):.0f}"
