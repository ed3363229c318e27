"""The report shows each setting's points, the recommendation, and what cannot be told apart."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

from batchserve.config import EngineConfig
from batchserve.decoding_length.step_time import StepTimeTable
from batchserve.tune.options import TuneOptions
from batchserve.tune.recommend import recommend
from batchserve.tune.report import make_report, step_time_plot, throughput_plot
from batchserve.tune.sweep import Measured, Results, Setting, StepTimes, by_setting

STEP_TIMES = StepTimes(1, StepTimeTable((4, 16, 64), (0.010, 0.012, 0.030)), 1 << 20)


def make_runs(seqs: int, is_adaptive: bool, *rates: float, p99_s: float = 0.01) -> list[Measured]:
    setting = Setting(1, seqs, is_adaptive)
    return [Measured(setting, rate, p99_s / 2, p99_s, 0.1, 1.5, 4.0, 9.0, turn) for turn, rate in enumerate(rates)]


def make_options(**changes) -> TuneOptions:
    return TuneOptions(EngineConfig(), Path("work.jsonl"), threads=(1,), **changes)


MEASURED = [
    *make_runs(8, False, 330, 340, 350),
    *make_runs(8, True, 100, 101, 102, p99_s=0.02),
    *make_runs(16, True, 320, 350, 330, p99_s=0.04),
]


def test_the_plot_has_a_line_for_each_mode_and_a_ring_around_the_recommendation():
    options = make_options(tpot_target_ms=50.0)
    plot = throughput_plot(options, by_setting(MEASURED), recommend(options, MEASURED, {1: 1}))
    off, on, ring = plot.series
    assert (off.name, off.points, off.labels, off.is_dashed) == ("1 thread, drafts off", [(10, 340)], ["8"], True)
    assert (on.name, on.points, on.labels) == ("1 thread, drafts on", [(20, 101), (40, 330)], ["8", "16"])
    assert on.colour != off.colour
    assert sorted(on.faint) == [(20, 100), (20, 101), (20, 102), (40, 320), (40, 330), (40, 350)]
    assert (ring.points, ring.is_ring) == ([(40, 330)], True)
    assert plot.marks == [(50.0, "target")]


def test_the_plot_of_step_times_marks_the_critical_length():
    line, ring = step_time_plot([STEP_TIMES]).series
    assert [x for x, _ in line.points] == [4, 16, 64]
    assert ring.points[0][0] == STEP_TIMES.critical_length


def test_the_page_says_what_cannot_be_told_apart():
    options = make_options()
    chosen = recommend(options, MEASURED, {1: 1})
    page = make_report(options, 64, Results([STEP_TIMES], MEASURED), chosen)
    root = ElementTree.fromstring(page.removeprefix("<!doctype html>"))
    assert root.findtext("body/pre") == chosen.command
    results, _ = root.iter("table")
    assert [row[-1].text for row in results.iter("tr")][1:] == ["the best", "0.29 to 0.30", "not told apart"]
    assert [row.get("class") for row in results.iter("tr")][1:] == [None, None, "bold"]
    assert "ended early" in page, "9 of 24 runs"


def test_the_page_says_which_settings_missed_the_target():
    options = make_options(tpot_target_ms=30.0)
    page = make_report(options, 64, Results([], MEASURED), recommend(options, MEASURED, {1: 1}))
    root = ElementTree.fromstring(page.removeprefix("<!doctype html>"))
    assert [row[-1].text for row in root.iter("tr")][1:] == ["the best", "0.29 to 0.30", "missed the target"]


def test_a_sweep_without_times_per_output_token_still_has_a_report():
    measured = make_runs(8, True, 100, 101, 102, p99_s=math.nan)
    options = make_options()
    page = make_report(options, 64, Results([], measured), recommend(options, measured, {1: 1}))
    assert "no answer has a second token" in page.lower()
