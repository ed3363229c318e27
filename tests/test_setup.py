"""scripts/setup: which torch is asked of whom, told by a Python that only writes down how it was called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HAS_GPU = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$*" in
    *'version("torch")'*) exit 1 ;;
    *"index versions"*) echo "torch ($OFFERED)" ;;
    *"uv pip install"*) exit "$UV_STATUS" ;;
    *" install "*) echo "Successfully installed" ;;
esac
"""

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(HAS_GPU or os.uname().sysname != "Linux", reason="the choice is for Linux without a GPU"),
]


def set_up(tmp_path: Path, offered: str, *arguments: str, has_cpu_index: bool = True) -> list[str]:
    """The calls of pip and uv that install something."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    calls = tmp_path / "calls"
    told = {
        "VENV": str(tmp_path / "venv"),
        "CALLS": str(calls),
        "OFFERED": offered,
        "UV_STATUS": str(int(not has_cpu_index)),
    }
    command = [str(ROOT / "scripts" / "setup"), *arguments]
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert ("may be built for CUDA" in done.stderr) == ("+cpu" not in offered and not has_cpu_index)
    return [line for line in calls.read_text().splitlines() if " install " in line]


def pinned() -> str:
    (line,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    return line.removeprefix("torch==")


@pytest.mark.parametrize("has_cpu_index", [True, False])
def test_without_a_cpu_build_in_the_registry_uv_is_asked_for_it(tmp_path: Path, has_cpu_index: bool):
    uv, torch, package = set_up(tmp_path, pinned(), "", has_cpu_index=has_cpu_index)
    assert uv.endswith("install --quiet uv")
    assert torch.endswith(f"--torch-backend cpu torch=={pinned()}")
    assert package.endswith("-c constraints.txt -e .")


def test_a_registry_with_a_cpu_build_is_all_that_is_asked(tmp_path: Path):
    (only,) = set_up(tmp_path, f"{pinned()}+cpu, {pinned()}", "")
    assert only.endswith("-e .")


def test_tools_come_with_the_tests_only(tmp_path: Path):
    package, *kernels = set_up(tmp_path, f"{pinned()}+cpu")
    assert package.endswith("-e .[dev,load]")
    assert all("--no-deps" in line for line in kernels)
