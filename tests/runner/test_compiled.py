"""The whole model compiles around opaque attention: in one piece, once for each number of rows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch._dynamo import reset
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from batchserve.attention.custom_op import OpaqueAttention, attend_op
from batchserve.attention.paged import PagedBackend
from batchserve.config import EngineConfig
from batchserve.engine import build as build_module
from batchserve.engine.build import build_engine
from batchserve.errors import ConfigError
from batchserve.runner.compiled import CompiledModel
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.ragged_batch import RaggedBatch, RequestRows, build_batch
from tests.attention.test_mask import random_parents
from tests.equivalence.harness import Coverage, build, random_jobs, run
from tests.factories import make_sampling
from tests.graphs import RerunCapturer
from tests.tiny_models import VOCAB_SIZE

BUCKETS = (4, 13)


def ragged_batch(rng: random.Random, runner: ModelRunner, num_rows: int) -> RaggedBatch:
    """Trees of 1 to 3 requests with contexts; their K/V is reserved."""
    cuts = sorted(rng.sample(range(1, num_rows), rng.randint(0, 2)))
    requests, allocator = [], runner.backend.allocator
    for i, (start, end) in enumerate(zip([0, *cuts], [*cuts, num_rows], strict=True)):
        context = rng.randint(0, 40)
        allocator.reserve(f"r{i}", context + end - start)
        allocator.commit(f"r{i}", range(context))
        parents = [-1, *(parent + 1 for parent in random_parents(rng, end - start - 1))]
        ids = [rng.randrange(3, VOCAB_SIZE) for _ in parents]
        requests.append(RequestRows(f"r{i}", context, ids, parents, 1, make_sampling()))
    return build_batch(requests)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_no_graph_breaks_and_no_recompiles_over_ragged_steps(tiny_model: dict[str, Path], name: str) -> None:
    runner = build(tiny_model[name], attention_backend="torch", drafter="none").core.runner
    assert isinstance(runner.backend, PagedBackend)
    reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    compiled, rng = CompiledModel(runner._model, runner.backend, counter), random.Random(3)
    for step in range(12):
        batch = ragged_batch(rng, runner, BUCKETS[step % 2])
        with torch.inference_mode():
            expected = runner.forward(batch)
            written = [cache.clone() for caches in runner.backend.caches for cache in caches]
            for caches in runner.backend.caches:
                for cache in caches:
                    cache[runner.backend._metadata.slot_mapping] = 0
            inputs = (batch.input_ids, batch.position_ids, batch.logit_rows)
            torch.testing.assert_close(compiled(*map(torch.from_numpy, inputs)), expected)
            caches = [cache for caches in runner.backend.caches for cache in caches]
            torch.testing.assert_close(caches, written)
        for rows in batch.requests:
            runner.backend.allocator.release(rows.request_id)
        assert counter.frame_count == min(step + 1, len(BUCKETS)), "one program for each number of rows"
    assert not counters["graph_break"]


def test_the_operator_says_what_it_writes_to_and_what_comes_out(tiny_model: dict[str, Path]) -> None:
    """torch's own checks of an operator: its schema, and its shapes without data against those with."""
    runner = build(tiny_model["llama"], attention_backend="torch", drafter="none").core.runner
    assert isinstance(runner.backend, PagedBackend)
    opaque = OpaqueAttention(runner.backend)
    batch = ragged_batch(random.Random(1), runner, 9)
    runner.backend.begin(batch.spans)
    query, key, value = (
        torch.randn(1, heads, 9, 16, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2)
    )
    arguments = (query, key, value, *runner.backend.caches[1], None, opaque._number, 0.25, None, None)
    torch.library.opcheck(attend_op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_graphs_of_the_compiled_model_give_the_same_answers(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "choose_capturer", lambda config, device, kernel: RerunCapturer())
    monkeypatch.setattr(
        build_module, "CompiledModel", lambda model, backend: CompiledModel(model, backend, "aot_eager")
    )
    jobs = random_jobs(random.Random(2), 6, VOCAB_SIZE, longest=40)
    options = {"attention_backend": "torch", "max_num_seqs": 4, "max_num_batched_tokens": 16}
    compiled = run(build(tiny_model["llama"], compile_model=True, **options), jobs, Coverage())
    monkeypatch.undo()
    eager = run(build(tiny_model["llama"], **options), jobs, Coverage())
    assert {i: a.token_ids for i, a in compiled.items()} == {i: a.token_ids for i, a in eager.items()}


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_compiling_without_graphs_is_refused(tiny_model: dict[str, Path], backend: str) -> None:
    config = EngineConfig(model=str(tiny_model["llama"]), device="cpu", attention_backend=backend, compile_model=True)
    with pytest.raises(ConfigError, match="compile_model = True: must be with CUDA graphs"):
        build_engine(config)
