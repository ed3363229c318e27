"""Steps as graphs, without a GPU: what is captured runs again instead of being replayed; all else is the real thing."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchserve.attention.base import AttentionParams, LayerShape
from batchserve.attention.paged import PagedBackend, step_arrays
from batchserve.attention.static_step import MAX_CHANGES, StaticStep
from batchserve.attention.step_buffer import BufferRing, StepLayout
from batchserve.attention.torch_paged import TorchKernel
from batchserve.attention.tree_metadata import visible_slots
from batchserve.attention.triton import TritonTreeKernel
from batchserve.config import EngineConfig
from batchserve.errors import ConfigError
from batchserve.kv.slot_kernels import DUMMY_SLOT, UPLOADED, WORD_BITS
from batchserve.request import GREEDY
from batchserve.runner.cuda_graphs import (
    CannotBeCapturedError,
    StepGraphs,
    bucket_sizes,
    buckets,
    choose_capturer,
    run_without_waiting,
)
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.sampling.recordings import Recordings
from batchserve.startup import modules
from batchserve.startup.build import BuiltEngine, build_engine
from batchserve.types import SamplingParams
from tests.attention.test_paged import CPU, Recording, random_step
from tests.drafters import RandomTreeDrafter
from tests.equivalence.harness import Coverage, Job, build, random_jobs, run
from tests.factories import examples, make_sampling
from tests.graphs import RerunCapturer
from tests.tiny_models import VOCAB_SIZE

ROWS, REQUESTS = 512, 6


def built_as_graphs(
    monkeypatch: pytest.MonkeyPatch, model: Path, drafter: Any = None, **options: Any
) -> tuple[BuiltEngine, RerunCapturer]:
    capturer = RerunCapturer()
    monkeypatch.setattr(modules, "choose_capturer", lambda config, device, kernel: capturer)
    built = build(model, drafter, attention_backend="torch", **options)
    capturer.replays = 0
    return built, capturer


@pytest.mark.parametrize(
    ("max_rows", "last"), [(1, [1]), (2, [1, 2]), (7, [2, 4, 7]), (512, [256, 384, 512]), (1100, [768, 1024, 1100])]
)
def test_buckets_ascend_to_the_bound(max_rows: int, last: list[int]) -> None:
    sizes = bucket_sizes(max_rows)
    assert sizes[-len(last) :] == last
    assert sizes == sorted(set(sizes))
    assert all(wide <= max(2 * narrow, narrow + 1) for narrow, wide in itertools.pairwise(sizes))


def test_a_bucket_of_rows_has_the_requests_that_so_many_rows_can_be_of() -> None:
    """Fewer rows than requests would make FlashInfer's plan of the graph underflow."""
    assert buckets([1, 2, 4, 24, 64], 16, 4096) == [(1, 1), (2, 2), (4, 4), (24, 16), (64, 16)]


