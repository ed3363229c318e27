"""What the GPU kit's engines run on: by what was found of the kernels, and when one of them fails."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from batchserve.errors import ConfigError
from benchmarks.gpu import correctness, models, run
from benchmarks.gpu.correctness import EARLY, cases, graph_cases, ordered
from benchmarks.gpu.kit import DeviceFaultError, Kit, Report, is_fault
from benchmarks.gpu.models import all_backends, backend_options, build_for, graph_modes, shape_names
from benchmarks.gpu.step_bench import StepBench
from benchmarks.gpu.summary import summary
from benchmarks.gpu.verdict import unfit

TREE, CUSTOM, FRONT, TRITON = KERNELS = ("flashinfer_tree", "flashinfer_custom", "flashinfer_front", "triton")
FAULT = "CUDA error: an illegal memory access was encountered"
RIGHT = {"is_right": True}


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    """On a machine with a GPU and all of FlashInfer's modules; nothing touches the device."""
    monkeypatch.setattr(models, "is_ready", lambda kit, module: True)
    monkeypatch.setattr(Kit, "free", lambda kit: None)
    return Kit(is_dry=False, scratch=tmp_path)


def report_of(path: Path) -> Report:
    return Report(path, time.monotonic() + 1e6)


def fail(message: str) -> Any:
    raise RuntimeError(message)


@pytest.mark.parametrize(
    ("cell", "found", "is_unfit"),
    [
        ("graphs/plain", {"is_right": False}, True),
        ("graphs/plain", {"error": FAULT}, True),
        ("bfloat16/window", {"is_right": False}, True),
        ("bfloat16/window", {"error": "stopped after 60 s"}, True),
        ("bfloat16/window", {"skipped": "needs a module"}, False),
        ("bfloat16/short, pages of 16", {"is_right": False}, False),  # engines have none
        ("bfloat16/softcap, d64", {"is_right": False}, False),
        ("bfloat16/long, d256", {"error": FAULT}, False),
        ("float16/short", {"is_right": False}, False),
    ],
)
def test_a_kernel_is_unfit_by_what_engines_need_of_it(cell: str, found: dict[str, Any], is_unfit: bool) -> None:
    cells = {"control": {"is_right": False}, f"{TREE}/{cell}": found, f"{CUSTOM}/{cell}": RIGHT}
    assert unfit({"cells": cells}) == ({TREE: f"{TREE}/{cell}"} if is_unfit else {})


def test_triton_may_have_been_compiling_when_it_was_stopped() -> None:
    assert not unfit({"cells": {"triton/graphs/plain": {"error": "stopped after 60 s"}}})


@pytest.mark.parametrize("can_compile", [False, True])
def test_flashinfer_may_have_been_if_it_is_allowed_to(can_compile: bool) -> None:
    cells = {f"{TREE}/bfloat16/short": {"error": "stopped after 60 s"}}
    about = {"compiles": [*cells] if can_compile else []}
    assert bool(unfit({"cells": cells, "about": about})) is not can_compile


@pytest.mark.parametrize(
    ("wrong", "backend", "chosen"),
    [
        ((), "auto", "triton"),
        ((TRITON,), "auto", "flashinfer tree"),
        ((TRITON, TREE), "auto", "flashinfer custom"),
        ((TRITON, TREE, CUSTOM), "auto", "flashinfer front"),
        ((TREE, CUSTOM), "auto", "triton"),
        (KERNELS, "auto", "triton"),  # without graphs
        ((TREE,), "flashinfer", "flashinfer custom"),
        ((), "triton", "triton"),
        ((TRITON,), "triton", "triton"),
        ((), "torch", "torch"),
    ],
)
def test_engines_run_on_the_best_that_was_not_found_wrong(
    kit: Kit, tmp_path: Path, wrong: tuple[str, ...], backend: str, chosen: str
) -> None:
    kit = replace(kit, backend=backend)
    assert run._fit(kit, "step_time", tmp_path) is kit, "nothing is known"
    cells = {f"{name}/graphs/plain": {"is_right": name not in wrong} for name in KERNELS}
    (tmp_path / "correctness.json").write_text(json.dumps({"cells": cells}))
    assert run._fit(kit, "correctness", tmp_path) is kit, "what was found before does not count there"
    options = backend_options(run._fit(kit, "step_time", tmp_path), 128)
    said = f"{options['attention_backend']} {options.get('flashinfer_mask', '')}".strip()
    assert (said, options["device"], options["enforce_eager"]) == (chosen, "cuda", wrong == KERNELS)


