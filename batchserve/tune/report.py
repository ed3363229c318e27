"""The report of a sweep as one HTML file: throughput against time per output token, step times, the recommendation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchserve.decoding_length.step_time import CRITICAL_RATIO, StepLoad, StepTimeModel
from batchserve.html_report import Report, Table
from batchserve.svg_plot import NUM_COLOURS, Plot, Series
from batchserve.tune.compare import MIN_ROUNDS, Comparison
from batchserve.tune.sweep import by_setting, threads_text
from batchserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.tune.options import TuneOptions
    from batchserve.tune.recommend import Recommendation
    from batchserve.tune.sweep import Repeated, Results, StepTimes

RESULT_COLUMNS = (
    *("threads", "seqs", "drafts", "runs", "tokens/s (lowest to highest)", "p50 TPOT ms"),
    *("p99 TPOT ms (lowest to highest)", "TTFT ms", "tokens a step", "draft rows a step", "against the best"),
)


def make_report(options: TuneOptions, num_requests: int, results: Results, recommendation: Recommendation) -> str:
    """Returns the page."""
    report = Report(f"batchserve tune: {options.config.model}")
    report.facts(_facts(options, num_requests, results))
    report.heading("Recommended")
    report.text(_sentence(recommendation.reason))
    report.code(recommendation.command)
    measured = by_setting(results.measured)
    report.heading("Throughput against time per output token")
    report.text(
        "Each line goes through the sizes of max_num_seqs, which are the numbers beside its points. Points are "
        "medians; faint ones are the single runs. Above and to the left is better."
    )
    report.plot(throughput_plot(options, measured, recommendation))
    report.table(_results(options, measured, recommendation))
    report.text(
        "seqs: max_num_seqs. TPOT: a request's first to last token over the tokens after the first; percentiles are "
        f"over requests, TTFT is their median. Against the best: the ratio of {_figure_name(recommendation)} to the "
        f"best setting's, round by round; at least {MIN_ROUNDS} rounds are needed to tell two settings apart. If there "
        "is a target, only settings that met it in every run can be the best."
    )
    if results.step_times:
        report.heading("Step time by rows")
        report.plot(step_time_plot(results.step_times))
        report.table(_step_times(results.step_times))
    return report.html()


def _facts(options: TuneOptions, num_requests: int, results: Results) -> list[tuple[str, object]]:
    target = "none" if options.tpot_target_ms is None else f"p99 TPOT <= {options.tpot_target_ms:g} ms in every run"
    facts: list[tuple[str, object]] = [
        ("batchserve", __version__),
        ("workload", f"{options.workload.name}, {num_requests} requests a setting"),
        ("target", target),
        ("rounds", f"{options.num_repeats}; each measures every setting once"),
    ]
    if len(results.measured) < options.num_runs:
        facts.append(("ended early", f"after {len(results.measured)} of {options.num_runs} runs"))
    if options.num_repeats < MIN_ROUNDS:
        facts.append(("note", f"fewer than {MIN_ROUNDS} rounds: no two settings can be told apart"))
    return facts


def throughput_plot(options: TuneOptions, measured: Sequence[Repeated], recommendation: Recommendation) -> Plot:
    """Tokens per second against p99 time per output token, one line per thread count and mode."""
    groups: dict[tuple[int, bool], list[Repeated]] = {}
    for each in measured:
        groups.setdefault((each.setting.num_threads, each.setting.is_adaptive), []).append(each)
    modes = len({is_adaptive for _, is_adaptive in groups})
    series = []
    for (num_threads, is_adaptive), group in groups.items():
        place = modes * options.thread_counts.index(num_threads) + (modes > 1 and not is_adaptive)
        series.append(
            Series(
                f"{threads_text(num_threads)}, drafts {'on' if is_adaptive else 'off'}",
                [(each.median("p99_tpot_s") * 1e3, each.median("tokens_per_s")) for each in group],
                [str(each.setting.max_num_seqs) for each in group],
                place % NUM_COLOURS,
                is_dashed=not is_adaptive,
                faint=[(run.p99_tpot_s * 1e3, run.tokens_per_s) for each in group for run in each.runs],
            )
        )
    chosen = recommendation.measured
    point = (chosen.median("p99_tpot_s") * 1e3, chosen.median("tokens_per_s"))
    series.append(Series("recommended", [point], colour=NUM_COLOURS - 1, is_ring=True))
    marks = [] if options.tpot_target_ms is None else [(options.tpot_target_ms, "target")]
    title = "tokens per second against p99 time per output token"
    return Plot(title, "p99 time per output token (ms)", "tokens per second", series, marks)


def step_time_plot(step_times: Sequence[StepTimes]) -> Plot:
    """Step time by number of rows, one line per thread count, with its critical decoding length."""
    series = []
    for i, times in enumerate(step_times):
        model = StepTimeModel(times.table)
        points = [(float(rows), model.predict(StepLoad(rows, rows, 1)) * 1e3) for rows in times.table.rows]
        critical = times.critical_length
        at = (float(critical), model.predict(StepLoad(critical, critical, 1)) * 1e3)
        colour, name = i % NUM_COLOURS, threads_text(times.num_threads)
        series.append(Series(name, points, colour=colour))
        series.append(Series(f"critical length {critical}", [at], colour=colour, is_ring=True))
    return Plot("step time by number of rows", "rows of one step", "step time (ms)", series, is_log=True)


def _results(options: TuneOptions, measured: Sequence[Repeated], recommendation: Recommendation) -> Table:
    rows = [
        (
            str(each.setting.num_threads),
            str(each.setting.max_num_seqs),
            "on" if each.setting.is_adaptive else "off",
            str(len(each.runs)),
            _range(each, "tokens_per_s", 1.0, 0),
            f"{each.median('p50_tpot_s') * 1e3:.2f}",
            _range(each, "p99_tpot_s", 1e3, 1),
            f"{each.median('p50_ttft_s') * 1e3:.0f}",
            f"{each.median('acceptance_length'):.2f}",
            f"{each.median('draft_rows_per_request'):.1f}",
            _against_best(options, each, recommendation),
        )
        for each in measured
    ]
    settings = [each.setting for each in measured]
    return Table(RESULT_COLUMNS, rows, num_texts=0, bold=settings.index(recommendation.measured.setting))


def _against_best(options: TuneOptions, each: Repeated, recommendation: Recommendation) -> str:
    best, figure = recommendation.best, recommendation.figure
    if each.setting == best.setting:
        return "the best"
    if any(each.setting == other.setting for other in recommendation.equals):
        return "not told apart"
    if recommendation.meets_target and each.range("p99_tpot_s")[1] * 1e3 > (options.tpot_target_ms or 0):
        return "missed the target"
    ratios = Comparison.of(each, best, figure).ratios
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "not known"


def _figure_name(recommendation: Recommendation) -> str:
    return "tokens/s" if recommendation.figure == "tokens_per_s" else "p99 TPOT"


def _step_times(step_times: Sequence[StepTimes]) -> Table:
    rows = [
        (str(times.num_threads), str(count), f"{seconds * 1e3:.3f}", "yes" if count <= times.critical_length else "")
        for times in step_times
        for count, seconds in zip(times.table.rows, times.table.seconds, strict=True)
    ]
    columns = ("threads", "rows", "step time ms", f"within {CRITICAL_RATIO:g} times the time of the fewest")
    return Table(columns, rows, num_texts=0)


def _range(each: Repeated, figure: str, scale: float, digits: int) -> str:
    values = (each.median(figure), *each.range(figure))
    median, low, high = (f"{value * scale:.{digits}f}" for value in values)
    return f"{median} ({low} to {high})"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
