"""The output of `batchserve bench serve`: a table on standard output, and everything as JSON data."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from batchserve.bench.load_records import PERCENTILES
from batchserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchserve.bench.load_prompts import LoadPrompts
    from batchserve.bench.load_records import RequestRecord, Summary
    from batchserve.bench.serve_options import ServeBenchOptions

BUSY_SHARE = 0.7  # of one core, which is all that the client can use

LEGEND = (
    "TTFT: due to first token. TPOT: (E2E - TTFT) / (output tokens - 1). ITL: between deltas; n tokens of one count as "
    "n gaps of an n-th. E2E: due to last token."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """A finished or interrupted measurement. client_cpu: the client's own CPU time over the duration."""

    model: str
    records: list[RequestRecord]
    summary: Summary
    client_cpu: float
    is_interrupted: bool = False
    num_warmup: int = 0  # requests before the measured ones


def show_report(options: ServeBenchOptions, prompts: LoadPrompts, measured: Measurement) -> None:
    """Prints the figures, the latencies, and what to know to read them."""
    console = Console(highlight=False)
    console.print(f"{target_of(options)}, model {measured.model}", soft_wrap=True, markup=False)
    console.print(_load_text(options, prompts), soft_wrap=True, markup=False)
    figures = Table(box=None, show_header=False, pad_edge=False)
    figures.add_column(no_wrap=True)
    figures.add_column(justify="right", no_wrap=True)
    figures.add_column()
    for row in _figures(options, measured):
        figures.add_row(*map(escape, row))
    console.print(figures)
    console.print(_latency_table(measured.summary))
    console.print(LEGEND, soft_wrap=True, markup=False)
    for note in _notes(prompts, measured):
        console.print(note, soft_wrap=True, markup=False)


def target_of(options: ServeBenchOptions) -> str:
    if options.grpc is not None:
        return f"grpc {options.grpc} {options.endpoint}"
    return f"{options.url} {options.endpoint}"


def as_json(options: ServeBenchOptions, prompts: LoadPrompts, measured: Measurement) -> dict[str, Any]:
    """Returns everything as JSON data. Durations are in seconds unless a name ends in _ms."""
    asked = {name: value for name, value in dataclasses.asdict(options).items() if value is not None}
    summary = dataclasses.asdict(measured.summary)
    return {
        "version": __version__,
        "target": target_of(options),
        "model": measured.model,
        "prompts": prompts.description,
        "options": {name: _plain(value) for name, value in asked.items()},
        "is_interrupted": measured.is_interrupted,
        "client_cpu": round(measured.client_cpu, 4),
        "summary": {name: _plain(value) for name, value in summary.items()},
        "requests": [_record(record) for record in sorted(measured.records, key=lambda record: record.number)],
    }


def _record(record: RequestRecord) -> dict[str, Any]:
    fields = dataclasses.asdict(record)
    fields |= {"ttft_s": record.ttft_s, "tpot_s": record.tpot_s, "e2e_s": record.e2e_s}
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    """Returns JSON data: floats of microseconds, infinity as text, paths as text."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, int | str) else str(value)


def _load_text(options: ServeBenchOptions, prompts: LoadPrompts) -> str:
    extent = f"{options.num_requests} requests" if options.duration_s is None else f"{options.duration_s:g} s"
    if options.rate is None:
        load = f"closed loop, {options.concurrency} at once"
    elif options.rate == math.inf:
        load = "open loop, all at once"
    else:
        process = "Poisson" if options.burstiness == 1 else f"gamma of burstiness {options.burstiness:g}"
        load = f"open loop, {options.rate:g} requests/s ({process})"
    return f"{load}; {extent}; {prompts.description}; seed {options.seed}"


def _figures(options: ServeBenchOptions, measured: Measurement) -> Iterator[tuple[str, str, str]]:
    """Yields (name, value, explanation)."""
    summary = measured.summary
    why = ", ".join(f"{count} {reason}" for reason, count in summary.failures.items())
    yield "requests completed", str(summary.num_completed), ""
    yield "requests failed", str(summary.num_failed), why
    if summary.num_unfinished:
        yield "interrupted", str(summary.num_unfinished), "in flight, not counted"
    yield "duration", f"{summary.duration_s:.2f}", "s"
    yield "requests", f"{summary.requests_per_s:.2f}", "completed a second"
    yield "output tokens", f"{summary.output_tokens_per_s:.1f}", f"a second ({summary.output_tokens} in all)"
    if summary.total_tokens_per_s is not None:
        yield "all tokens", f"{summary.total_tokens_per_s:.1f}", f"a second, with {summary.prompt_tokens} of prompts"
    if options.slo is not None and summary.good_requests_per_s is not None:
        bounds = f"{summary.num_good} within {options.slo.describe()}"
        yield "goodput", f"{summary.good_requests_per_s:.2f}", f"a second ({bounds})"
    if not summary.num_completed:
        return
    late = f"; requests sent {summary.late_s * 1e3:.1f} ms late at most" if options.rate is not None else ""
    yield "client", f"{measured.client_cpu:.0%}", f"of a core{late}"


def _latency_table(summary: Summary) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("ms", no_wrap=True)
    for name in ("mean", *(f"p{percent}" for percent in PERCENTILES), "values"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, latency in summary.latencies.items():
        if latency is None:
            table.add_row(name, *["-"] * (len(PERCENTILES) + 1), "0")
        else:
            values = (latency.mean_ms, *latency.percentiles_ms.values())
            table.add_row(name, *(f"{value:.2f}" for value in values), str(latency.count))
    return table


def _notes(prompts: LoadPrompts, measured: Measurement) -> Iterator[str]:
    summary = measured.summary
    if shared := summary.num_by_counting.get("answer"):
        yield (
            f"The server told only the tokens of the whole answer, of {shared} requests: their deltas share them "
            "evenly, which makes ITL an estimate."
        )
    if counted := summary.num_by_counting.get("text"):
        yield f"The server told no tokens of {counted} requests: each of their deltas with text counts as one token."
    if summary.total_tokens_per_s is None and summary.num_completed:
        yield "The server did not tell how many tokens prompts have."
    if prompts.num_different is not None and measured.num_warmup + len(measured.records) > prompts.num_different:
        yield (
            f"There are {prompts.num_different} different prompts, so that some were asked more than once: a server "
            "that remembers prompts or answers looks faster than with new ones."
        )
    if measured.client_cpu > BUSY_SHARE and summary.num_completed:
        yield "The client itself was busy: the server may be faster than these figures."
    if measured.is_interrupted:
        yield "Interrupted: these are the figures so far."
