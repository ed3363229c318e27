"""The GPU kit: all of it on a CPU, in tiny shapes, without the packages that a GPU machine may lack; its judgements."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from batchserve.attention.paged import PagedBackend
from batchserve.attention.torch_paged import TorchKernel
from batchserve.bench.replay import ReplayRecord
from batchserve.errors import UnsupportedModelError
from batchserve.request import ResolvedSampling
from batchserve.runner import probe
from batchserve.sampling.near_tie import rounding_bound
from batchserve.types import FinishReason, SamplingParams
from benchmarks.adaptive.driver import Run, fixed
from benchmarks.gpu import answers, correctness, equivalence, gap, memory, modules, replay, run
from benchmarks.gpu.arguments import parse
from benchmarks.gpu.baseline import continuous_rate
from benchmarks.gpu.cases import Case, compare, make_step, reference
from benchmarks.gpu.correctness import as_chains
from benchmarks.gpu.graph_replay import check_replays
from benchmarks.gpu.kit import DeviceFaultError, Kit, Report, is_fault, partial_path, tolerated
from benchmarks.gpu.models import (
    SHAPES,
    build_for,
    check_graphs,
    engine_on,
    num_graphs,
    past_probe,
    random_llama,
    shape_names,
)
from benchmarks.gpu.replay import LONGEST, ROUNDS, ReplayBench
from benchmarks.gpu.summary import summary
from benchmarks.gpu.verdict import KERNELS
from tests.equivalence.harness import Answer, Job

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ABSENT = (
    "prometheus_client",
    "rich",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "google.rpc",
    "mistral_common",
    "sentencepiece",
    "matplotlib",
    "flashinfer",
    "pytest",
    "hypothesis",
)
# Read by every Python that starts with it in its path: these packages are then not installed.
BLOCKER = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_others(name, path=None, target=None):
    is_absent = any(name == each or name.startswith(each + ".") for each in {ABSENT})
    return None if is_absent else find(name, path, target)

PathFinder.find_spec = find_others
"""


