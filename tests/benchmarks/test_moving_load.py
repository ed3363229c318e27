"""The wall clock's trace of a load that moves, on the simulated machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchserve.decoding_length.step_time import StepTimeTable
from batchserve.request import Request
from benchmarks import report_adaptive
from benchmarks.adaptive.driver import fixed
from benchmarks.adaptive.never_slower import random_records
from benchmarks.adaptive.regret import LENGTHS, WALL_TRACE, trace_on_wall
from benchmarks.adaptive.simulation import Simulation
from benchmarks.adaptive.workloads import MAX_REQUESTS, Lab, Options, Workload, new_drafter

TABLE = StepTimeTable((4, 16, 64), (0.019, 0.028, 0.065))


@pytest.fixture
def simulation() -> Simulation:
    records = random_records(50)[:24]
    return Simulation(TABLE, new_drafter("reference"), [], records)


def test_where_the_load_falls_the_youngest_are_dropped(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = simulation.driver()
    core, abort, dropped, kept = driver.core, driver.core.abort, [], []

    def noting(request: Request) -> None:
        dropped.append(request.request_id)
        kept.append(next(iter(core.executor.forced)))
        abort(request)

    monkeypatch.setattr(core, "abort", noting)
    driver.run(simulation.records, [(4, 20), (2, 10)], fixed(0), is_cut=True)
    assert dropped == ["bench-2", "bench-3"]
    assert kept == ["bench-0", "bench-0"]


def test_adaptive_is_held_against_the_length_that_is_best_of_the_same_trace(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the report shows it beside the sizes that do not move."""
    assert max(WALL_TRACE) == MAX_REQUESTS
    bench = cast(Lab, SimpleNamespace(driver=simulation.driver(), adaptive=simulation.adaptive))
    workload = Workload("text", [], simulation.records)
    options = Options(None, True, "reference", "")
    found = trace_on_wall(bench, workload, simulation, options)
    contenders: dict[str, Any] = found["contenders"]
    best = found["best_length"]
    assert best in {fixed(length).name for length in LENGTHS}
    assert set(contenders) == {"off", best, "adaptive"}
    assert found["tokens_of_a_run"] == 2 * sum(WALL_TRACE)
    assert contenders["off"]["over_off"] == {"median": 1.0, "low": 1.0, "high": 1.0, "pairs": options.pairs}
    read = {"models": {"90m": {"workloads": {"text": {"wall": {"trace": found}}}}}}
    monkeypatch.setattr(report_adaptive, "read", lambda name: read)
    assert report_adaptive.regret_wall_table().splitlines()[-1].startswith("| 90m | text | 1 to 16 | ")