@examples(200)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 300), st.sets(st.integers(1, 39)), st.integers(0, 2**32))
def test_every_step_finds_a_graph_of_two_dimensions(
    max_num_seqs: int, max_model_len: int, max_rows: int, sizes: set[int], seed: int
) -> None:
    sizes = {size for size in sizes if size < max_num_seqs} | {max_num_seqs}
    max_rows = min(max_rows, max_num_seqs * max_model_len)
    found = buckets(bucket_sizes(max_rows), max_num_seqs, max_model_len, sorted(sizes))
    assert found == sorted(set(found))
    assert {requests for _, requests in found} <= sizes
    # A capture gives a bucket's rows to its requests, of which none can have more than max_model_len.
    assert all(rows <= requests * max_model_len for rows, requests in found)
    rng = random.Random(seed)
    rows = rng.randint(1, max_rows)
    requests = rng.randint(-(-rows // max_model_len), min(rows, max_num_seqs))
    chosen = next(bucket for bucket in found if bucket[0] >= rows and bucket[1] >= requests)
    assert chosen[0] == min(size for size in bucket_sizes(max_rows) if size >= rows)
    # Nothing smaller would do, but for what this bucket of rows cannot be captured with.
    fitting = [size for size in sizes if size >= requests and size * max_model_len >= chosen[0]]
    assert chosen[1] == min(fitting)


@pytest.mark.parametrize("sizes", [[1, 4], [4, 32], []])
def test_sizes_end_with_the_most_requests(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="max_num_seqs = 16"):
        buckets([1, 64], 16, 4096, sizes)


@examples(100)
@given(st.integers(0, 2**32))
def test_a_padded_step_says_what_the_eager_one_does(seed: int) -> None:
    """In buffers in which another step was before."""
    spans, allocator, _ = random_step(seed)
    other_spans, other_allocator, _ = random_step(seed + 1)
    kernel, static = Recording(), StaticStep(ROWS, REQUESTS)
    layout = StepLayout(static.fields)
    host = torch.full((layout.num_bytes,), 77, dtype=torch.uint8)
    static.bind(layout.views(host), torch.full((REQUESTS * 500,), 77, dtype=torch.int32), 500)
    for these_spans, theirs in ((other_spans, other_allocator), (spans, allocator)):
        static_backend = PagedBackend([LayerShape(1, 4, 4)], torch.float32, CPU, kernel, theirs)
        arrays, _ = step_arrays(these_spans, theirs, layout.arrays(host))
        static_backend.begin_static(static, arrays)
        static_backend.find_slots(static)
    eager_kernel = Recording()
    allocator._books[:, UPLOADED] = 0
    eager_backend = PagedBackend([LayerShape(1, 4, 4)], torch.float32, CPU, eager_kernel, allocator)
    eager_backend.begin(spans)
    padded, eager = kernel.planned[-1], eager_kernel.planned[-1]
    rows, requests = eager.num_rows, eager.num_requests
    assert (padded.num_rows, padded.num_requests, padded.bucket, padded.max_rows) == (ROWS, REQUESTS, ROWS, ROWS)
    assert not padded.is_causal
    for name in ("qo_indptr", "kv_indptr"):
        on_device, on_host, wanted = (
            getattr(m, n) for m, n in ((padded, name), (padded, f"{name}_cpu"), (eager, name))
        )
        assert torch.equal(on_device, on_host)
        assert torch.equal(on_device[: requests + 1], wanted)
        assert (on_device[requests:] == wanted[-1]).all()
    assert torch.equal(padded.kv_lens_cpu, padded.kv_indptr_cpu.diff())
    assert torch.equal(padded.kv_indices[: len(eager.kv_indices)], eager.kv_indices)
    assert torch.equal(padded.positions[:rows], eager.positions)
    assert torch.equal(padded.slot_mapping[:rows], eager.slot_mapping)
    assert (padded.slot_mapping[rows:] == DUMMY_SLOT).all()
    assert padded.ancestors.shape == (ROWS, ROWS // WORD_BITS)
    assert not padded.ancestors[rows:].any()
    for i in range(requests):
        for window in (None, 9):
            assert torch.equal(visible_slots(padded, i, window), visible_slots(eager, i, window))
    query = torch.randn(1, 2, ROWS, 4, generator=torch.Generator().manual_seed(0))
    out = static_backend.attend(0, query, query[:, :1], query[:, :1], AttentionParams(1.0))
    inside = query[:, :, :rows]
    assert torch.equal(
        out[:, :rows], eager_backend.attend(0, inside, inside[:, :1], inside[:, :1], AttentionParams(1.0))
    )
    assert not out[:, rows:].any()


def test_a_buffer_is_filled_again_only_when_its_copies_are_done() -> None:
    log: list[str] = []

    class Event:
        def __init__(self) -> None:
            self.name = f"e{sum(entry.startswith('new') for entry in log)}"
            log.append(f"new {self.name}")

        def record(self) -> None:
            log.append(f"record {self.name}")

        def synchronize(self) -> None:
            log.append(f"wait {self.name}")

    ring = BufferRing(8, CPU, count=2, make_event=Event)
    taken = []
    for _ in range(5):
        taken.append(ring.take().data_ptr())
        ring.sent()
    assert taken[0] == taken[2] == taken[4] != taken[1] == taken[3]
    assert log == ["new e0", "record e0", "new e1", "record e1"] + [
        entry for name in ("e0", "e1", "e0") for entry in (f"wait {name}", f"record {name}")
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("max_graph_rows", [4, 24, 512])
def test_every_step_that_fits_is_a_graph_and_answers_stay_the_same(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch, temperature: float, max_graph_rows: int
) -> None:
    rng = random.Random(7)
    jobs = random_jobs(rng, 10, VOCAB_SIZE, longest=60)
    for i, job in enumerate(jobs):
        job.params = SamplingParams(temperature=temperature, seed=i, max_tokens=job.params.max_tokens, top_p=0.9)
    options: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 80}
    eager = run(build(tiny_model["llama"], attention_backend="torch", **options), jobs, Coverage(), speculate=False)
    drafter = RandomTreeDrafter(VOCAB_SIZE, 7)
    built, capturer = built_as_graphs(
        monkeypatch, tiny_model["llama"], drafter, max_graph_rows=max_graph_rows, **options
    )
    graphs = built.core.executor.graphs
    assert graphs is not None
    assert graphs.sizes[-1] == min(max_graph_rows, 80)
    expected, launches = 0, 0
    launch = ModelRunner.launch

    def counting(runner: ModelRunner, batch: Any) -> Any:
        nonlocal expected, launches
        launches += 1
        expected += batch.num_rows <= graphs.sizes[-1]
        return launch(runner, batch)

    monkeypatch.setattr(ModelRunner, "launch", counting)
    answers = run(built, jobs, Coverage())
    assert {i: a.token_ids for i, a in answers.items()} == {i: a.token_ids for i, a in eager.items()}
    assert capturer.replays == expected > 0
    assert (expected == launches) == (max_graph_rows >= 80)


def test_a_step_takes_the_smallest_graph_with_room_for_it(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, _ = built_as_graphs(
        monkeypatch, tiny_model["llama"], max_num_seqs=2, max_num_batched_tokens=40, max_graph_rows=32
    )
    graphs, allocator = built.core.executor.graphs, built.core.executor.allocator
    assert graphs is not None
    used: list[int] = []
    for bucket, graph in graphs._graphs.items():
        monkeypatch.setitem(graphs._graphs, bucket, wrapped(graph, lambda rows=bucket[0]: used.append(rows)))
    for counts in ([1], [1, 2], [8], [9], [20, 5], [32], [33], [1, 1, 1]):
        used += [] if launch(graphs, allocator, counts) else [0]
    assert used == [1, 4, 8, 16, 32, 32, 0, 0]


def launch(graphs: StepGraphs, allocator: Any, counts: list[int]) -> list[Any] | None:
    """What a step of requests with so many rows says, which are new and chains; None: no graph had room for it."""
    requests = [
        RequestRows(f"r{i}", 0, [5] * count, list(range(-1, count - 1)), 1, make_sampling())
        for i, count in enumerate(counts)
    ]
    for request in requests:
        allocator.reserve(request.request_id, len(request.token_ids))
    handle = graphs.launch(build_batch(requests), Recordings())
    said = handle and [*handle.wait()]
    for request in requests:
        allocator.release(request.request_id)
    return said


def test_two_kinds_of_buckets_over_one_engine_say_the_same(tiny_model: dict[str, Path]) -> None:
    """As benchmarks/gpu compares them: one dimension with all requests in every graph, and two dimensions."""
    built = build(tiny_model["llama"], attention_backend="torch", max_num_seqs=4, max_num_batched_tokens=40)
    runner = built.core.executor
    options: dict[str, Any] = {"max_rows": 24, "max_num_seqs": 4, "max_model_len": 8, "say": lambda text: None}
    fixed, fitting = (
        StepGraphs(runner.backend, runner.run_model, RerunCapturer(), **options, request_sizes=sizes)
        for sizes in ([4], [1, 2, 4])
    )
    assert fixed.buckets == [(1, 4), (2, 4), (4, 4), (8, 4), (16, 4), (24, 4)]
    assert fitting.buckets == [(1, 1), (2, 1), (2, 2), *((4, n) for n in (1, 2, 4)), *((8, n) for n in (1, 2, 4)),
                               (16, 2), (16, 4), (24, 4)]  # fmt: skip
    used: list[tuple[int, int]] = []
    for bucket, graph in fitting._graphs.items():
        fitting._graphs[bucket] = wrapped(graph, lambda bucket=bucket: used.append(bucket))
    for counts in ([1], [1, 1], [1, 1, 1], [3], [5, 2], [4, 3, 1], [8, 3], [8, 8, 1], [7, 7, 7, 3]):
        said = launch(fitting, runner.allocator, counts)
        assert said is not None
        assert said == launch(fixed, runner.allocator, counts)
    assert used == [(1, 1), (2, 2), (4, 4), (4, 1), (8, 2), (8, 4), (16, 2), (24, 4), (24, 4)]
    assert runner.allocator.free_tokens == runner.allocator.total_tokens


def wrapped(graph: Any, first: Callable[[], None]) -> Any:
    def replay() -> None:
        first()
        graph.replay()

    return dataclasses.replace(graph, replay=replay)


def test_a_prompts_many_slots_travel_on_their_own(tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchserve.runner.cuda_graphs.MAX_CHANGES", 8)
    assert MAX_CHANGES > 8
    job = Job(list(np.random.default_rng(0).integers(3, VOCAB_SIZE, 50).tolist()), SamplingParams(temperature=0.0))
    options: dict[str, Any] = {"prefill_chunk_size": 6}
    eager = run(build(tiny_model["llama"], attention_backend="torch", **options), [job], Coverage())
    built, capturer = built_as_graphs(monkeypatch, tiny_model["llama"], **options)
    assert run(built, [job], Coverage())[0].token_ids == eager[0].token_ids
    assert capturer.replays > 9


def test_a_table_that_grows_behind_the_graphs_makes_steps_eager(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have its old address; only more requests than are ever let in can make it grow."""
    # Short requests, of which a step of so many rows could have more than are ever let in.
    options: dict[str, Any] = {"max_model_len": 24, "max_num_batched_tokens": 400, "max_graph_rows": 16}
    built, capturer = built_as_graphs(monkeypatch, tiny_model["llama"], max_num_seqs=3, **options)
    runner = built.core.executor
    assert runner.allocator.table_shape[0] == 6
    allocator = runner.allocator
    captured = allocator.table_shape
    batch = build_batch([rows_of("one", allocator)])
    replays = capturer.replays
    (expected,) = runner.launch(batch).wait()
    replays += 1
    assert capturer.replays == replays, "while steps were timed it did not grow"
    for number in range(captured[0]):
        assert allocator.reserve(f"more-{number}", 1)
    assert allocator.table_shape != captured
    for _ in range(2):
        (found,) = runner.launch(batch).wait()
        assert found.token_ids == expected.token_ids
    assert capturer.replays == replays


def rows_of(name: str, allocator: Any) -> RequestRows:
    assert allocator.reserve(name, 2)
    return RequestRows(name, 0, [5, 6], [-1, 0], 2, GREEDY)


def test_graphs_are_for_gpus_and_can_be_turned_off(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, kernel = torch.device("cuda"), TritonTreeKernel([LayerShape(2, 64, 64)], torch.float32, 128)
    monkeypatch.setattr("batchserve.runner.cuda_graphs.CudaCapturer", RerunCapturer)
    assert choose_capturer(EngineConfig(), CPU, kernel) is None
    assert choose_capturer(EngineConfig(enforce_eager=True), gpu, kernel) is None
    assert choose_capturer(EngineConfig(), gpu, TorchKernel()) is None, "it would repeat the step that it was made of"
    assert isinstance(choose_capturer(EngineConfig(), gpu, kernel), RerunCapturer)


def test_no_garbage_is_collected_while_steps_are_captured(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of an engine that is gone would spoil the one that is being captured."""
    was_enabled: list[bool] = []

    class Watching(RerunCapturer):
        def capture(self, run: Any) -> Any:
            was_enabled.append(gc.isenabled())
            return super().capture(run)

    monkeypatch.setattr(modules, "choose_capturer", lambda config, device, kernel: Watching())
    assert build(tiny_model["llama"], None, attention_backend="torch").core.executor.graphs is not None
    assert was_enabled
    assert not any(was_enabled)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), ConfigError, "gpu_memory_utilization = 0.9: leaves no memory"),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), torch.AcceleratorError, "illegal memory"),
        # Half a capture spoils the process: no eager steps in it.
        (torch.AcceleratorError("operation not permitted when stream is capturing"), ConfigError, "set enforce_eager"),
        (RuntimeError("FlashInfer plans a step otherwise"), ConfigError, r"graph capture of Llama.* set enforce_eager"),
    ],
)
def test_want_of_memory_and_faults_are_not_taken_for_models_that_cannot_be_captured(
    tiny_model: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    raised: type[Exception],
    message: str,
) -> None:
    class Failing(RerunCapturer):
        def capture(self, run: Any) -> Any:
            raise error

    monkeypatch.setattr(modules, "choose_capturer", lambda config, device, kernel: Failing())
    with pytest.raises(raised, match=message):
        build(tiny_model["llama"], None, attention_backend="torch")
    assert gc.isenabled()


