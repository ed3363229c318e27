"""The compiled attention kernel on several threads."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from batchserve import LLM, SamplingParams
from batchserve.attention.cpu import ALONE
from batchserve.native import openmp
from tests.attention.test_backends import random_case, run_case


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def outputs(dtype):
    return [tensor for seed in range(12) for tensor in run_case(random_case(seed, dtype), "native")]


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


SERVED = """
import sys
from batchserve import LLM, SamplingParams
from batchserve.startup import measure_steps
measure_steps.MAX_SECONDS = 0.0
llm = LLM(sys.argv[1], dtype="float32", num_threads=2, kv_cache_memory=1 << 20, decoding_length=0)
prompts = [[5, 6, 7, 8], [*range(3, 40)]]
print([output.token_ids for output in llm.generate(prompts, SamplingParams(0.0, max_tokens=12, ignore_eos=True))])
"""


@pytest.mark.faults
@pytest.mark.parametrize("settings", [{"OMP_THREAD_LIMIT": "1"}, {"OMP_DYNAMIC": "true", "OMP_MAX_ACTIVE_LEVELS": "0"}])
def test_threads_that_openmp_does_not_give_change_no_token(tiny_model: dict[str, Path], settings: dict[str, str]):
    folder = tiny_model["llama"]
    llm = LLM(str(folder), dtype="float32", num_threads=1, kv_cache_memory=1 << 20, decoding_length=0)
    prompts = [[5, 6, 7, 8], [*range(3, 40)]]
    outputs = llm.generate(prompts, SamplingParams(0.0, max_tokens=12, ignore_eos=True))
    command = [sys.executable, "-c", SERVED, str(folder)]
    served = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert served.returncode == 0, served.stderr
    assert served.stdout.strip() == str([output.token_ids for output in outputs])


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="found by what the process has mapped")
def test_the_size_of_the_team_is_measured_in_each_thread():
    library = openmp._library()

    def sizes(is_dynamic: int, levels: int) -> tuple[int, int]:
        """(threads that torch believes in, threads that a loop gets); OpenMP keeps settings per thread."""
        library.omp_set_dynamic(is_dynamic)
        library.omp_set_max_active_levels(levels)
        given = openmp.use_threads(2)
        assert given == torch.get_num_threads()
        return given, openmp._team_size(library, 2)

    with ThreadPoolExecutor(1) as pool:
        for is_dynamic, levels in ((0, 0), (1, 1), (1, 0)):
            assert pool.submit(sizes, is_dynamic, levels).result() == (2, 2)
