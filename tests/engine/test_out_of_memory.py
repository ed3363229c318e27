"""A system without memory: one line at start, and while serving at most the request that asks for most ends."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchserve.config import EngineConfig
from batchserve.engine.engine_core import EngineCore, Event
from batchserve.errors import BatchserveError, ConfigError, OutOfMemoryError, is_out_of_memory
from batchserve.free_memory import describe_out_of_memory
from batchserve.runner.model_runner import ModelRunner
from batchserve.startup.build import build_engine
from batchserve.types import SamplingParams, SpeculationParams
from tests.equivalence.harness import build
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.faults, pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS, and /proc")]
MiB = 1 << 20
KEEPS_NO_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(MiB), "MALLOC_ARENA_MAX": "1"}  # K/V that is freed is the system's
REFUSAL = (
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes. Error code 12"
)

# Eight requests under an address space that has room for few of them; then a single one that has none.
UNDER_A_LIMIT = """
import resource, sys, time
from pathlib import Path
from batchserve.config import EngineConfig
from batchserve.startup import measure_steps
from batchserve.startup.build import build_engine
from batchserve.types import SamplingParams, SpeculationParams

measure_steps.MAX_SECONDS = 0.0
built = build_engine(EngineConfig(sys.argv[1], dtype="float32", num_threads=1, kv_cache_memory=300 << 20,
                                  prefix_cache=False, decoding_length=0, max_num_seqs=8,
                                  max_num_batched_tokens=256))
core, events = built.core, {}
core.emit = lambda told: [events.setdefault(request.request_id, []).append(event) for request, event in told]

def run(sizes, room):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    events.clear()
    requests = []
    for number, size in enumerate(sizes):
        params = SamplingParams(0.0, max_tokens=4, ignore_eos=True)
        prompt = [3 + i % 97 for i in range(size)]
        requests.append(built.processor.make_request(str(number), prompt, params, SpeculationParams(), 0.0))
        core.add(requests[-1])
    while core.has_work:
        core.step()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    core.check_integrity()
    print("preempted" if any(request.num_preemptions for request in requests) else "not preempted")
    for name, told in sorted(events.items()):
        last = told[-1]
        print(name, getattr(last, "reason", "") or [token for each in told for token in each.token_ids])

run([480], 1 << 40)
run([480] * 8, 50 << 20)
run([480], 1 << 20)
run([30] * 2, 1 << 40)
"""


def under_a_limit(command: list[str], num_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with so much address space."""

    def limit() -> None:
        if num_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))

    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | KEEPS_NO_MEMORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=limit,
    )


@pytest.mark.parametrize("mebibytes", [600, 1400])  # for imports, and for what follows them
def test_a_start_without_memory_ends_with_one_line(tiny_model: dict[str, Path], mebibytes: int) -> None:
    options = ["--model", str(tiny_model["llama"]), "--decoding-length", "0", "--num-threads", "1", "--prompt", "5"]
    options += ["--max-kept-bytes", "0"]  # a kept program needs so little that it starts
    ended = under_a_limit(["-m", "batchserve", "generate", *options], mebibytes * MiB)
    assert ended.returncode in (1, 2)
    assert ended.stderr.splitlines()[-1].startswith("batchserve: ")
    assert "MiB can still be had" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, file.stat().st_size + (1 << 42))  # one large hole
    with pytest.raises(ConfigError, match=r"its weights take 4194304 MiB; [0-9]+ MiB can still be had"):
        build_engine(EngineConfig(str(folder), dtype="float32"))


def test_requests_beyond_the_systems_memory_wait_for_others_and_answer_the_same(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 12}
    folder = save_tiny_model("llama", tmp_path / "model", max_position_embeddings=1024, **wide)
    ended = under_a_limit(["-c", UNDER_A_LIMIT, str(folder)])
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    answer = lines[1].removeprefix("0 ")
    assert lines[3:11] == [f"{number} {answer}" for number in range(8)], "under 50 MiB, of 94 for K/V of all of them"
    assert lines[12] == "0 OUT_OF_MEMORY", "under 1 MiB"
    assert len(lines) == 16, "afterwards"
    assert "OUT_OF_MEMORY" not in lines[14:]


class _Scarce:
    """ModelRunner.launch on a system whose memory holds steps of at most so many rows."""

    def __init__(self, launch: Any, most_rows: int) -> None:
        self.launch, self.most_rows, self.num_refused = launch, most_rows, 0

    def __call__(self, batch: Any) -> Any:
        if batch.num_rows > self.most_rows:
            self.num_refused += 1
            raise RuntimeError(REFUSAL)
        return self.launch(batch)


def answers(core: EngineCore, processor: Any, sizes: list[int]) -> dict[str, Any]:
    events: list[Event] = []
    core.emit = events.extend
    for number, size in enumerate(sizes):
        params = SamplingParams(0.0, max_tokens=12, ignore_eos=True)
        prompt = [3 + (i * i) % 97 for i in range(size)]
        core.add(processor.make_request(str(number), prompt, params, SpeculationParams(), 0.0))
    while core.has_work:
        core.step()
    core.check_integrity()
    told: dict[str, Any] = {}
    for request, event in events:
        if isinstance(event, BatchserveError):
            told[request.request_id] = event
        else:
            told.setdefault(request.request_id, []).extend(event.token_ids)
    return told


def test_a_step_without_memory_ends_only_the_request_with_most_of_its_rows(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(tiny_model["llama"], prefix_cache=False)
    sizes = [12, 300, 20, 5]
    expected = answers(built.core, built.processor, sizes)
    runner: ModelRunner = built.core.executor
    monkeypatch.setattr(runner, "launch", _Scarce(runner.launch, 200))
    found = answers(built.core, built.processor, sizes)
    failed = found.pop("1")
    assert isinstance(failed, OutOfMemoryError)
    assert "4.0 MiB more were asked for" in str(failed)
    del expected["1"]
    assert found == expected
    monkeypatch.undo()
    assert len(answers(built.core, built.processor, sizes)) == 4


def test_a_step_is_tried_again_without_what_is_cached(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(tiny_model["llama"], prefix_cache=True)
    allocator, runner = built.core.executor.allocator, built.core.executor
    expected = answers(built.core, built.processor, [40, 50])
    assert allocator.cached_tokens > 0
    launch = runner.launch
    monkeypatch.setattr(
        runner, "launch", lambda batch: _Scarce(launch, 0 if allocator.cached_tokens > 0 else 1 << 20)(batch)
    )
    assert answers(built.core, built.processor, [40, 50]) == expected


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError(REFUSAL),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("can't start new thread"),
        ImportError("libx.so: failed to map segment from shared object"),
    ],
)
def test_errors_for_want_of_memory_are_known_and_others_are_not(error: Exception) -> None:
    wrapped = ValueError("cannot be loaded")
    wrapped.__cause__ = error
    assert is_out_of_memory(error)
    assert is_out_of_memory(wrapped)
    assert describe_out_of_memory("to serve", error)
    assert describe_out_of_memory("to serve", ValueError("memory")) is None
    assert describe_out_of_memory("to serve", RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
