"""`batchserve tune` as a user runs it, on the bundled model; and what it recommends of given measurements."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from batchserve.cli import _parser, main
from batchserve.config import EngineConfig
from batchserve.demo.prompts import PROMPTS
from batchserve.errors import ConfigError
from batchserve.options import make_config
from batchserve.tune import command, sweep, view
from batchserve.tune.command import as_json, sweep_order
from batchserve.tune.options import TuneOptions, available_cores
from batchserve.tune.recommend import recommend
from batchserve.tune.sweep import Measured, Results, Setting, StepTimes

KV_BYTES = 3 << 20
SVG = "{http://www.w3.org/2000/svg}"
FLAGS = ("--drafter", "trie", "--dtype", "float32", "--max-model-len", "320", "--max-num-batched-tokens", "64")


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "work.jsonl"
    records = [{"prompt": prompt.text, "max_tokens": 24 + i} for i, prompt in enumerate(PROMPTS[:4])]
    records[1]["max_tokens"] = 1
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_engine(*arguments: object, **options: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(sweep, "build_engine", build_engine)


def make_measured(seqs: int, is_adaptive: bool, tokens_per_s: float, p99_ms: float, threads: int = 1) -> Measured:
    setting = Setting(threads, seqs, is_adaptive)
    return Measured(setting, tokens_per_s, p99_ms / 2e3, p99_ms / 1e3, 0.1, 1.5, 4.0, 10.0)


def runs(seqs: int, is_adaptive: bool, *rates: float, p99_ms: float = 9.0, threads: int = 1) -> list[Measured]:
    """One run of each round."""
    made = (make_measured(seqs, is_adaptive, rate, p99_ms + i, threads) for i, rate in enumerate(rates))
    return [replace(each, turn=turn) for turn, each in enumerate(made)]


MEASURED = [
    make_measured(2, False, 100, 10),
    make_measured(2, True, 180, 8),
    make_measured(8, False, 250, 24),
    make_measured(8, True, 320, 20),
    make_measured(16, True, 900, math.nan),  # no answer had a second token
]


def test_a_sweep_of_the_bundled_model(tmp_path: Path, workload: Path, capsys: Any):
    out = tmp_path / "made" / "here"
    page = tmp_path / "report.html"
    sweep_flags = ("--max-num-seqs", "1,3", "--threads", "1", "--out", str(out), "--html", str(page))
    measure_flags = ("--tpot-target-ms", "60000", "--repeats", "2")
    assert main(["tune", "--workload", str(workload), *FLAGS, *sweep_flags, *measure_flags]) == 0
    written = json.loads((out / "tune.json").read_text())
    results = written["results"]
    assert written["num_repeats"] == 2
    assert all(len(result["tokens_per_s_runs"]) == len(result["p99_tpot_s_runs"]) == 2 for result in results)
    settings = [(r["num_threads"], r["max_num_seqs"], r["is_adaptive"]) for r in results]
    assert settings == [(1, 1, False), (1, 1, True), (1, 3, False), (1, 3, True)]
    assert (written["num_requests"], written["is_complete"]) == (4, True)
    for result in results:
        assert 0 < result["p50_tpot_s"] <= result["p99_tpot_s"] < result["seconds"]
        assert 0 < result["p50_ttft_s"] < result["seconds"]
        assert result["tokens_per_s"] > 0
        if result["is_adaptive"]:
            assert result["draft_rows_per_request"] > 0
            assert 1 < result["acceptance_length"] <= 1 + result["draft_rows_per_request"]
        else:
            assert (result["draft_rows_per_request"], result["acceptance_length"]) == (0, 1)
    (times,) = written["step_times"]
    assert times["num_threads"] == 1
    assert len(times["rows"]) == len(times["seconds"]) > 3
    assert 1 <= times["critical_length"] <= times["rows"][-1] == 64
    root = ElementTree.fromstring(page.read_text().removeprefix("<!doctype html>"))
    assert len([*root.iter(f"{SVG}svg")]) == 2
    assert len([*root.iter(f"{SVG}polyline")]) == 3, "drafts on and off, and the step times"
    assert written["recommended"]["command"] == root.findtext("body/pre")
    recommended = written["recommended"]
    (best,) = (result for result in results if all(recommended[name] == result[name] for name in result))
    assert len(written["cannot_be_told_apart"]) == 4, "two rounds tell nothing apart"
    assert recommended["meets_target"] is True
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == recommended["command"]
    assert f"written to {page}" in shown.out
    assert "measured 2 times; fewer than 3 rounds cannot tell settings apart" in shown.out
    assert [line.split(":")[0] for line in shown.err.splitlines() if "tokens/s" in line] == [
        *(
            settings := [
                f"1 thread, max_num_seqs {n}, {mode}" for n in (1, 3) for mode in ("speculation off", "adaptive")
            ]
        ),
        *reversed(settings),
    ]
    served = make_config(EngineConfig, _parser().parse_args(shlex.split(recommended["command"])[1:]))
    assert (served.max_num_seqs, served.num_threads) == (best["max_num_seqs"], 1)
    assert (served.drafter, served.dtype, served.max_model_len) == ("trie", "float32", 320)
    assert served.is_adaptive == best["is_adaptive"]


def test_a_request_that_the_model_has_no_room_for_is_named(tmp_path: Path, workload: Path, capsys: Any):
    workload.write_text(workload.read_text() + json.dumps({"prompt": "x", "max_tokens": 320}) + "\n")
    flags = ("--max-num-seqs", "5", "--threads", "1", "--no-html", "--out", str(tmp_path))
    assert main(["tune", "--workload", str(workload), *FLAGS, *flags]) == 2
    error = capsys.readouterr().err
    assert f"{workload} line 5" in error
    assert "max_tokens = 320: must be at most" in error


@pytest.mark.usefixtures("no_engine")
def test_an_empty_folder_is_not_the_current_one(workload: Path, capsys: Any):
    with pytest.raises(SystemExit):
        main(["tune", "--workload", str(workload), "--out", ""])
    assert "--out: must not be empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-num-seqs", "2,2"), "max_num_seqs = 2, 2: must name each only once"),
        (("--max-num-seqs", "0,2"), "max_num_seqs = 0: must be at least 1"),
        (("--max-num-seqs", "64"), "max_num_batched_tokens = 64: must be at least max_num_seqs + 1 = 65"),
        (("--threads", "1,1"), "threads = 1, 1: must name each only once"),
        (("--threads", "0"), "threads = 0: must be at least 1"),
        (("--threads", "100000"), "threads = 100000: must be at most"),
        (("--tpot-target-ms", "0"), "tpot_target_ms = 0.0: must be finite and at least 0.001"),
        (("--tpot-target-ms", "-3"), "tpot_target_ms = -3.0: must be finite and at least 0.001"),
        (("--tpot-target-ms", "nan"), "tpot_target_ms = nan: must be finite and at least 0.001"),
        (("--requests", "3", "--max-num-seqs", "4"), "requests = 3: must be at least max_num_seqs = 4"),
        (("--requests", "5"), "holds 4 requests, must be at least requests = 5"),
        (("--max-num-seqs", "8"), "holds 4 requests, must be at least max_num_seqs = 8"),
        (("--max-itl-inflation", "0.5"), "max_itl_inflation = 0.5: must be finite and at least 1"),
        (("--workload", "missing.jsonl"), "workload = 'missing.jsonl': cannot be read"),
        (("--out", __file__), "must be a folder"),
        (("--out", f"{__file__}/inside"), "cannot be made"),
        (("--out", "/proc"), "cannot be written to"),
        (("--repeats", "0"), "repeats = 0: must be at least 1"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_engine")
def test_bad_input_is_named_before_a_model_is_loaded(
    tmp_path: Path, workload: Path, capsys: Any, flags: tuple[str, ...], message: str
):
    given = ("--workload", str(workload), "--max-num-seqs", "2", "--out", str(tmp_path / "out"), *FLAGS, *flags)
    assert main(["tune", "--no-html", *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--max-num-seqs", "--threads"])
def test_a_list_that_is_none_is_refused(workload: Path, capsys: Any, flag: str):
    with pytest.raises(SystemExit):
        main(["tune", "--workload", str(workload), flag, "two"])
    assert f"argument {flag}: 'two' is not a list of integers" in capsys.readouterr().err


@pytest.mark.usefixtures("no_engine")
def test_answers_of_one_token_each_tell_nothing(tmp_path: Path, capsys: Any):
    path = tmp_path / "short.jsonl"
    path.write_text('{"prompt": "x", "max_tokens": 1}\n' * 2)
    assert main(["tune", "--workload", str(path), "--no-html", "--max-num-seqs", "2", "--out", str(tmp_path)]) == 2
    assert "max_tokens = 1 everywhere: must be at least 2" in capsys.readouterr().err


@pytest.mark.faults
@pytest.mark.usefixtures("no_engine")
def test_only_the_report_is_written_unless_asked_for(
    tmp_path: Path, workload: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(command, "sweep_threads", lambda config, sizes, requests, results, *more: found(results))
    given = ["tune", "--workload", str(workload), "--max-num-seqs", "2", "--threads", "1", "--repeats", "1"]
    assert main([*given, "--no-html"]) == 0
    assert list(folder.iterdir()) == []
    assert "batchserve serve" in capsys.readouterr().out
    assert main(given) == 0
    assert [path.name for path in folder.iterdir()] == ["tune_report.html"]
    page = (folder / "tune_report.html").read_text()
    assert "fewer than 3 rounds: no two settings can be told apart" in page
    assert main([*given, "--html", str(folder)]) == 2
    assert f"html = {str(folder)!r}: must be a file in a folder that exists" in capsys.readouterr().err


def found(results: Results, number: int = 2) -> None:
    """A sweep that has come so far."""
    results.step_times.append(StepTimes(1, view_table(), KV_BYTES))
    results.measured.extend(MEASURED[:number])


@pytest.mark.parametrize(("ended_by", "status"), [(KeyboardInterrupt(), 130), (ConfigError("no memory"), 2)])
def test_what_ends_a_sweep_early_takes_nothing_that_was_measured(
    tmp_path: Path, workload: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, ended_by: BaseException, status: int
):
    def sweep(config: object, sizes: object, requests: object, results: Results, *more: object) -> None:
        if results.measured:
            raise ended_by
        found(results)

    monkeypatch.setattr(command, "sweep_threads", sweep)
    monkeypatch.setattr("batchserve.tune.options.available_cores", lambda: 2)
    given = (
        "--max-num-seqs",
        "2",
        "--threads",
        "1,2",
        "--out",
        str(tmp_path),
        "--repeats",
        "1",
        "--html",
        str(tmp_path / "report.html"),
    )
    assert main(["tune", "--workload", str(workload), *given]) == status
    written = json.loads((tmp_path / "tune.json").read_text())
    assert (len(written["results"]), written["is_complete"]) == (2, False)
    shown = capsys.readouterr()
    assert "ended early: 2 of 4 settings were measured, in 2 of 4 runs" in shown.out
    assert shown.out.splitlines()[-1] == written["recommended"]["command"]
    assert ("no memory" in shown.err) == (status == 2)


def test_a_sweep_that_ends_before_its_first_setting_leaves_nothing(
    tmp_path: Path, workload: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    def sweep(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "sweep_threads", sweep)
    given = ("--max-num-seqs", "2", "--threads", "1", "--out", str(tmp_path / "out"), "--no-html")
    assert main(["tune", "--workload", str(workload), *given]) == 130
    assert list((tmp_path / "out").iterdir()) == []
    assert capsys.readouterr().out == ""


def view_table() -> Any:
    from batchserve.decoding_length.step_time import StepTimeTable

    return StepTimeTable((4, 16, 64), (0.010, 0.012, 0.030))


@pytest.mark.parametrize(
    ("target_ms", "best", "meets"),
    [
        (None, MEASURED[3], None),
        (100.0, MEASURED[3], True),
        (20.0, MEASURED[3], True),
        (19.9, MEASURED[1], True),
        (8.0, MEASURED[1], True),
        (7.9, MEASURED[1], False),
    ],
)
def test_the_highest_throughput_within_the_target(target_ms: float | None, best: Measured, meets: bool | None):
    asked = make_options(tpot_target_ms=target_ms)
    chosen = recommend(asked, MEASURED, {1: KV_BYTES})
    assert (chosen.measured.runs, chosen.meets_target) == ((best,), meets)
    assert "p99" in chosen.reason
    assert ("no setting" in chosen.reason) == (meets is False)
    target = "" if target_ms is None else f" --tpot-target-ms {target_ms:g}"
    seqs = best.setting.max_num_seqs
    # Fewer requests would be given less K/V memory than they were measured with.
    memory = f" --kv-cache-memory {KV_BYTES}" if seqs < max(asked.max_num_seqs) else ""
    assert (
        chosen.command == f"batchserve serve --model 'my model' --max-num-seqs {seqs} --num-threads 1{memory}{target}"
    )


def test_a_memory_that_was_given_is_given_once():
    config = EngineConfig(kv_cache_memory=1 << 30)
    flags = ("--kv-cache-memory", str(1 << 30))
    options = TuneOptions(config, Path("work.jsonl"), threads=(1,), serve_flags=flags)
    chosen = recommend(options, MEASURED, {1: KV_BYTES})
    assert chosen.command.count("--kv-cache-memory") == 1
    assert f"--kv-cache-memory {1 << 30}" in chosen.command


def test_speculation_that_does_not_pay_is_turned_off():
    chosen = recommend(make_options(), [*runs(16, False, 300, 310, 290), *runs(16, True, 240, 250, 231)], {1: KV_BYTES})
    assert "--max-num-seqs 16 --num-threads 1 " in chosen.command
    assert chosen.command.endswith(" --decoding-length 0")
    assert chosen.reason.endswith("; no other setting is as good")


@pytest.mark.parametrize("target_ms", [None, 20.0])
def test_where_no_answer_has_a_second_token_throughput_decides(target_ms: float | None):
    """What was measured in an hour is not thrown away for it."""
    measured = [make_measured(2, False, 90, math.nan), make_measured(4, False, 120, math.nan)]
    options = make_options(tpot_target_ms=target_ms)
    chosen = recommend(options, measured, {1: KV_BYTES})
    assert chosen.measured.runs == (measured[1],)
    assert chosen.meets_target is None
    assert "no time per output token; the highest throughput: 120 tokens/s" in chosen.reason


def make_options(**changes: Any) -> TuneOptions:
    options = {"threads": (1,), "serve_flags": ("--model", "my model"), **changes}
    return TuneOptions(EngineConfig(), Path("work.jsonl"), **options)


def test_what_is_not_known_is_null_in_the_json():
    best = recommend(make_options(), MEASURED, {1: KV_BYTES})
    results = Results([StepTimes(1, view_table(), KV_BYTES)], MEASURED)
    written = as_json(make_options(), 4, results, best)
    again = json.loads(json.dumps(written, allow_nan=False))
    assert again["results"][-1]["p99_tpot_s"] is None
    assert again["results"][-1]["p99_tpot_s_runs"] == [None]
    assert again["results"][0]["tokens_per_s"] == 100


def test_eighty_characters_hold_the_table(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setenv("COLUMNS", "80")
    slow = Measured(Setting(128, 256, True), 12345.6, 1.23456, 12.34567, 123.4567, 12.34, 63.2, 600.0)
    asked, results = make_options(), Results([], [*MEASURED, slow, replace(slow, tokens_per_s=9876.5)])
    view.show(asked, 16, results, recommend(asked, MEASURED, {1: KV_BYTES}))
    table = capsys.readouterr().out.split("seqs: max_num_seqs")[0]
    assert "128   256  adaptive   11111  11   1234.56  12345.67  123457   12.34  63.2" in table
    assert "threads  seqs    drafts      /s   %      (ms)      (ms)    (ms)  a step     K" in table
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.faults
def test_what_runs_cannot_tell_apart_is_not_chosen_by_noise():
    noisy = [*runs(8, False, 300, 340, 390), *runs(4, True, 310, 330, 335), *runs(2, True, 100, 101, 102)]
    for order in (noisy, noisy[::-1]):
        chosen = recommend(make_options(), order, {1: KV_BYTES})
        assert chosen.measured.setting == Setting(1, 4, True)
        assert chosen.best.setting == Setting(1, 8, False)
        assert "the highest throughput (no target was given): 340 (300 to 390) tokens/s" in chosen.reason
        assert "cannot be told apart from it: (1 thread, max_num_seqs 4, adaptive); drafts" in chosen.reason
        assert [each.setting.max_num_seqs for each in chosen.equals] == [4, 8]
    clear = [*runs(8, False, 440, 441, 442), *runs(4, True, 310, 330, 335)]
    chosen = recommend(make_options(), clear, {1: KV_BYTES})
    assert chosen.measured.setting == Setting(1, 8, False)
    assert "no other setting is as good" in chosen.reason
    # A target is met if every run meets it.
    chosen = recommend(make_options(tpot_target_ms=10.5), clear, {1: KV_BYTES})
    assert chosen.meets_target is False


@pytest.mark.faults
def test_the_default_is_kept_unless_another_setting_is_told_apart():
    default, slower = Setting(1, 16, True), runs(2, True, 100, 101, 102)
    measured = [*runs(8, False, 330, 340, 350), *runs(16, True, 320, 350, 330), *slower]
    chosen = recommend(make_options(), measured, {1: KV_BYTES})
    assert chosen.best.setting == Setting(1, 8, False)
    assert chosen.measured.setting == default
    assert "the default is kept (1 thread, max_num_seqs 16, adaptive)" in chosen.reason
    best = recommend(make_options(), [*runs(16, True, 320, 350, 330), *slower], {1: KV_BYTES})
    assert best.measured.setting == default
    assert best.reason.endswith("no other setting is as good: it is the default")


def test_that_nothing_can_be_told_apart_is_said_in_short():
    noise = [*runs(8, False, 330, 340, 350), *runs(16, True, 320, 350, 330), *runs(2, True, 300, 360, 340)]
    reason = recommend(make_options(), noise, {1: KV_BYTES}).reason
    assert "in 3 rounds none of 2 others can be told apart from it; the default is kept" in reason


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_fewer_than_three_rounds_tell_nothing_apart_and_say_so(num_rounds: int):
    fast, slow = runs(8, False, *[400] * num_rounds), runs(4, True, *[100] * num_rounds)
    chosen = recommend(make_options(), [*fast, *slow], {1: KV_BYTES})
    assert chosen.measured.setting == Setting(1, 8, False), "the default was not measured"
    assert "fewer than 3 rounds cannot tell settings apart (--repeats 3)" in chosen.reason
    kept = recommend(make_options(), [*fast, *slow, *runs(16, True, *[300] * num_rounds)], {1: KV_BYTES})
    assert kept.measured.setting == Setting(1, 16, True)
    assert "the default is kept" in kept.reason


@pytest.mark.faults
def test_settings_take_turns():
    options = make_options(threads=(1, 2), num_repeats=3)
    assert sweep_order(options) == [((0,), 1), ((0,), 2), ((1,), 2), ((1,), 1), ((2,), 1), ((2,), 2)]
    assert sweep_order(make_options(num_repeats=3)) == [(range(3), 1)]


def test_threads_are_this_machines_where_none_are_named():
    counts = TuneOptions(EngineConfig(), Path("work.jsonl")).thread_counts
    assert counts[-1] == available_cores()
    assert list(counts) == sorted(set(counts))
    assert min(counts) >= 1
