"""`batchserve bench replay` as a user runs it: on the sample data, with the bundled tokenizer."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from batchserve.bench import add_bench_parser
from batchserve.bench.options import ReplayOptions
from batchserve.bench.replay import ReplayResult
from batchserve.bench.view import show_results
from batchserve.cli import main
from batchserve.errors import ConfigError

DATA = Path(str(resources.files("batchserve"))) / "data" / "replay"
SETS = ("gsm_qwen2_7b", "crux_qwen25_7b", "gsm8k_gpt3_175b")
SAMPLE = str(DATA / "gsm8k_gpt3_175b.jsonl")
RESULT_FIELDS = [
    "drafter",
    "max_draft_tokens",
    "acceptance_length",
    "draft_tokens_per_step",
    "retrieve_us",
    "update_us",
    "memory_bytes",
    "steps",
    "tokens",
]


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    add_bench_parser(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["bench", "replay", *flags])
    status: int = arguments.run(arguments)
    return status


def replay(tmp_path: Path, *flags: str, file: str = SAMPLE) -> dict[str, Any]:
    out = tmp_path / "out.json"
    assert run(file, "--tokenizer", "bundled", "--json", str(out), *flags) == 0
    written: dict[str, Any] = json.loads(out.read_text())
    return written


@pytest.mark.parametrize("name", SETS)
def test_the_sample_data_says_where_it_is_from(name: str):
    text = (DATA / f"{name}.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert len(records) == 24
    assert len({record["id"] for record in records}) == 24
    assert all("MIT" in record["license"] and "github" in record["source"] for record in records)
    readme = (DATA / "README.md").read_text()
    assert f"{name}.jsonl" in readme


def test_drafters_side_by_side(tmp_path: Path, capsys: Any):
    done = replay(tmp_path, "--drafter", "mixture,trie,none", "--max-draft-tokens", "4,16", "--limit", "8")
    assert list(done) == ["file", "warm", "streams", "results"]
    assert (done["file"], done["warm"], done["streams"]) == ("gsm8k_gpt3_175b.jsonl", None, 1)
    results = done["results"]
    assert [list(result) for result in results] == [RESULT_FIELDS] * 6
    assert [(r["drafter"], r["max_draft_tokens"]) for r in results] == [
        (drafter, k) for drafter in ("mixture", "trie", "none") for k in (4, 16)
    ]
    assert len({r["tokens"] for r in results}) == 1, "the same responses"
    for result in results:
        assert result["acceptance_length"] == pytest.approx(result["tokens"] / result["steps"], abs=1e-4)
        assert result["draft_tokens_per_step"] <= result["max_draft_tokens"]
        if result["drafter"] == "none":
            assert (result["acceptance_length"], result["draft_tokens_per_step"], result["memory_bytes"]) == (1, 0, 0)
        else:
            assert result["acceptance_length"] > 1.2
            assert min(result["retrieve_us"], result["update_us"], result["memory_bytes"]) > 0
    shown = capsys.readouterr()
    assert "8 requests" in shown.out
    for result in results:
        assert f"{result['acceptance_length']:.2f}" in shown.out
    for heading in ("mixture", "trie", "none", "acceptance", "retrieve", "update", "memory"):
        assert heading in shown.out
    assert shown.err == "", "no moving pictures where nobody sees them"


def test_eighty_characters_hold_the_table(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setenv("COLUMNS", "80")
    result = ReplayResult("reference", 1024, 123.456, 1023.94, 12345.67, 123.456, 256 << 20, 1_234_567, 10_000_000)
    show_results(ReplayOptions(Path(SAMPLE), "bundled", ("reference",)), [result], 0, 6)
    table = capsys.readouterr().out.split("acceptance length:")[0]
    (row,) = (line for line in table.splitlines() if "reference" in line)
    assert row.split() == ["reference", "1024", "123.46", "1023.9", "12345.7", "123.46", "256.0", "1234567"]
    assert "drafter    at most      length  a step      (us)    (us)   (MiB)    steps" in table
    assert max(map(len, table.splitlines())) <= 80


def test_what_was_seen_before_helps(tmp_path: Path):
    flags = ("--drafter", "mixture", "--max-draft-tokens", "8")
    cold = replay(tmp_path, *flags)
    same = replay(tmp_path, *flags, "--warm", SAMPLE)
    assert same["warm"] == "gsm8k_gpt3_175b.jsonl"
    assert same["results"][0]["tokens"] == cold["results"][0]["tokens"]
    assert same["results"][0]["acceptance_length"] > 1.5 * cold["results"][0]["acceptance_length"]


@pytest.mark.faults
@pytest.mark.parametrize("name", [*SETS, f"{SETS[0]}.jsonl"])
def test_a_bundled_set_has_a_name_in_any_folder(tmp_path: Path, monkeypatch: Any, name: str):
    monkeypatch.chdir(tmp_path)
    done = replay(tmp_path, "--drafter", "none", "--limit", "2", "--warm", SETS[1], file=name)
    assert (done["file"], done["warm"]) == (f"{name.removesuffix('.jsonl')}.jsonl", f"{SETS[1]}.jsonl")
    (tmp_path / name).write_text('{"prompt": "a", "response": "a b c"}\n')
    assert replay(tmp_path, "--drafter", "none", file=name)["file"] == name, "a file of that name comes first"


@pytest.mark.faults
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_measured(monkeypatch: Any):
    monkeypatch.setattr("batchserve.bench.replay_command.measure", None)
    with pytest.raises(ConfigError, match=r"json = '/proc/out\.json': cannot be written"):
        run(SAMPLE, "--tokenizer", "bundled", "--drafter", "none", "--json", "/proc/out.json")


def test_the_first_share_is_seen_before_and_the_rest_is_measured(tmp_path: Path, capsys: Any):
    done = replay(tmp_path, "--drafter", "none", "--warm-share", "0.75")
    assert done["warm"] == 0.75
    assert "6 requests" in capsys.readouterr().out
    whole, first = (replay(tmp_path, "--drafter", "none", *more) for more in ((), ("--limit", "18")))
    tokens = [each["results"][0]["tokens"] for each in (whole, first, done)]
    assert tokens[0] == tokens[1] + tokens[2]


def test_the_bounds_of_draft_tokens_themselves_are_inside(tmp_path: Path):
    done = replay(tmp_path, "--drafter", "reference", "--max-draft-tokens", "1,1024", "--limit", "2")
    least, most = (each["draft_tokens_per_step"] for each in done["results"])
    assert 0 < least <= 1 < most


def test_the_same_run_gives_the_same_figures(tmp_path: Path):
    def figures() -> list[Any]:
        done = replay(tmp_path, "--drafter", "mixture,trie", "--streams", "5", "--limit", "10")
        assert done["streams"] == 5
        return [(r["acceptance_length"], r["draft_tokens_per_step"], r["steps"]) for r in done["results"]]

    assert figures() == figures()


def test_the_plot_is_a_png(tmp_path: Path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.PNG"
    replay(tmp_path, "--drafter", "none", "--limit", "2", "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"plot: needs matplotlib, which is not installed: pip install"):
        replay(tmp_path, "--drafter", "none", "--plot", str(tmp_path / "plot.png"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--drafter", "jacobi"), "drafter = 'jacobi': drafts from the model's own output"),
        (("--drafter", "trie,wrong"), "drafter = 'wrong': must be one of mixture, trie, reference, none"),
        (("--drafter", "trie,trie"), "drafter = trie, trie: must name each only once"),
        (("--drafter", ""), "drafter = '': must be one of"),
        (("--drafter", "none", "--max-draft-tokens", "0"), r"max_draft_tokens = 0: must be in 1\.\.1024"),
        (("--drafter", "none", "--max-draft-tokens", "8,2000"), r"max_draft_tokens = 2000: must be in 1\.\.1024"),
        (("--drafter", "none", "--max-draft-tokens", "8,8"), "max_draft_tokens = 8, 8: must name each only once"),
        (("--drafter", "none", "--streams", "0"), "streams = 0: must be in"),
        (("--drafter", "none", "--limit", "0"), "limit = 0: must be at least 1"),
        (("--drafter", "none", "--warm-share", "1"), "warm_share = 1.0: must be between 0 and 1"),
        (("--drafter", "none", "--warm", "/no/such"), "/no/such: cannot be read"),
        (("--drafter", "none", "--json", "/no/such/a.json"), "json = '/no/such/a.json': must be a file in a folder"),
        (
            ("--drafter", "none", "--json", "/tmp/a.png", "--plot", "/tmp/a.png"),
            "json = '/tmp/a.png': must be a file of",
        ),
        (("--drafter", "none", "--warm", SAMPLE, "--json", SAMPLE), "json = .*: must be a file of its own"),
        (("--drafter", "none", "--plot", "/"), "plot = '/': must be a file in a folder"),
        (("--drafter", "none", "--plot", "/tmp/a.svg"), "plot = '/tmp/a.svg': must be called NAME.png"),
    ],
)
def test_wrong_options_are_refused(flags: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        run(SAMPLE, "--tokenizer", "bundled", *flags)


def test_warm_file_and_share_exclude_each_other(capsys: Any):
    with pytest.raises(SystemExit):
        run(SAMPLE, "--tokenizer", "bundled", "--drafter", "none", "--warm", SAMPLE, "--warm-share", "0.5")
    assert "not allowed with" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="must not both be given"):
        ReplayOptions(Path(SAMPLE), "bundled", ("none",), warm_file=Path(SAMPLE), warm_share=0.5)


def test_draft_tokens_are_integers(capsys: Any):
    with pytest.raises(SystemExit):
        run(SAMPLE, "--tokenizer", "bundled", "--drafter", "none", "--max-draft-tokens", "8,many")
    assert "'8,many' is not a list of integers" in capsys.readouterr().err


def test_nothing_to_measure_is_said(tmp_path: Path):
    path = tmp_path / "short.jsonl"
    path.write_text('{"prompt": "a", "response": "a"}\n')
    with pytest.raises(ConfigError, match="no response has a second token"):
        replay(tmp_path, "--drafter", "none", file=str(path))


def test_the_command_line_knows_it(tmp_path: Path, capsys: Any):
    out = tmp_path / "out.json"
    flags = ["bench", "replay", SAMPLE, "--tokenizer", "bundled", "--limit", "2", "--json", str(out)]
    assert main([*flags, "--drafter", "none"]) == 0
    assert json.loads(out.read_text())["results"][0]["acceptance_length"] == 1
    assert main([*flags, "--drafter", "jacobi"]) == 2
    assert "batchserve: drafter = 'jacobi'" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said_behind_the_table(tmp_path: Path, capsys: Any):
    (tmp_path / "loop").symlink_to("loop")
    flags = ("--drafter", "none", "--limit", "2", "--json", str(tmp_path / "loop"))
    with pytest.raises(ConfigError, match="loop: cannot be written: "):
        run(SAMPLE, "--tokenizer", "bundled", *flags)
    assert "2 requests" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is Linux's")
def test_a_full_disk_names_the_file():
    flags = ("--drafter", "none", "--limit", "2", "--json", "/dev/full")
    with pytest.raises(ConfigError, match="/dev/full: cannot be written: No space left on device"):
        run(SAMPLE, "--tokenizer", "bundled", *flags)
