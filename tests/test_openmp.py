"""The compiled attention kernel on several threads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from batchserve import openmp
from batchserve.attention.cpu import ALONE
from tests.attention.test_backends import random_case, run_case


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def outputs(dtype):
    return [tensor for seed in range(12) for tensor in run_case(random_case(seed, dtype), "batch_invariant")]


@pytest.mark.skipif(sys.platform != "linux", reason="found by what the process has mapped")
def test_torchs_threads_are_found():
    assert openmp._library() is not None


def test_the_library_beside_torch_is_taken_wherever_that_is(tmp_path: Path):
    real, link = tmp_path / "a folder" / "torch", tmp_path / "link"
    own, other = real / "lib" / "libgomp-a34b.so.1", tmp_path / "sentencepiece.libs" / "libgomp-b.so.1"
    for path in (own, other):
        path.parent.mkdir(parents=True)
        path.touch()
    link.symlink_to(real.parent)
    start = "7f0a000000-7f0a001000 r-xp 00000000 fe:00 1234                    "
    lines = [f"{start}{path}" for path in (own, own, other, tmp_path / "libgomp.so.1 (deleted)", "[stack]")]
    lines.append(start)
    for folder in (real, link / "torch"):
        assert openmp._find("\n".join(lines), folder) == own
    assert openmp._find("\n".join(lines), tmp_path / "none") is None  # whose is it?
    assert openmp._find(lines[2], tmp_path / "none") == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(monkeypatch, two_threads, dtype):
    started = []
    run = openmp.run
    monkeypatch.setattr(openmp, "run", lambda loop, job, count: (started.append(count), run(loop, job, count)))
    shared = outputs(dtype)
    assert set(started) == {1, 2}, f"there should be steps of less work than {ALONE}, and of more"
    monkeypatch.setattr(openmp, "_library", lambda: None)  # as where torch's threads cannot be found
    alone = outputs(dtype)
    assert all(torch.equal(a, b) for a, b in zip(shared, alone, strict=True))
