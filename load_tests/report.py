"""The report of `make load` as one HTML file: what the stages measured, speculation on against off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchserve.html_report import Report, Table
from batchserve.svg_plot import Plot, Series

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MODES = ("on", "off")  # which are the colours, too
LATENCIES = (("ttft_ms", "Time to first token"), ("inter_token_ms", "Inter-token latency"))


def make_report(measured: Mapping[str, Any]) -> str:
    """Returns the page. measured: as load_tests/run.py writes it with --out."""
    stages = sorted(measured["stages"], key=lambda stage: (stage["users"], MODES.index(stage["speculation"])))
    server, machine = measured["server"], measured["machine"]
    report = Report(f"batchserve under load: {server['model']}")
    options = " ".join(measured["server_options"]) or "none"
    report.facts(
        [*server.items(), ("server options", options), *machine.items(), ("seconds a stage", _seconds(stages))]
    )
    report.text(
        "Users in a closed loop, over gRPC: each sends its next request when the last answer is complete. Clients and "
        "server share this machine's cores."
    )
    report.heading("Tokens a second")
    report.plot(_plot("tokens a second", "tokens a second", stages, {"": lambda stage: stage["tokens_per_s"]}))
    columns = ("users", "speculation", "tokens/s", "answered", "measured", "failed", "tokens a step")
    report.table(Table(columns, [_throughput_row(stage) for stage in stages], num_texts=0))
    for name, title in LATENCIES:
        report.heading(title)
        report.plot(
            _plot(title, f"{title.lower()} (ms)", stages, {"p50": _figure(name, "p50"), "p99": _figure(name, "p99")})
        )
        report.table(
            Table(
                ("users", "speculation", "mean ms", "p50 ms", "p90 ms", "p99 ms"),
                [_latency_row(stage, name) for stage in stages],
                num_texts=0,
            )
        )
    report.text(
        "Measured are the requests that lie wholly inside a stage's measured time. A delta of n tokens that comes g "
        "after the one before counts as n tokens of g / n."
    )
    return report.html()


def _plot(
    title: str, y_label: str, stages: Sequence[dict[str, Any]], figures: Mapping[str, Callable[[Any], float]]
) -> Plot:
    """Each figure against the number of users, one line per mode. Figures after the first have dashed lines."""
    series = [
        Series(
            f"speculation {mode}{', ' if name else ''}{name}",
            [(stage["users"], figure(stage)) for stage in stages if stage["speculation"] == mode],
            colour=colour,
            is_dashed=number > 0,
        )
        for colour, mode in enumerate(MODES)
        for number, (name, figure) in enumerate(figures.items())
    ]
    return Plot(title, "users", y_label, series)


def _figure(name: str, percentile: str) -> Callable[[Any], float]:
    return lambda stage: float(stage[name].get(percentile, "nan"))  # a stage may have answered nothing


def _throughput_row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (str(stage[name]) for name in ("requests", "measured_requests", "failures"))
    length = "-" if stage["acceptance_length"] is None else f"{stage['acceptance_length']:.2f}"
    return str(stage["users"]), stage["speculation"], f"{stage['tokens_per_s']:.0f}", *counts, length


def _latency_row(stage: Mapping[str, Any], name: str) -> tuple[str, ...]:
    found = stage[name]
    figures = (f"{found[figure]:.2f}" if found else "-" for figure in ("mean", "p50", "p90", "p99"))
    return str(stage["users"]), stage["speculation"], *figures


def _seconds(stages: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(sorted({f"{stage['seconds']:g}" for stage in stages}))
