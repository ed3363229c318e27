"""What results say of where they come from."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from benchmarks import common, report

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a module and a result, both committed, in the place of this one."""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "module.py").write_text("one\n")
    (tmp_path / "benchmarks" / "results" / "norm.json").write_text("{}\n")
    by = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for arguments in (("init", "-q"), ("add", "."), (*by, "commit", "-qm", "first")):
        subprocess.run(("git", *arguments), cwd=tmp_path, check=True)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    return tmp_path


@needs_git
def test_results_name_the_commit_and_whether_the_code_was_changed(checkout: Path) -> None:
    """Results of the run before, and files that git does not know, are no change."""
    head = common.commit()
    assert head is not None
    full = subprocess.run(("git", "rev-parse", "HEAD"), cwd=checkout, check=True, capture_output=True, text=True).stdout
    assert len(head) >= 7
    assert full.startswith(head)
    (checkout / "benchmarks" / "results" / "norm.json").write_text("[]\n")
    (checkout / "notes").write_text("")
    assert common.commit() == head
    (checkout / "module.py").write_text("two\n")
    assert common.commit() == f"{head}+changes"


@needs_git
def test_without_git_no_commit_is_named(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where there is none to ask, nor of a copy that lies in somebody else's checkout."""
    monkeypatch.setattr(common, "ROOT", checkout / "benchmarks")
    assert common.commit() is None
    monkeypatch.setattr(common, "ROOT", checkout)
    monkeypatch.setenv("PATH", "")
    assert common.commit() is None


def test_results_are_dated_and_the_report_prints_their_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of one machine share a line, whatever their commits; old ones have none."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    about = {}
    for name, head in (("new", "1234567"), ("old", None)):
        monkeypatch.setattr(common, "commit", lambda head=head: head)
        about[name] = json.loads(common.write_results(name, {"figure": 1}).read_text())
        assert about[name]["figure"] == 1
        assert about[name]["environment"]["commit"] == head
    written = datetime.fromisoformat(about["new"]["environment"]["date"])
    assert timedelta(0) <= datetime.now(UTC) - written < timedelta(minutes=10)
    del about["old"]["environment"]["commit"], about["old"]["environment"]["date"]
    monkeypatch.setattr(report, "read", about.__getitem__)
    line = report.machines("new", "old")
    assert line.startswith("- new, old: ")
    assert "1234567" not in line
