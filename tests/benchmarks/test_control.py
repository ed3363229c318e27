"""Decoding without drafts a second time, beside which the figures of the adaptive length are read."""

from __future__ import annotations

from typing import Any

import pytest

from batchserve.decoding_length.step_time import StepTimeTable
from batchserve.draft.base import NullDrafter
from benchmarks import report_adaptive
from benchmarks.adaptive.driver import CONTROL, Contender, Run, control, fixed, interleave, summary
from benchmarks.adaptive.never_slower import random_records
from benchmarks.adaptive.simulation import Simulation

TABLE = StepTimeTable((4, 16, 64), (0.019, 0.028, 0.065))
RATIO = {"median": 1.01, "low": 0.97, "high": 1.03}


def test_where_the_machine_has_no_moments_the_control_is_as_fast_as_plain_decoding() -> None:
    """To the request: it differs from that by its name alone."""
    records = random_records(50)
    driver = Simulation(TABLE, NullDrafter(), [], records).driver()

    def run(contender: Contender, number: int) -> Run:
        return driver.run_parts(records, 4, 12, contender, seed=number)

    runs = interleave((fixed(0), control()), 2, run)
    found = summary(runs[CONTROL], runs["off"])
    assert found["draft_rows_per_token"] == 0.0
    assert found["requests"] == 2 * 4
    for figure in ("slowest_request_over_off", "p10_request_over_off"):
        assert found[figure] == pytest.approx(1.0)
    ratio = found["over_off"]
    assert isinstance(ratio, dict)
    assert ratio["low"] == ratio["high"] == pytest.approx(1.0)


def contender(p10: float, slowest: float) -> dict[str, Any]:
    requests = {"p10_request_over_off": p10, "slowest_request_over_off": slowest}
    return {"over_off": RATIO, "acceptance_length": 2.0, "draft_rows_per_token": 0.5, **requests}


@pytest.mark.parametrize("has_control", [True, False])
def test_tables_show_the_control_beside_adaptive(has_control: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of before there was one have a dash."""
    assert report_adaptive.CONTROL == CONTROL
    cell = {
        "contenders": {"adaptive": contender(0.81, 0.62), **({CONTROL: contender(0.93, 0.84)} if has_control else {})},
        "draft_row_share_once_learned": 0.0,
        "pooled_over_off": 1.5,
        "end_to_end_over_off": 1.2,
    }
    workload = {"wall": {"sizes": {"16": cell}}}
    model = {"workloads": {"text": workload}, "cells": {"text": {"16": cell}}}
    monkeypatch.setattr(report_adaptive, "read", lambda name: {"models": {"90m": model}})
    requests = ["0.81 [0.93]", "0.62 [0.84]"] if has_control else ["0.81 [-]", "0.62 [-]"]
    slower, gain = (
        [cells.strip() for cells in make().splitlines()[-1].strip("|").split("|")]
        for make in (report_adaptive.never_slower_table, report_adaptive.gain_table)
    )
    interval = "1.01 (0.97 to 1.03)"
    assert slower == ["90m", "text", "16", interval, interval if has_control else "-", *requests, "0.00%"]
    assert gain == ["90m", "text", "16", "1.50", interval, *requests, "1.20", "2.00", "0.50"]
