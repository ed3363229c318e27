"""Where CUDA is found: FlashInfer compiles and links with what is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchserve.attention.cuda_toolkit import find_toolkit, name_toolkit


def make_toolkit(folder: Path) -> Path:
    """A toolkit's folder; returns its nvcc, which says where it is."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib64").mkdir()
    (folder / "lib64" / "libcudart.so").touch()
    return executable(folder / "bin" / "nvcc", f"echo '#$ TOP={folder}' >&2")


def executable(path: Path, line: str) -> Path:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No toolkit is named, and the path has one folder only, which is empty."""
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", "to be taken back")
    monkeypatch.delenv("CUDA_HOME")
    (tmp_path / "local").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "local"))
    return tmp_path


def test_a_wrapper_leads_to_the_toolkit_that_it_starts(no_cuda: Path) -> None:
    nvcc = make_toolkit(no_cuda / "cuda-13.0")
    wrapper = executable(no_cuda / "local" / "nvcc", f'exec {nvcc} "$@"')
    assert find_toolkit(wrapper) == no_cuda / "cuda-13.0"
    name_toolkit()
    assert os.environ["CUDA_HOME"] == str(no_cuda / "cuda-13.0")


def test_what_the_caller_has_set_is_left_alone(no_cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_toolkit(no_cuda / "cuda").rename(no_cuda / "local" / "nvcc")
    monkeypatch.setenv("CUDA_PATH", "mine")
    name_toolkit()
    assert "CUDA_HOME" not in os.environ


@pytest.mark.parametrize("line", ["echo nonsense >&2", "exit 1"])
def test_where_nothing_is_found_nothing_is_set(no_cuda: Path, line: str) -> None:
    name_toolkit()
    assert "CUDA_HOME" not in os.environ, "no compiler at all"
    assert find_toolkit(executable(no_cuda / "local" / "nvcc", line)) is None
    name_toolkit()
    assert "CUDA_HOME" not in os.environ
