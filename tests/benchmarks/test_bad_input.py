"""Benchmarks on a folder that cannot be measured: one line that says what is needed, exit status 2, no model made."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from batchserve.bench.replay import ReplayRecord
from batchserve.errors import ConfigError
from benchmarks.adaptive import prefill, workloads
from benchmarks.adaptive.workloads import Options, Workload, recorded
from benchmarks.common import find_sets

ADAPTIVE = tuple(
    f"adaptive.{name}" for name in ("gain", "ceiling", "lengths", "regret", "device_host", "overhead", "prefill")
)
PROGRAMS = ("replay", "draft_cost", *ADAPTIVE)


def characters(name: str) -> Any:
    return lambda text: list(map(ord, text))


def refusal(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """Standard error of a program that must end with status 2."""
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr("sys.argv", [name, *arguments])
    monkeypatch.setattr(module, "lab", None, raising=False)  # called, it would be a TypeError
    for of in (module, workloads):
        monkeypatch.setattr(of, "load_encoder", characters, raising=False)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


def write(path: Path, *answers: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": "to do", "response": answer}) + "\n" for answer in answers))
    return path


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_folder_without_sets_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    missing = str(tmp_path / "missing")
    assert refusal(name, [missing], monkeypatch, capsys) == (
        f"error: {missing}: must be a folder of recorded sets, one JSONL each\n"
    )
    error = refusal(name, [str(tmp_path)], monkeypatch, capsys)
    assert error.startswith(f"error: {tmp_path}: has no sets; must have ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_set_that_is_missing_or_too_small_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    write(tmp_path / "other.jsonl", "an answer")
    error = refusal(name, [str(tmp_path)], monkeypatch, capsys)
    assert f"{tmp_path}: has the sets other; must have " in error
    paths = [tmp_path / f"{set_}.dev.jsonl" for set_ in ("llma_rag", "gsm_qwen2_7b", "mbpp_gpt4")]
    for answers in (["an answer"], ["an answer"] * 3 + ["x"] * 2):
        for path in paths:
            write(path, *answers)
        error = refusal(name, [str(tmp_path)], monkeypatch, capsys)
        assert any(f"error: {path}: behind the first {len(answers) * 3 // 5} records, " in error for path in paths)
        assert "must be at least 2" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("name", ADAPTIVE)
def test_other_sets_can_be_asked_for(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    write(tmp_path / "mine.jsonl", "an answer")
    error = refusal(name, [str(tmp_path), "--sets", "mine"], monkeypatch, capsys)
    assert f"error: {tmp_path / 'mine.jsonl'}: behind the first 0 records, 1 have a prompt" in error
    assert "must have yours" in refusal(name, [str(tmp_path), "--sets", "yours"], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("name", "answers", "reason"),
    [
        ("replay", ["an answer"], "short, warm: warm_share = 0.6: of 1 requests it is none"),
        ("replay", ["x", "y"], "no response has a second token"),
        ("draft_cost", ["", "x"], "short.jsonl: no answer has two tokens"),
        ("draft_cost", ["an answer"] * 3, "its answers have 27 tokens together; must be at least 2000"),
    ],
)
def test_answers_that_are_too_few_or_too_short_are_refused(
    name: str, answers: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    module = importlib.import_module(f"benchmarks.{name}")
    write(tmp_path / "short.jsonl", *answers)
    monkeypatch.setattr("batchserve.bench.replay_command.load_encoder", characters)
    monkeypatch.setattr(module, "measure" if name == "replay" else "cost", None)  # nothing is measured before
    assert reason in refusal(name, [str(tmp_path)], monkeypatch, capsys)


@pytest.mark.parametrize("name", ["reference_ablation", "trie_ablation"])
def test_a_file_that_is_missing_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    missing = str(tmp_path / "missing.jsonl")
    monkeypatch.setattr("benchmarks.trie_ablation.compile_kernels", lambda: None)
    error = refusal(name, [missing, "--out", str(tmp_path)], monkeypatch, capsys)
    assert error == f"error: {missing}: cannot be read: No such file or directory\n"


@pytest.mark.parametrize("name", ["adaptive.ceiling", "adaptive.lengths"])
def test_a_simulation_needs_the_step_times_of_gain(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    for each in ("llma_rag", "mbpp_gpt4"):
        write(tmp_path / f"{each}.jsonl", *["an answer"] * 5)
    monkeypatch.setattr("benchmarks.adaptive.simulation.RESULTS", tmp_path)
    error = refusal(name, [str(tmp_path)], monkeypatch, capsys)
    assert f"{tmp_path / 'adaptive' / 'gain.json'}: is not there; benchmarks.adaptive.gain" in error


def test_prompts_arrive_beside_answers_that_are_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    short = ReplayRecord([1], [1] * 599, [])
    monkeypatch.setattr(prefill, "recorded_sets", lambda options: [Workload("any", [], [short, short])])
    assert "the measured answers have 1198 tokens; must be at least 1200" in refusal(
        "adaptive.prefill", [str(tmp_path)], monkeypatch, capsys
    )


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("drafters", ["--rounds", "0"], "--sizes, --rounds, --prompts: must be at least 1"),
        ("drafters", ["--sizes", "4", "0"], "--sizes, --rounds, --prompts: must be at least 1"),
        ("draft_cost", [".", "--drafters", "trie,jacobi"], "--drafters trie,jacobi: must be of "),
        ("replay", [".", "--max-draft-tokens", "x"], "'x' is not a list of integers"),
        ("adaptive.gain", [".", "--drafter", "x"], "--drafter: invalid choice: 'x'"),
        ("adaptive.row_price", [".", "--drafter", "none"], "unrecognized arguments: --drafter none"),
        ("adaptive.overhead", [".", "--sets", "one,two"], "argument --sets: one,two: must be one set"),
    ],
)
def test_wrong_options_are_refused(
    name: str, arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    assert reason in refusal(name, arguments, monkeypatch, capsys)


def test_sets_are_found_by_what_is_before_the_first_dot(tmp_path: Path):
    first = write(tmp_path / "one.dev.jsonl", "an answer")
    write(tmp_path / "one.test.jsonl", "an answer")
    other = write(tmp_path / "two.jsonl", "an answer")
    assert find_sets(tmp_path) == {"one": first, "two": other}
    assert find_sets(tmp_path, ["two"]) == {"two": other}
    with pytest.raises(ConfigError, match="has the sets one, two; must have three"):
        find_sets(tmp_path, ["two", "three"])


def test_two_records_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workloads, "load_encoder", characters)
    write(tmp_path / "few.jsonl", "a", "b", "cd", "ef")
    found = recorded(Options(tmp_path, True, "mixture", "out"), "few")
    assert (len(found.warm), [record.response_token_ids for record in found.records]) == (
        2,
        [[99, 100], [101, 102]],
    )


def test_records_longer_than_the_models_context_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """They would be run without drafts, and look like text that gains nothing. A prompt here has five tokens."""
    monkeypatch.setattr(workloads, "load_encoder", characters)
    fitting, long = "x" * (workloads.MAX_POSITIONS - len("to do")), "x" * (workloads.MAX_POSITIONS - len("to do") + 1)
    path = write(tmp_path / "mine.jsonl", *["an answer"] * 6, "two", fitting, long, "three")
    workload = recorded(Options(tmp_path, True, "mixture", ""), "mine")
    assert [len(record.response_token_ids) for record in workload.records] == [3, len(fitting), 5]
    assert capsys.readouterr().err == f"{path}: 1 of 4 records are left out: of more than 4096 tokens\n"