def test_where_no_graphs_are_right_steps_are_eager(kit: Kit, tmp_path: Path) -> None:
    """A kernel that is wrong without graphs, too, is still left out."""
    cells: dict[str, Any] = {f"{name}/graphs/plain": {"is_right": False} for name in (TREE, TRITON)}
    cells |= {f"{TREE}/bfloat16/plain": {"is_right": False}, f"{CUSTOM}/bfloat16/plain": {"error": FAULT}}
    cells |= {f"{TRITON}/bfloat16/plain": RIGHT}
    (tmp_path / "correctness.json").write_text(json.dumps({"cells": cells, "left_out": []}))
    eager = run._fit(kit, "step_time", tmp_path)
    assert list(all_backends(eager, 128, torch.bfloat16)) == [TRITON, FRONT]
    assert backend_options(eager, 128)["enforce_eager"]
    assert list(graph_modes(eager)) == ["default"]
    assert "engines do without graphs" in summary(tmp_path)
    cells[f"{TRITON}/graphs/plain"] = RIGHT
    (tmp_path / "correctness.json").write_text(json.dumps({"cells": cells}))
    assert not run._fit(kit, "step_time", tmp_path).is_eager
    assert run._fit(replace(kit, is_eager=True), "step_time", tmp_path).unfit == {TREE, CUSTOM}


def test_what_is_wrong_is_not_compared_with_others(kit: Kit) -> None:
    assert list(all_backends(kit, 128, torch.bfloat16)) == [TRITON, TREE, CUSTOM, FRONT]
    assert list(all_backends(replace(kit, unfit=frozenset({TREE})), 128, torch.bfloat16)) == [TRITON, CUSTOM, FRONT]
    assert TRITON not in correctness.kernels(replace(kit, unfit=frozenset({TRITON})))


def make(kit: Kit, broken: dict[str, str]) -> str:
    backend: str = backend_options(kit, 128)["attention_backend"]
    return fail(broken[backend]) if backend in broken else backend


def test_an_engine_that_cannot_be_built_is_tried_once_more_with_triton(kit: Kit, tmp_path: Path) -> None:
    kit = replace(kit, unfit=frozenset({TRITON}))  # or FlashInfer would not be the first
    report, broken = report_of(tmp_path / "part.json"), {"flashinfer": "no such module"}
    assert build_for(kit, report, "place", ["a"], partial(make, broken={})) == "flashinfer"
    assert build_for(kit, report, "other", ["b"], partial(make, broken=broken)) == "triton"
    assert list(report.cells) == ["other, FlashInfer"]
    # So that what a part compares is of one kernel.
    assert build_for(kit, report, "third", ["c"], partial(make, broken={})) == "triton"
    broken["triton"] = "none here"
    assert build_for(kit, report, "fourth", ["d"], partial(make, broken=broken)) is None
    assert "none here" in report.cells["fourth"]["error"]
    assert build_for(kit, report, "fourth", ["d"], partial(make, broken={})) is None, "not tried a third time"


def test_a_backend_that_was_asked_for_is_not_replaced(kit: Kit, tmp_path: Path) -> None:
    report, asked = report_of(tmp_path / "part.json"), replace(kit, backend="flashinfer")
    assert build_for(asked, report, "place", ["a"], partial(make, broken={"flashinfer": "no"})) is None
    assert list(report.cells) == ["place"]


@pytest.mark.parametrize("is_building", [True, False])
def test_what_flashinfer_ended_a_process_in_is_measured_with_triton(
    kit: Kit, tmp_path: Path, is_building: bool
) -> None:
    kit, broken = replace(kit, unfit=frozenset({TRITON})), {"flashinfer": FAULT}

    def part() -> list[Any]:
        """One process of the part."""
        report = report_of(tmp_path / "part.json")
        bench = build_for(kit, report, "place", ["a", "b"], partial(make, broken=broken if is_building else {}))
        if bench is not None:
            report.cell("a", lambda: {"attention": bench})
            report.cell("b", lambda: fail(broken[bench]) if bench in broken else {"attention": bench})
        return [report.cells.get(name) for name in ("a", "b")]

    with pytest.raises(DeviceFaultError):
        part()
    first = "triton" if is_building else "flashinfer"
    assert part() == [{"attention": first}, {"attention": "triton"}]
    cells = json.loads((tmp_path / "part.json").read_text())["cells"]
    assert FAULT in cells["place, FlashInfer" if is_building else "b, FlashInfer"]["error"]


def test_a_capture_that_failed_ends_the_process() -> None:
    """The engine says so in these words (test_cuda_graphs.py)."""
    assert is_fault(ConfigError("enforce_eager = False: the CUDA graph capture of X failed (no); set enforce_eager"))


