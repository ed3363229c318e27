"""The output of a replay: a table on standard output, a plot in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from batchserve.bench.tokenizer import require
from batchserve.config import MiB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchserve.bench.options import ReplayOptions
    from batchserve.bench.replay import ReplayResult


def show_results(options: ReplayOptions, results: Sequence[ReplayResult], num_warm: int, num_measured: int) -> None:
    """Prints one row per drafter and number of draft tokens."""
    console = Console(highlight=False)
    title = _title(options, results[0].tokens, num_warm, num_measured)
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("drafter", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    previous = ""
    for result in results:
        if previous not in ("", result.drafter):
            table.add_section()
        previous = result.drafter
        table.add_row(result.drafter, *(form(result) for form in _COLUMNS.values()))
    console.print(table)
    console.print(
        "acceptance length: tokens of one step, the accepted drafts and one more; a response's first token is not "
        "counted. retrieve: one call for the drafts of a step. update: one token told to the drafter.",
        soft_wrap=True,
    )


def require_matplotlib() -> Any:
    """Returns matplotlib's figure module, which has no global state. Raises ConfigError if it is not installed."""
    return require("matplotlib.figure", "plot")


def plot_results(path: Path, options: ReplayOptions, results: Sequence[ReplayResult]) -> None:
    """Plots acceptance length against draft tokens per step: a line per drafter, a dot per max_draft_tokens."""
    figure = require_matplotlib().Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in options.drafters:
        dots = sorted(
            (r.draft_tokens_per_step, r.acceptance_length, r.max_draft_tokens) for r in results if r.drafter == name
        )
        axes.plot([dot[0] for dot in dots], [dot[1] for dot in dots], marker="o", label=name)
        for x, y, max_draft_tokens in dots:
            axes.annotate(str(max_draft_tokens), (x, y), textcoords="offset points", xytext=(4, -10), fontsize=8)
    axes.set_xlabel("draft tokens per step (dots: the most allowed)")
    axes.set_ylabel("acceptance length, tokens per step")
    axes.set_title(f"{options.file.name}{_warm_text(options)}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def _title(options: ReplayOptions, num_tokens: int, num_warm: int, num_measured: int) -> str:
    streams = "one stream" if options.streams == 1 else f"{options.streams} streams"
    warm = f", {num_warm} seen before" if num_warm else ""
    return escape(f"{options.file.name}: {num_measured} requests, {num_tokens} tokens{warm}, {streams}")


def _warm_text(options: ReplayOptions) -> str:
    if options.warm_file is not None:
        return f", warm ({options.warm_file.name})"
    return f", warm (first {options.warm_share:.0%})" if options.warm_share is not None else ", cold"


# The columns fit into 80 characters.
_COLUMNS: dict[str, Callable[[ReplayResult], str]] = {
    "drafts\nat most": lambda r: str(r.max_draft_tokens),
    "acceptance\nlength": lambda r: f"{r.acceptance_length:.2f}",
    "drafts\na step": lambda r: f"{r.draft_tokens_per_step:.1f}",
    "retrieve\n(us)": lambda r: f"{r.retrieve_us:.1f}",
    "update\n(us)": lambda r: f"{r.update_us:.2f}",
    "memory\n(MiB)": lambda r: f"{r.memory_bytes / MiB:.1f}",
    "steps": lambda r: str(r.steps),
}
