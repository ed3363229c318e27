"""An engine of several ranks: what it sends, and what becomes of it when a rank ends or hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchserve.config import EngineConfig
from batchserve.engine.async_engine import AsyncEngine
from batchserve.errors import ConfigError, EngineFaultError
from batchserve.kv.slab import SlabAllocator
from batchserve.llm import LLM
from batchserve.parallel.lookahead import LookaheadExecutor
from batchserve.parallel.mirror import DivergedError, MirroredAllocator, repeat_changes
from batchserve.types import SamplingParams
from tests.kv.test_slab import LAYERS

PROMPT = [3, 4, 5, 6] * 8


@pytest.fixture
def engine(tiny_model: dict[str, Path], tmp_path: Path) -> LLM:
    return LLM(
        str(tiny_model["llama"]),
        dtype="float32",
        lookahead_parallel_size=2,
        rank_timeout_s=1.0,
        device="cpu",
        cache_dir=str(tmp_path),
    )


def ranks_of(llm: LLM) -> Any:
    executor = llm._core.executor
    assert isinstance(executor, LookaheadExecutor)
    return executor.ranks


def test_ranks_are_processes_that_end_with_the_engine(engine: LLM):
    ranks = ranks_of(engine)
    (process,) = (rank.process for rank in ranks.each)
    engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=8))
    assert process.poll() is None
    assert ranks.num_bytes > 0
    del engine
    ranks.close()
    assert process.poll() == 0


@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "not answered for 1 s")]
)
def test_a_rank_that_ends_or_hangs_ends_the_engine(engine: LLM, number: signal.Signals, message: str):
    (rank,) = ranks_of(engine).each
    os.kill(rank.process.pid, number)
    with pytest.raises(EngineFaultError, match=f"rank 1.*{message}"):
        engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=8))
    with pytest.raises(EngineFaultError, match="rank 1"):
        engine._core.executor.check_device()


async def test_requests_in_flight_end_with_an_error_when_a_rank_is_killed(tiny_model: dict[str, Path], tmp_path: Path):
    model = str(tiny_model["llama"])
    config = EngineConfig(
        model=model, dtype="float32", device="cpu", lookahead_parallel_size=2, cache_dir=str(tmp_path)
    )
    engine = await AsyncEngine.start(config, own_process=True)
    try:
        (rank,) = children_of(engine._host._process.pid)  # type: ignore[attr-defined]
        answer = engine.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(answer)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineFaultError, match="the engine failed"):
            [_ async for _ in answer]
        await engine.wait_failed()
    finally:
        await engine.shutdown()


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for file in found for each in file.read_text().split()]


def test_the_gpu_path_is_refused(tiny_model: dict[str, Path], tmp_path: Path):
    with pytest.raises(ConfigError, match="lookahead_parallel_size = 2: must be 1 on the GPU path"):
        LLM(
            str(tiny_model["llama"]),
            lookahead_parallel_size=2,
            device="cpu",
            attention_backend="torch",
            cache_dir=str(tmp_path),
        )


def test_other_ranks_repeat_what_rank_0_does_to_its_memory():
    mine, theirs = MirroredAllocator(SlabAllocator(LAYERS, "float32", 256)), SlabAllocator(LAYERS, "float32", 256)
    assert mine.reserve("a", 100)
    assert not mine.reserve("b", 200)
    mine.commit("a", range(90))
    mine.retire("a", "scope", list(range(90)))
    assert mine.match_prefix("c", "scope", [*range(80), 7]) == 80
    repeat_changes(theirs, mine.take_changes())
    assert not mine.take_changes()
    theirs.check_integrity({"c"})
    mine.check_integrity({"c"})
    assert theirs.free_tokens == mine.free_tokens
    theirs.reserve("d", 100)
    assert not mine.reserve_all(["c", "e"], [1, 200])
    mine.reserve("e", 64)
    with pytest.raises(DivergedError, match="reserve returned False, on rank 0 True"):
        repeat_changes(theirs, mine.take_changes())


def test_rows_travel_between_allocators():
    allocators = [SlabAllocator(LAYERS, "float32", 256) for _ in range(2)]
    for seed, allocator in enumerate(allocators):
        allocator.reserve("a", 64)
        allocator.commit("a", range(10))
        for layer in range(len(LAYERS)):
            for plane in allocator.planes("a", layer):
                plane[:] = np.random.default_rng([seed, layer, plane.shape[2]]).normal(size=plane.shape)
    mine, theirs = allocators
    before = [plane.copy() for layer in range(len(LAYERS)) for plane in mine.planes("a", layer)]
    mine.move_rows("a", 2, [3, 7, 8])
    theirs.write_rows("a", 2, mine.read_rows("a", 2, 3))
    after = [plane for layer in range(len(LAYERS)) for plane in theirs.planes("a", layer)]
    for old, new in zip(before, after, strict=True):
        assert (new[:, 12:15] == old[:, [13, 17, 18]]).all()
    with pytest.raises(IndexError, match="'a': 65 were not reserved"):
        theirs.write_rows("a", 62, mine.read_rows("a", 0, 3))
