"""The compiled attention kernel on several threads."""

from __future__ import annotations

import sys

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
