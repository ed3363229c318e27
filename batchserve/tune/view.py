"""The output of tuning: progress on standard error, a table and a command on standard output."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from batchserve.tune.sweep import Listener, by_setting, threads_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from batchserve.tune.options import TuneOptions
    from batchserve.tune.recommend import Recommendation
    from batchserve.tune.sweep import Measured, Repeated, Results

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
    options: TuneOptions,
    num_requests: int,
    results: Results,
    recommendation: Recommendation,
    written: Sequence[Path] = (),
) -> None:
    """Prints one row per setting, the step times, the files written, and last the recommended command line."""
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
        "seqs: max_num_seqs, all in flight. TPOT: a request's first to last token over the tokens after the first; "
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
    for path in written:
        console.print(escape(f"written to {path}"), soft_wrap=True)
    console.print(escape(recommendation.reason), soft_wrap=True)
    console.print(escape(recommendation.command), soft_wrap=True)


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