def test_a_step_is_run_where_waiting_is_an_error_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = ["default"]
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run() -> torch.Tensor:
        seen.append(modes[-1])
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(CannotBeCapturedError, match="synchronizing"):
        run_without_waiting(run)
    assert (seen, modes[-1]) == (["error"], "default")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), torch.AcceleratorError("CUDA error")])
def test_what_is_no_waiting_is_not_taken_for_it(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: "default")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)

    def run() -> torch.Tensor:
        raise error

    with pytest.raises(type(error)):
        run_without_waiting(run)


def test_a_model_that_cannot_be_captured_is_served_eagerly_and_says_so(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(RerunCapturer):
        def capture(self, run: Any) -> Any:
            raise CannotBeCapturedError("called a synchronizing CUDA operation")

    monkeypatch.setattr(modules, "choose_capturer", lambda config, device, kernel: Refusing())
    says: list[str] = []
    config = EngineConfig(
        model=str(tiny_model["llama"]), attention_backend="torch", device="cpu", dtype="float32", drafter="none"
    )
    built = build_engine(config, says.append)
    assert built.core.executor.graphs is None
    assert any("all steps are eager: LlamaForCausalLM cannot be captured: called a" in said for said in says)
    assert built.core.executor.allocator.free_tokens == built.core.executor.allocator.total_tokens