def test_flashinfer_comes_before_triton_and_eager_steps_before_graphs(kit: Kit) -> None:
    plan = list(ordered(kit, [CUSTOM, TREE, TRITON]))
    every = [(name, dtype, case.name) for name, dtype, case in plan]
    assert len(every) == len(set(every))
    usual = [case for case in cases(kit) if case.head_dim == 128 and case.softcap is None]  # FlashInfer's in fp16
    assert len(every) == 3 * (len(cases(kit)) + len(graph_cases(kit))) + len(cases(kit)) + 2 * len(usual) + 4
    kinds = [(name, dtype) for name, dtype, _ in plan]
    for name in (CUSTOM, TREE, TRITON):
        assert kinds.index((name, torch.bfloat16)) < kinds.index((name, None))
    early = [*[(CUSTOM, torch.bfloat16)] * EARLY, *[(TREE, torch.bfloat16)] * EARLY]
    assert kinds[: 2 * EARLY] == early
    of_flashinfer = [
        i for i, kind in enumerate(kinds) if kind in [(n, d) for n in (CUSTOM, TREE) for d in (None, torch.bfloat16)]
    ]
    assert max(of_flashinfer) < min(i for i, (name, _) in enumerate(kinds) if name == TRITON)


def test_faults_of_all_graphs_leave_starts_for_all_eager_steps(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correctness, "kernels", lambda kit: dict.fromkeys(KERNELS))
    monkeypatch.setattr(correctness, "is_installed", lambda: True)
    monkeypatch.setattr(correctness, "negative_control", lambda kit: RIGHT)
    monkeypatch.setattr(correctness, "graphs", lambda *args: fail("operation not permitted when stream is capturing"))
    monkeypatch.setattr(correctness, "check", lambda *args: RIGHT)
    report, starts = report_of(tmp_path / "correctness.json"), 0
    is_through = False
    while not is_through:
        starts += 1
        try:
            correctness.run(kit, report := report_of(tmp_path / "correctness.json"))
            is_through = True
        except DeviceFaultError:
            continue
    assert starts == 1 + len(KERNELS) <= run.MAX_STARTS
    eager = [f"{name}/bfloat16/{case.name}" for name in KERNELS for case in cases(kit) if case.page_size == 1]
    assert all(report.cells[cell] == RIGHT for cell in eager)
    assert not any(cell.startswith(FRONT) and "pages" in cell for cell in report.cells)
    rest = [report.cells[f"{name}/graphs/{case.name}"] for name in KERNELS for case in graph_cases(kit)[1:]]
    assert all("ended a process" in cell["skipped"] for cell in rest)
    assert list(unfit({"cells": report.cells})) == [*KERNELS]
    (tmp_path / "correctness.json").write_text(json.dumps({"cells": report.cells, "left_out": []}))
    assert "engines do without graphs from here on" in summary(tmp_path)
    del report.cells[f"{TRITON}/graphs/plain"]
    (tmp_path / "correctness.json").write_text(json.dumps({"cells": report.cells, "left_out": []}))
    assert f"engines do without {TREE} from here on, because of {TREE}/graphs/plain" in summary(tmp_path)


def test_a_fault_of_eager_steps_ends_that_kernel(kit: Kit, tmp_path: Path) -> None:
    report = report_of(tmp_path / "correctness.json")
    with pytest.raises(DeviceFaultError):
        report.cell(f"{TREE}/bfloat16/short", lambda: fail(FAULT))
    assert correctness._lost(report, TREE, None) == correctness._lost(report, TREE, torch.float16) is not None
    assert correctness._lost(report, CUSTOM, None) is None


def test_graphs_are_compared_with_eager_steps_of_the_same_kernel(tmp_path: Path) -> None:
    cell = {"roofline_ms": 1.0, "rows": [1], "ms": [1.0], "over_roofline": [1.0], "critical_rows": 1}
    cells = {"m/default/b1": {**cell, "attention": "triton"}, "m/eager/b1": {**cell, "attention": "flashinfer_tree"}}
    write = (tmp_path / "step_time.json").write_text
    write(json.dumps({"about": {}, "cells": cells}))
    assert "m/default/b1 on triton: 1.0 ms" in summary(tmp_path)
    assert "graphs are" not in summary(tmp_path)
    cells["m/eager/b1"]["attention"] = "triton"
    write(json.dumps({"about": {}, "cells": cells}))
    assert "graphs are 1.00x as fast" in summary(tmp_path)


@pytest.mark.parametrize("is_peaked", [True, False])
def test_a_nucleus_of_the_kits_models_is_decided_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_peaked: bool
) -> None:
    """Of untouched random weights every row would be the host's, and that would be what is timed."""
    kit = Kit(is_dry=True, scratch=tmp_path)
    if not is_peaked:
        monkeypatch.setattr(models, "LOGITS_STD", 1.3)
    bench = StepBench(kit, shape_names(kit)[0], 1e9, {"max_num_seqs": 2, "max_model_len": 64})
    found = bench.measure_sampling(2, 32)
    assert found["host_rows"] == {"greedy": [0, 0], "sampled": [0, 0], "top_p": [0, 0] if is_peaked else [2, 4]}
    assert found["attention"] == "torch"
