"""Locust against a real server for ten seconds: every stream well-formed, no failure, both modes answered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(
    not (ROOT / "batchserve" / "data" / "bundled" / "config.json").exists(), reason="the bundled model is not there"
)
def test_load_smoke(tmp_path):
    out = tmp_path / "load.json"
    command = [sys.executable, "-m", "load_tests.run", "--smoke", "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.terminate()  # which ends the server too, where a kill would leave it behind
    assert process.returncode == 0, output
    stages = json.loads(out.read_text())["stages"]
    assert {(stage["users"], stage["speculation"]) for stage in stages} == {
        (users, mode) for users in (2, 8, 16) for mode in ("on", "off")
    }
    assert all(stage["requests"] > 0 and stage["failures"] == 0 for stage in stages)
    assert all(stage["draft_tokens"] == 0 for stage in stages if stage["speculation"] == "off")
    assert any(stage["accepted_draft_tokens"] > 0 for stage in stages if stage["speculation"] == "on")
