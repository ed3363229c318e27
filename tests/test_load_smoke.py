"""Locust against a real server for ten seconds: every stream well-formed, no failure, both modes answered."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]


pytestmark = pytest.mark.skipif(
    not (ROOT / "batchserve" / "data" / "bundled" / "config.json").exists(), reason="the bundled model is not there"
)


def _start(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "load_tests.run", *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_ctrl_c_is_no_traceback():
    process = _start("--stage-seconds", "60")
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline()]
        while lines[-1] and "serving on" not in lines[-1]:
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.terminate()
    assert process.returncode == 128 + signal.SIGINT, output
    assert "Traceback" not in output


def test_load_smoke(tmp_path):
    out = tmp_path / "load.json"
    process = _start("--smoke", "--out", str(out), "--html", str(tmp_path / "load.html"))
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.terminate()  # which ends the server too, where a kill would leave it behind
    assert process.returncode == 0, output
    assert f"report written to {tmp_path / 'load.html'}" in output
    root = ElementTree.fromstring((tmp_path / "load.html").read_text().removeprefix("<!doctype html>"))
    svg = "{http://www.w3.org/2000/svg}"
    assert [len([*plot.iter(f"{svg}polyline")]) for plot in root.iter(f"{svg}svg")] == [2, 4, 4]
    assert len([*root.iter("table")]) == 3
    stages = json.loads(out.read_text())["stages"]
    assert {(stage["users"], stage["speculation"]) for stage in stages} == {
        (users, mode) for users in (2, 8, 16) for mode in ("on", "off")
    }
    assert all(stage["requests"] > 0 and stage["failures"] == 0 for stage in stages)
    assert all(stage["draft_tokens"] == 0 for stage in stages if stage["speculation"] == "off")
    assert any(stage["accepted_draft_tokens"] > 0 for stage in stages if stage["speculation"] == "on")