@pytest.mark.slow  # to be run before a device is asked
def test_every_part_runs_without_the_packages_that_only_serving_needs(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--dry-run", "--minutes", "20"]
    done = subprocess.run(
        [*command, "--out", str(out)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = sorted(path.name for path in out.iterdir())
    assert files == sorted([*(f"{name}.json" for name in run.PARTS), "summary.txt"])
    assert len(files) <= 8
    for name in run.PARTS:
        data = json.loads((out / f"{name}.json").read_text())
        failed = {cell: found["error"] for cell, found in data["cells"].items() if "error" in found}
        assert not failed, (name, failed)
        assert not {cell: found["failed"] for cell, found in data["cells"].items() if "failed" in found}, name
        assert data["cells"], (name, data.get("error"))
        assert "error" not in data, (name, data["error"])
        assert not data["left_out"], name
    for name in ("correctness", "equivalence"):
        cells = json.loads((out / f"{name}.json").read_text())["cells"]
        assert all(cell["is_right"] for cell in cells.values())
    for cell in cells.values():  # of equivalence: some were aborted, others began with what an ended one had left
        assert all(sum(cell[mode][what] for mode in ("greedy", "sampled")) for what in ("left", "cached_tokens"))
    gaps = json.loads((out / "gap.json").read_text())["cells"].values()
    assert all(cell["server"].startswith("plain") and cell["gap_ms"]["count"] > 3 for cell in gaps)
    assert all(cell["idle_ms"]["median"] > max(cell["gap_ms"]["median"], cell["launch_ms"]["median"]) for cell in gaps)
    assert "not run" not in (out / "summary.txt").read_text()


CASES = [
    Case("long context", (6000, 900), (12, 20), heads=4, kv_heads=2, head_dim=64),
    Case("window", (300, 40), (9, 14), heads=2, kv_heads=2, head_dim=64, window=32),
    Case("softcap", (300, 40), (9, 14), heads=2, kv_heads=2, head_dim=64, softcap=50.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_mask_is_seen_and_rounding_is_not(case: Case, dtype: torch.dtype):
    step = make_step(case, CPU, dtype)
    exact = reference(step, case.params)
    assert compare(exact.to(dtype), exact, dtype, case.softcap)["is_right"]
    assert not compare(as_chains(step, case), exact, dtype, case.softcap)["is_right"]
    # One ancestor too few, of one row.
    bits = step.metadata.ancestors.clone()
    assert bits[-1, 0] & (bits[-1, 0] - 1), "the last row has no ancestor"
    bits[-1, 0] &= bits[-1, 0] - 1
    fewer = dataclasses.replace(step, metadata=dataclasses.replace(step.metadata, ancestors=bits))
    assert not compare(reference(fewer, case.params), exact, dtype, case.softcap)["is_right"]
    assert not compare(torch.full_like(exact, torch.nan), exact, dtype, case.softcap)["is_right"]


def test_a_window_off_by_one_is_seen():
    case = CASES[1]
    step = make_step(case, CPU, torch.bfloat16)
    exact = reference(step, case.params)
    for window in (31, 33):
        other = reference(step, dataclasses.replace(case, window=window).params)
        # The scale of the scores is the case's own: only the window differs.
        assert not compare(other, exact, torch.bfloat16)["is_right"]


def test_what_a_last_page_has_beside_the_requests_own_is_seen():
    case = Case("pages", (300, 40), (9, 14), heads=2, kv_heads=2, head_dim=64, page_size=16)
    step = make_step(case, CPU, torch.bfloat16)
    exact = reference(step, case.params)
    assert compare(exact.to(torch.bfloat16), exact, torch.bfloat16)["is_right"]
    # The last page's next slot in place of the context's second: one key too many, where one was that weighs nothing.
    begin, end = step.metadata.kv_indptr_cpu[:2].tolist()
    step.metadata.kv_indices[begin + 1] = step.metadata.kv_indices[end - 1] + 1
    assert not compare(reference(step, case.params), exact, torch.bfloat16)["is_right"]


class SeesAll(TorchKernel):
    """Takes every row to see all rows before it."""

    def run(self, query: Any, key_cache: Any, value_cache: Any, metadata: Any, params: Any) -> Any:
        bits = torch.full_like(metadata.ancestors, -1)
        return super().run(query, key_cache, value_cache, dataclasses.replace(metadata, ancestors=bits), params)


class OneShort(TorchKernel):
    """Leaves out each context's last token."""

    def run(self, query: Any, key_cache: Any, value_cache: Any, metadata: Any, params: Any) -> Any:
        values = value_cache.clone()
        lens, rows = metadata.kv_lens_cpu.tolist(), metadata.qo_indptr_cpu.diff().tolist()
        for start, kv_len, count in zip(metadata.kv_indptr_cpu.tolist(), lens, rows, strict=False):
            if kv_len > count:
                values[metadata.kv_indices[start + kv_len - count - 1].long()] = 0.0
        return super().run(query, key_cache, values, metadata, params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [TorchKernel(), SeesAll(), OneShort()], ids=lambda kernel: type(kernel).__name__)
def test_what_is_wrong_in_a_graph_is_seen(tmp_path: Path, kernel: TorchKernel, dtype: torch.dtype):
    case = Case("graphs", (400,), (24,), heads=4, kv_heads=2, head_dim=16)
    found = check_replays(Kit(True, tmp_path), kernel, case, dtype)
    assert found["is_right"] == (type(kernel) is TorchKernel), found
    assert found["buckets"] > 2


def make_report(path: Path, seconds: float = 1e6) -> Report:
    return Report(path, time.monotonic() + seconds)


def fail(message: str) -> Any:
    raise RuntimeError(message)


def test_a_cell_that_fails_leaves_the_others_alone_and_all_is_on_disk(tmp_path: Path):
    report = make_report(tmp_path / "part.json")
    report.cell("a", lambda: {"x": 1})
    report.cell("b", lambda: fail("no such kernel"))
    report.cell("c", lambda: json.loads((tmp_path / "part.json").read_text())["under_way"])
    cells = json.loads((tmp_path / "part.json").read_text())["cells"]
    assert cells["a"] == {"x": 1}
    assert "no such kernel" in cells["b"]["error"]
    assert cells["c"] == "c"


def test_only_the_cells_that_were_asked_for_are_run_and_missed(tmp_path: Path):
    patterns, path = ("engine/b?/c64", "other"), tmp_path / "part.json"
    report = Report(path, time.monotonic() + 1e6, patterns)
    for name in ("engine/b1/c64", "engine/b16/c64", "engine/b1/c8", "other"):
        report.cell(name, lambda: {"x": 1})
    assert [*json.loads(path.read_text())["cells"]] == ["engine/b1/c64", "other"]
    assert report.wants("engine/b2/c64", "engine/b1/c8")
    assert not report.wants("engine/b1/c8")
    late = Report(tmp_path / "late.json", time.monotonic() - 1, patterns)
    assert not late.wants("other", "engine/b1/c8")
    assert json.loads((tmp_path / "late.json").read_text())["left_out"] == ["other"]


def test_a_part_goes_on_behind_the_cell_that_ended_its_process(tmp_path: Path):
    path = tmp_path / "part.json"
    first = make_report(path)
    first.cell("a", lambda: {"x": 1})
    with pytest.raises(DeviceFaultError):
        first.cell("b", lambda: fail("CUDA error: an illegal memory access was encountered"))
    # What a process leaves that is killed in a cell.
    left = json.loads(path.read_text())
    path.write_text(json.dumps({**left, "under_way": "d"}))
    third, calls = make_report(path), []
    for name in "abd":
        third.cell(name, lambda: calls.append("again"))
    third.cell("e", lambda: {"x": 2})
    assert not calls
    cells = json.loads(path.read_text())["cells"]
    assert cells["a"] == {"x": 1}
    assert "illegal memory access" in cells["b"]["error"]
    assert cells["d"] == {"error": "the process ended in it", "is_fault": True}
    assert third.faults("a", "b", "d", "e", "f") == ["b", "d"]
    assert cells["e"] == {"x": 2}


def test_what_ended_a_process_while_it_was_made_is_not_made_again(tmp_path: Path):
    """An engine whose building loses the device would do so at every start."""
    path = tmp_path / "part.json"
    with pytest.raises(DeviceFaultError):
        make_report(path).build("engine", lambda: fail("CUDA error: an illegal memory access was encountered"))
    made: list[int] = []
    assert make_report(path).build("engine", lambda: made.append(1)) is None
    assert not made
    assert make_report(path).build("other", lambda: 5) == 5


@pytest.mark.parametrize("message", ["CUDA error: misaligned address", "Cannot copy during CUDA graph capture"])
def test_a_contender_that_fails_is_named_unless_the_others_are_of_no_use_behind_it(message: str):
    assert tolerated(ValueError("no such tile")) == "ValueError: no such tile"
    with pytest.raises(RuntimeError, match=message):
        tolerated(RuntimeError(message))


def test_eager_steps_do_not_pass_for_graphs(tmp_path: Path):
    kit = Kit(is_dry=True, scratch=tmp_path)
    engine = engine_on(kit, random_llama(kit, shape_names(kit)[0]), "tiny")
    assert num_graphs(engine) == 0
    check_graphs(engine, is_eager=False)  # on a CPU there are none
    backend = engine.core.executor.backend
    assert isinstance(backend, PagedBackend)
    backend.device = torch.device("cuda")
    backend.kernel.can_be_captured = True
    with pytest.raises(RuntimeError, match="steps are eager") as error:
        check_graphs(engine, is_eager=False)
    assert not is_fault(error.value)  # the part's process goes on
    said = ["loading", "all steps are eager: it cannot be captured: called a synchronizing CUDA operation"]
    with pytest.raises(RuntimeError, match=r"cannot be captured: called a") as error:
        check_graphs(engine, is_eager=False, said=said)
    assert not is_fault(error.value)
    check_graphs(engine, is_eager=True)


def test_nothing_begins_behind_the_deadline_and_what_was_left_out_is_named(tmp_path: Path):
    report = make_report(tmp_path / "part.json", seconds=-1)
    report.cell("a", lambda: fail("must not run"))
    assert not report.wants("a", "b")
    data = json.loads((tmp_path / "part.json").read_text())
    assert data["cells"] == {}
    assert data["left_out"] == ["a", "b"]


def test_a_kernel_that_takes_too_long_to_compile_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(run, "KERNELS", ())
    stuck = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    run._end_kernels([stuck], 0.1)
    assert stuck.wait(10) < 0
    assert "given up: -c import time" in capsys.readouterr().err


def run_part(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: Any, limit_s: float = 30.0, hang_s: float = 0.3
) -> dict[str, Any]:
    """What is in the file of a part whose processes do part(report)."""

    def process(name: str, kit: Kit, path: Path, deadline_s: float) -> None:
        part(Report(path, deadline_s))
        os._exit(0)

    monkeypatch.setattr(run, "_part", process)
    monkeypatch.setattr(run, "HANG_S", hang_s)
    monkeypatch.setattr(run, "POLL_S", 0.05)
    path = folder / "gap.json"
    run._run_part(multiprocessing.get_context("fork"), "gap", Kit(True, folder), path, limit_s, limit_s)
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def hang(*arguments: Any) -> None:
    time.sleep(600)


def test_a_part_that_hangs_is_stopped_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started_s = time.monotonic()

    def part(report: Report) -> None:
        report.about()  # or there would be no file
        hang()

    run_part(tmp_path, monkeypatch, part, limit_s=0.3)
    assert time.monotonic() - started_s < 60
    path = tmp_path / "gap.json"
    assert json.loads(path.read_text())["error"] == "stopped after 0 s"
    (tmp_path / "summary.txt").write_text(summary(tmp_path))
    assert "THE PART FAILED: stopped" in (tmp_path / "summary.txt").read_text()


def test_a_part_goes_on_behind_a_cell_that_hangs_and_its_kernel_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tree, other = KERNELS[:2]

    def part(report: Report) -> None:
        report.on(tree, "a")
        report.on(other, "b")
        report.cell("a", hang)
        report.cell("b", lambda: {"x": 1})

    data = run_part(tmp_path, monkeypatch, part)
    error = "hung: no sign of life for 0 s"
    assert data["cells"] == {"a": {"error": error, "is_fault": True, "hung_on": tree}, "b": {"x": 1}}
    assert "error" not in data
    for name in ("gap", "memory"):
        assert run._fit(Kit(False, tmp_path), name, tmp_path).unfit == {tree}
    assert not run._fit(Kit(False, tmp_path), "correctness", tmp_path).unfit


@pytest.mark.parametrize(
    ("about", "beat_each_s", "hangs_at_s"),
    [({}, 1e6, 40), ({}, 30.0, None), ({"compiles": ["a"]}, 1e6, None), ({"compiles": ["b"]}, 1e6, 40)],
    ids=["quiet", "signs of life", "compiles", "another compiles"],
)
def test_a_cell_hangs_that_is_quiet_and_compiles_nothing(
    about: dict[str, Any], beat_each_s: float, hangs_at_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, beat, now_s, beat_s = tmp_path / "gap.json", tmp_path / "beat", 0.0, 0.0
    path.write_text(json.dumps({"under_way": "a", "about": about, "cells": {}}))
    beat.touch()

    def wait(seconds: float) -> None:
        nonlocal now_s, beat_s
        now_s += seconds
        if now_s - beat_s >= beat_each_s:
            beat_s = now_s
            os.utime(beat, ns=(0, int(now_s * 1e9)))

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert run._hangs(SimpleNamespace(exitcode=None, join=wait), path, beat, 100.0) == (hangs_at_s is not None)
    assert now_s == pytest.approx(hangs_at_s or 100.0, abs=3 * run.POLL_S)


def test_a_process_that_does_not_end_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    calls: list[Any] = []
    monkeypatch.setattr(os, "killpg", lambda *arguments: calls.append("killpg"))
    stuck = SimpleNamespace(pid=1, exitcode=None, kill=lambda: calls.append("kill"), join=calls.append)
    run._kill(stuck)
    assert calls == ["killpg", "kill", run.KILL_S]
    assert "does not end" in capsys.readouterr().err


def test_a_file_that_was_half_written_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def part(report: Report) -> None:
        report.about(x=1)
        partial_path(tmp_path / "gap.json").write_text("{")
        hang()

    assert run_part(tmp_path, monkeypatch, part, limit_s=3.0)["about"] == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["gap.json"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_second_call_goes_on_with_what_the_first_had_no_time_for(
    is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "gap.json"

    def part(report: Report) -> None:
        report.cell("a", lambda: {"x": len(report.cells)})
        report.cell("b", hang if "again" not in report._data["about"] else lambda: {"x": 2})

    data = run_part(tmp_path, monkeypatch, part, limit_s=3.0, hang_s=9.0)
    assert data["cells"]["b"]["is_cut"]
    if is_killed:  # the call itself, in the midst of a cell of which something was there
        path.write_text(json.dumps({**data, "under_way": "b", "cells": {**data["cells"], "b": {"is_partial": True}}}))
        partial_path(path).write_text("{")
    run._begin(path, is_resumed=True)
    assert not partial_path(path).exists()
    make_report(path).about(again=True)
    data = run_part(tmp_path, monkeypatch, part)
    assert data["cells"] == {"a": {"x": 0}, "b": {"x": 2}}
    assert "error" not in data
    run._begin(path, is_resumed=False)
    assert not path.exists()


def test_a_fault_that_the_engine_only_calls_a_failure_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gap.GapBench, "_measure", lambda bench, is_enabled: is_enabled)
    bench = gap.GapBench.__new__(gap.GapBench)
    bench._loop = SimpleNamespace(run=lambda what: fail("16 streams failed: the engine failed; the request was ended"))
    bench._kit = SimpleNamespace(sync=lambda: fail("CUDA error: an illegal instruction was encountered"))
    report = make_report(tmp_path / "gap.json")
    with pytest.raises(DeviceFaultError):
        report.cell("a", lambda: bench.measure(True))
    bench._kit = SimpleNamespace(sync=lambda: None)
    report.cell("b", lambda: bench.measure(True))
    assert "the engine failed" in report.cells["b"]["error"]


def test_memory_of_the_lengths_that_were_reached_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kit, report = Kit(True, tmp_path), make_report(tmp_path / "memory.json")
    drafter = SimpleNamespace(memory_bytes=lambda: 1 << 20)
    monkeypatch.setattr(memory, "WarmDrafter", lambda *arguments: drafter)
    runs = iter([SimpleNamespace(step_rows=[4, 8])])
    bench: Any = SimpleNamespace(
        engine=SimpleNamespace(info=SimpleNamespace(attention_backend="torch")),
        core=SimpleNamespace(drafts=SimpleNamespace(drafter=None)),
        driver=SimpleNamespace(run=lambda *arguments: next(runs, None) or fail("no memory")),
    )
    report.cell("b1", lambda: memory.by_length(kit, bench, 1, partial(report.keep, "b1")))
    cell = json.loads((tmp_path / "memory.json").read_text())["cells"]["b1"]
    assert list(cell["lengths"]) == ["0"]
    assert cell["lengths"]["0"]["rows_per_step"] == 6.0
    text = summary(tmp_path)
    assert "b1 on torch, decoding length 0" in text
    assert "FAILED b1: RuntimeError: no memory" in text


def test_rounds_that_were_finished_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    report, runs = make_report(tmp_path / "replay.json"), []

    def one_run(*arguments: Any, seed: int) -> Run:
        if seed == ROUNDS:
            fail("out of time")
        runs.append(Run(1.0, 4, [0.5, 0.5], [1, 1], [0, 0], 2))
        bench.driver.forward_s[id(runs[-1])] = 0.8
        return runs[-1]

    bench: Any = ReplayBench.__new__(ReplayBench)
    bench._kit, bench.core = Kit(False, tmp_path), SimpleNamespace(drafts=SimpleNamespace())
    bench.engine = SimpleNamespace(info=SimpleNamespace(attention_backend="torch"))
    bench.driver, bench.adaptive = SimpleNamespace(run=one_run, forward_s={}), lambda: fixed(2)
    monkeypatch.setattr(replay, "WarmDrafter", lambda *arguments: None)
    name = answers.set_names(None)[0]
    report.cell("b1", lambda: bench.measure(name, 1, partial(report.keep, "b1"), with_fixed=False))
    cell = json.loads((tmp_path / "replay.json").read_text())["cells"]["b1"]
    assert "out of time" in cell["error"]
    assert (cell["rounds"], cell["contenders"]["2"]["tokens_per_s"]) == (ROUNDS - 1, 4.0)
    assert "b1 on torch 2: 4.0 tokens/s" in summary(tmp_path)


def test_what_the_probe_at_load_would_refuse_is_measured_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kit = Kit(is_dry=True, scratch=tmp_path)
    shape = shape_names(kit)[0]
    monkeypatch.setitem(probe.TOLERANCE, torch.float32, -1.0)
    report = make_report(tmp_path / "replay.json")
    build_for(kit, report, shape, ["a"], lambda kit: engine_on(kit, random_llama(kit, shape), shape))
    found = json.loads((tmp_path / "replay.json").read_text())["about"]["probes"][shape]
    assert 0 <= found["with other modules"] < 2e-3
    assert "bound -1" in found["gone_past"]
    assert f"{shape}: went past the probe at load: LlamaForCausalLM answers differently" in summary(tmp_path)


def test_logits_that_are_no_numbers_are_refused_all_the_same():
    model = SimpleNamespace(dtype=torch.float32, config=LlamaConfig())
    of_model: Any = SimpleNamespace(_model=model, _name="model", _expected=torch.ones(2, 4))
    found: dict[str, Any] = {}
    with past_probe(found), pytest.raises(UnsupportedModelError):
        probe.ModelProbe._compare(of_model, torch.full((2, 4), torch.nan), "here", "rounding")
    assert "gone_past" not in found


def test_recorded_answers_are_read_as_token_ids_where_there_is_no_tokenizer(tmp_path: Path):
    records = [dataclasses.asdict(ReplayRecord([i, 4], [5, 6, 7][:length], [])) for i, length in enumerate((3, 1, 2))]
    (tmp_path / "llma_rag.tokens.json").write_text(json.dumps(records))
    loaded = answers.load(tmp_path, "llma_rag")
    assert [dataclasses.asdict(record) for record in loaded] == [records[0], records[2]], "one has nothing to draft"
    with pytest.raises(FileNotFoundError, match="no set mbpp_gpt4"):
        answers.load(tmp_path, "mbpp_gpt4")


def test_a_checkout_has_recorded_answers_of_its_own():
    for name in answers.set_names(None):
        records = answers.load(None, name)
        assert len(records) == 24
        tokens = [token for each in records for token in (*each.prompt_token_ids, *each.response_token_ids)]
        assert 0 <= min(tokens) <= max(tokens) < min(shape["vocab_size"] for shape in SHAPES.values())
        assert all(len(each.prompt_token_ids) + len(each.response_token_ids) < LONGEST // 2 for each in records)


def test_the_summary_holds_figures_against_their_bounds(tmp_path: Path):
    about = {"environment": {"device": "a GPU"}}
    contender = {"tokens_per_s": 300.0, "acceptance_length": 5.0, "draft_rows_per_step": 9.0}
    adaptive = {**contender, "over_off": {"median": 4.0}, "acceptance_over_cost": 4.2}
    replay = {"llama-2-7b/llma_rag/b1": {"contenders": {"adaptive": adaptive}}}
    write(tmp_path, "replay", {"about": about, "cells": replay})
    write(tmp_path, "transformers", {"about": about, "cells": {"generate/b1": {"tokens_per_s": 60.0}}})
    text = summary(tmp_path)
    assert "95% of acceptance over cost (kept)" in text
    assert "5.00x generate (MISSED)" in text  # 5.36 is asked for
    assert "not run: correctness, equivalence, step_time, memory, gap" in text


def test_the_summary_names_what_answered_and_what_was_not_judged(tmp_path: Path):
    greedy = {"tokens": 100, "near_ties": [1, 0]}
    cell = {"greedy": greedy, "is_right": True, "is_judged": True}
    cells = {"bundled/bfloat16/triton": cell, "gpt_oss/bfloat16/torch": {**cell, "is_judged": False}}
    write(tmp_path, "equivalence", {"about": {"environment": {"device": "a GPU"}}, "cells": cells})
    text = summary(tmp_path)
    assert "whole engines with torch, triton" in text
    assert "not judged, experts in bf16: gpt_oss/bfloat16/torch" in text
    assert "2 near-ties in 200 tokens" in text


@pytest.mark.parametrize("loads", [True, False])
def test_a_module_that_does_not_load_is_not_ready(loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiled_here = tmp_path / "module.so"
    spec = SimpleNamespace(try_load=lambda: object() if loads else None, jit_library_path=compiled_here)
    monkeypatch.setattr(modules, "is_installed", lambda: True)
    monkeypatch.setattr(modules.Module, "spec", lambda module: spec)
    module = modules.stock(128, torch.bfloat16)
    assert modules.is_ready(Kit(is_dry=False, scratch=tmp_path), module) == loads
    can_compile = Kit(is_dry=False, scratch=tmp_path, can_compile=True)
    assert modules.is_ready(can_compile, module) == loads
    compiled_here.touch()
    assert modules.is_ready(can_compile, module)
    assert modules.is_ready(Kit(is_dry=False, scratch=tmp_path), module) == loads


def test_the_summary_tells_what_graphs_lose(tmp_path: Path):
    us = {"flashinfer_tree, eager": {"1": 10.0, "4": 12.0}, "flashinfer_tree, graph": {"1": 11.0, "4": 24.0}}
    over = {name: {rows: time / 8 for rows, time in by_rows.items()} for name, by_rows in us.items()}
    tile = {"flashinfer_tree, eager": {"1": 16, "4": 16}, "flashinfer_tree, graph": {"1": 16, "4": 128}}
    cells = {
        "small_q/llama-3-8b/b16/c2048": {"us": us, "tile": tile, "over_copy": over},
        "buckets/b16": {"rows_each": [1, 4], "over_fitting": {"all": [1.31, 1.02]}},
    }
    about = {
        "environment": {"device": "a GPU"},
        "buckets/all": {"graphs": 11, "capture_s": 2.5, "more_device_mib": 90},
    }
    write(tmp_path, "step_time", {"about": about, "cells": cells})
    text = summary(tmp_path)
    assert "flashinfer_tree as a graph at most 2.00x eager (4 rows each, tile 128 for 16)" in text
    assert "least 1.25x a copy of the K/V (flashinfer_tree, eager)" in text
    assert "buckets/all: 11 graphs in 2.5 s, 90 MiB" in text
    assert "graphs of `all` requests over those of fitting ones: 1.310x at 1 rows each, 1.020x at 4 rows each" in text


def write(folder: Path, name: str, data: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"left_out": [], **data}))


def test_answers_that_cannot_be_read_are_refused_before_any_minute_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = ["--out", str(tmp_path / "out"), "--replay", str(tmp_path)]

    def refusal() -> str:
        with pytest.raises(SystemExit):
            parse(command, None)
        return capsys.readouterr().err

    assert "has none of the sets llma_rag" in refusal()
    (tmp_path / "llma_rag.jsonl").write_text("{}")
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    assert "needs mistral_common" in refusal()
    (tmp_path / "gsm_qwen2_7b.tokens.json").write_text("[]")
    assert parse(command, None).replay == tmp_path


@pytest.mark.parametrize(
    "arguments", [["--minutes", "0"], ["--parts", "speed"], ["--replay", "nowhere"], ["--most-rows", "0"]]
)
def test_wrong_options_are_refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run.main(["--dry-run", "--out", str(tmp_path), *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_continuous_batching_is_timed_while_all_requests_decode():
    found = continuous_rate([[0.0, 1.0, 2.0, 3.0, 4.0], [2.0, 2.5, 3.0, 4.0]])
    assert found == {"tokens_per_s": 2.5, "tokens": 5}, "from 2.0 to 4.0"
    with pytest.raises(RuntimeError, match="never decoded together"):
        continuous_rate([[0.0, 1.0], [2.0, 3.0]])


def test_every_case_of_flashinfer_runs_on_a_module_that_is_carried(tmp_path: Path) -> None:
    """Or it would be skipped in every run."""
    kit = Kit(is_dry=False, scratch=tmp_path)
    wanted = {
        correctness.module_of(name, case, torch.bfloat16 if dtype is None else dtype)
        for name, dtype, case in correctness.ordered(kit, KERNELS)
        if name.startswith("flashinfer")
    }
    assert wanted <= set(modules.NEEDED)


def test_what_has_to_be_compiled_first_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "is_ready", lambda kit, module: module in modules.NEEDED[: modules.OF_ENGINES])
    kit = Kit(is_dry=False, scratch=tmp_path)
    as_ever = list(correctness.ordered(kit, KERNELS))
    kit = dataclasses.replace(kit, can_compile=True)
    plan = list(correctness.ordered(kit, KERNELS))
    late = [cell for cell in as_ever if correctness.has_to_compile(kit, *cell)]
    assert plan == [cell for cell in as_ever if cell not in late] + late
    assert {name for name, _, _ in late} == {"flashinfer_tree", "flashinfer_front", "flashinfer_custom"}
    assert any(case.softcap for _, _, case in late)
    assert any(case.head_dim == 256 for _, _, case in late)


class FakeSpec:
    """FlashInfer's JitSpec of a module that is there, can be compiled, cannot, or takes for ever."""

    def __init__(self, module: modules.Module, folder: Path) -> None:
        self.kind, self.path = f"{module.kind}{module.head_dim}", folder / f"{module.kind}{module.head_dim}"

    def try_load(self) -> object | None:
        return self if self.kind == "stock128" else None

    def build(self, verbose: bool) -> None:
        if self.kind == "stock64":
            raise RuntimeError("no nvcc")
        if self.kind == "tree64":
            time.sleep(600)
        self.path.touch()


def test_modules_are_compiled_ahead_within_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(modules, "is_installed", lambda: True)
    monkeypatch.setattr(modules.Module, "spec", lambda module: FakeSpec(module, tmp_path))
    run._compile_modules(multiprocessing.get_context("fork"), 5.0)
    assert [path.name for path in tmp_path.iterdir()] == ["tree128"]
    said = [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines() if line.startswith("Module")]
    assert said == ["ready", "ready", "failed", "not done in time"]


@pytest.mark.parametrize("model", ["llama", "phi3"])
def test_what_rounding_does_to_the_plain_path_itself_is_no_wrong_token(tmp_path: Path, model: str):
    kit = Kit(True, tmp_path)
    plain = equivalence.PlainPath(kit, model, torch.bfloat16)
    found = equivalence.compare(kit, plain, equivalence.Way({"device": "cpu", "attention_backend": "torch"}))
    assert found["is_right"], found
    assert found["greedy"]["tokens"] > 0


def test_a_token_that_rounding_does_not_explain_is_wrong(tmp_path: Path):
    plain = equivalence.PlainPath(Kit(True, tmp_path), "llama", torch.bfloat16)
    prompt, sampling = [5, 9, 17], ResolvedSampling(0.0, 0, 1.0, 0, 4, frozenset())
    logits, rounding = plain.logits(prompt)
    assert (rounding > 0).all()
    loud = float(max(rounding_bound("bfloat16", logits[-1]), rounding[-1]))
    below = logits[-1].max() - logits[-1]
    wins, loses = int(below.argmin()), int(np.where(below > loud, below, np.inf).argmin())
    for token, wrong in ((wins, []), (loses, ["0:0"])):
        answer = Answer([token], FinishReason.LENGTH, sampling=sampling)
        scores = equivalence.Scores(plain, [Job(prompt, SamplingParams())], {0: answer})
        assert (scores.tokens, scores.near_ties, scores.wrong) == (1, 0, wrong)
