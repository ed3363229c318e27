"""The whole model compiles around opaque attention: in one piece, once for each number of rows."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo import reset
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from batchserve.attention.custom_op import OpaqueAttention, attend_op
from batchserve.attention.paged import PagedBackend
from batchserve.config import EngineConfig
from batchserve.errors import ConfigError
from batchserve.gpu.inductor import AddResiduals
from batchserve.gpu.norms import RowNorm
from batchserve.runner import gpu_modules
from batchserve.runner.compiled import CompiledLayers, CompiledModel, repeated_layers
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.ragged_batch import RaggedBatch, RequestRows, build_batch
from batchserve.startup import modules
from batchserve.startup import optimize as faster_module
from batchserve.startup.build import build_engine
from tests.attention.test_mask import random_parents
from tests.equivalence.harness import Coverage, build, random_jobs, run
from tests.factories import make_sampling
from tests.graphs import RerunCapturer
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

ROWS = (13, 4, 9, 40)


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of gemma2 one with a window, and one without: what is compiled takes time for each layer."""
    folder = tmp_path_factory.mktemp("two-layers")
    return {name: save_tiny_model(name, folder / name, num_hidden_layers=2) for name in ("llama", "qwen2", "gemma2")}


def ragged_batch(rng: random.Random, runner: ModelRunner, num_rows: int) -> RaggedBatch:
    """Trees of 1 to 3 requests with contexts; their K/V is reserved."""
    cuts = sorted(rng.sample(range(1, num_rows), rng.randint(0, 2)))
    requests, allocator = [], runner.allocator
    for i, (start, end) in enumerate(zip([0, *cuts], [*cuts, num_rows], strict=True)):
        context = rng.randint(0, 40)
        allocator.reserve(f"r{i}", context + end - start)
        allocator.commit(f"r{i}", range(context))
        parents = [-1, *(parent + 1 for parent in random_parents(rng, end - start - 1))]
        ids = [rng.randrange(3, VOCAB_SIZE) for _ in parents]
        requests.append(RequestRows(f"r{i}", context, ids, parents, 1, make_sampling()))
    return build_batch(requests)


def written(backend: PagedBackend) -> list[torch.Tensor]:
    """K and V of the step's rows, of all layers."""
    assert backend._metadata is not None
    return [cache[backend._metadata.slot_mapping] for cache in chain.from_iterable(backend.caches)]


@pytest.mark.parametrize(
    ("name", "compile_"),
    [
        pytest.param("llama", CompiledModel, marks=pytest.mark.slow),
        pytest.param("qwen2", CompiledLayers, marks=pytest.mark.slow),
        ("gemma2", CompiledLayers),
    ],
)
def test_no_graph_breaks_and_no_recompiles_over_ragged_steps(
    two_layers: dict[str, Path], name: str, compile_: type[CompiledModel | CompiledLayers]
) -> None:
    plain, runner = (build(two_layers[name], attention_backend="torch", drafter="none").core.executor for _ in range(2))
    assert isinstance(plain.backend, PagedBackend)
    assert isinstance(runner.backend, PagedBackend)
    for cache in chain.from_iterable([*plain.backend.caches, *runner.backend.caches]):
        cache.zero_()
    reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    runner.compiled = compile_(runner._model, runner.backend, counter)
    warm = None
    for step in range(12):
        batches = [ragged_batch(random.Random(step), each, ROWS[step % len(ROWS)]) for each in (plain, runner)]
        expected, found = (each.forward(batch) for each, batch in zip((plain, runner), batches, strict=True))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(written(runner.backend), written(plain.backend))
        for each, batch in zip((plain, runner), batches, strict=True):
            for rows in batch.requests:
                each.allocator.release(rows.request_id)
        warm = counter.frame_count if step == 0 else warm
        assert counter.frame_count == warm, "programs serve any number of rows"
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_layers_that_are_alike_share_a_program_of_torchs_own_compiler(
    two_layers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the options that it has here: it takes others for another compiler."""
    from torch._inductor import compile_fx
    from torch._inductor.scheduler import Scheduler

    programs: list[torch.fx.GraphModule] = []

    def compile_(module: torch.fx.GraphModule, *_: Any, config_patches: dict[str, Any], **__: Any) -> Any:
        programs.append(module)
        assert config_patches["triton.enable_pdl"]
        assert isinstance(vars(Scheduler)["previous_node"], property)  # of ours: kernels wait
        return module.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compile_)
    runner = build(two_layers["llama"], attention_backend="torch", drafter="none").core.executor
    assert isinstance(runner.backend, PagedBackend)
    reset()
    runner.compiled = CompiledLayers(runner._model, runner.backend, overlaps=True)
    for seed, rows in enumerate((5, 7)):
        batch = ragged_batch(random.Random(seed), runner, rows)
        runner.forward(batch)
        for each in batch.requests:
            runner.allocator.release(each.request_id)
    assert len(runner.compiled._layers) > 1
    assert len(programs) == 1


def test_the_operator_says_what_it_writes_to_and_what_comes_out(two_layers: dict[str, Path]) -> None:
    """torch's own checks of an operator: its schema, and its shapes without data against those with."""
    runner = build(two_layers["llama"], attention_backend="torch", drafter="none").core.executor
    assert isinstance(runner.backend, PagedBackend)
    opaque = OpaqueAttention(runner.backend)
    batch = ragged_batch(random.Random(1), runner, 9)
    runner.backend.begin(batch.spans)
    query, key, value = (
        torch.randn(1, heads, 9, 16, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2)
    )
    arguments = (query, key, value, *runner.backend.caches[1], None, opaque._number, 0.25, None, None)
    torch.library.opcheck(attend_op, arguments, test_utils=("test_schema", "test_faketensor"))


COMPILED = {"layers": "CompiledLayers", "whole": "CompiledModel"}


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, compiler: Any = "aot_eager") -> None:
    """Steps are captured, and models compiled, without what a GPU's compiler would make of them."""
    for module in (modules, faster_module):
        monkeypatch.setattr(module, "choose_capturer", lambda config, device, kernel: RerunCapturer())
    for name in COMPILED.values():
        way = getattr(faster_module, name)
        monkeypatch.setattr(faster_module, name, partial(way, compiler=compiler))


@pytest.mark.parametrize("way", [pytest.param("auto", marks=pytest.mark.slow), "whole"])
def test_graphs_of_the_compiled_model_give_the_same_answers_and_nothing_is_compiled_while_requests_are_served(
    two_layers: dict[str, Path], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Graphs, eager steps and the trial are given tensors of the same kinds."""
    jobs = random_jobs(random.Random(2), 6, VOCAB_SIZE, longest=40)
    options = {"attention_backend": "torch", "max_num_seqs": 4, "max_num_batched_tokens": 40, "max_graph_rows": 8}
    threads = {"num_threads": torch.get_num_threads()}  # as beside a GPU: no choice
    reset()
    counter = CompileCounterWithBackend("aot_eager")
    trials: list[int] = []
    compare = faster_module.compare_logits
    with monkeypatch.context() as patch:
        as_on_a_gpu(patch, counter)
        patch.setattr(
            faster_module, "compare_logits", lambda *args: (trials.append(counter.frame_count), compare(*args))
        )
        engine = build(two_layers["llama"], compile_model=way, **options, **threads)
        kind = type(engine.core.executor.compiled).__name__
        assert kind == COMPILED.get(way, "CompiledLayers")
        compiled = run(engine, jobs, Coverage())
    assert len(trials) == len((1, 4, 16, 32, 48))
    assert counter.frame_count == trials[-1], "after the trial nothing was compiled"
    eager = run(build(two_layers["llama"], **options), jobs, Coverage())
    assert {i: a.token_ids for i, a in compiled.items()} == {i: a.token_ids for i, a in eager.items()}


def test_an_engine_with_our_own_linears_and_norms_gives_the_same_answers(
    two_layers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but their kernels: torch computes what these would, and the compiler's pass is given its graphs."""
    jobs = random_jobs(random.Random(3), 6, VOCAB_SIZE, longest=40)
    options = {"attention_backend": "torch", "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_graph_rows": 8}
    residuals: list[int] = []

    def compile_(module: torch.fx.GraphModule, _: object) -> Any:
        AddResiduals()(module.graph)
        products = module.graph.find_nodes(op="call_function", target=torch.ops.batchserve.row_product.default)
        residuals.append(sum(node.args[3] is not None for node in products))
        module.recompile()
        return make_boxed_func(module.forward)

    def norm(own: RowNorm, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], own.scale, own.eps)

    with monkeypatch.context() as patch:
        as_on_a_gpu(patch, aot_autograd(fw_compiler=compile_))
        patch.setattr(faster_module, "CudaTimer", lambda *_, **__: None)
        patch.setattr(faster_module, "choose_products", lambda *_: None)
        patch.setattr(gpu_modules, "DTYPES", (torch.float32,))
        patch.setattr(RowNorm, "forward", norm)
        reset()
        engine = build(two_layers["llama"], **options)
        kinds = Counter(type(module).__name__ for module in engine.core.executor._model.modules())
        swapped = run(engine, jobs, Coverage())
    layers = len(engine.core.executor.compiled._layers)
    assert (kinds["RowLinear"], kinds["RowNorm"], kinds["Linear"]) == (4 * layers + 1, 2 * layers + 1, 0)
    assert set(residuals) == {2}  # behind attention and behind the MLP
    plain = run(build(two_layers["llama"], custom_kernels=False, **options), jobs, Coverage())
    assert {i: a.token_ids for i, a in swapped.items()} == {i: a.token_ids for i, a in plain.items()}


def refused(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no C compiler is installed")


def wrong(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    return lambda *arguments: [out + 1 for out in graph(*arguments)]


@pytest.mark.parametrize("compiler", [refused, wrong])
def test_a_model_that_cannot_be_compiled_is_not(
    two_layers: dict[str, Path], monkeypatch: pytest.MonkeyPatch, compiler: Any
) -> None:
    reset()
    as_on_a_gpu(monkeypatch, compiler)
    options = {"attention_backend": "torch", "max_num_seqs": 4, "max_num_batched_tokens": 16}
    said: list[str] = []
    config = EngineConfig(model=str(two_layers["llama"]), device="cpu", **options)
    runner = build_engine(config, said.append).core.executor
    assert runner.compiled is None
    assert runner.graphs is not None
    assert all(layer._compiled_call_impl is None for layer in repeated_layers(runner._model))
    why = "no C compiler is installed" if compiler is refused else "answers differently compiled"
    assert any(line.startswith("the model is not compiled: ") and why in line for line in said)
    if compiler is refused:  # where it was asked for, any of these is an error
        with pytest.raises(ConfigError, match="compile_model = 'layers': "):
            build_engine(replace(config, compile_model="layers"))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_compiling_without_graphs_is_refused(two_layers: dict[str, Path], backend: str) -> None:
    path = str(two_layers["llama"])
    config = EngineConfig(model=path, device="cpu", attention_backend=backend, compile_model="layers")
    with pytest.raises(ConfigError, match="compile_model = 'layers': must be with CUDA graphs"):
        build_engine(config)


@pytest.mark.parametrize("fault", ["answers", "compiler", "device"])
def test_a_model_that_our_own_kernels_do_not_serve_keeps_its_modules(
    two_layers: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(gpu_modules, "DTYPES", (torch.float32,))
    monkeypatch.setattr(faster_module, "CudaTimer", lambda *_, **__: None)
    monkeypatch.setattr(faster_module, "choose_products", lambda *_: None)

    def norm(own: RowNorm, x: torch.Tensor) -> torch.Tensor:
        if fault == "compiler":
            raise RuntimeError("no C compiler is installed")
        if fault == "device":
            raise torch.AcceleratorError("an illegal memory access was encountered")
        # As it is tried, but not as the model calls it.
        return torch.nn.functional.rms_norm(x, x.shape[-1:], own.scale, own.eps) * (1.0 if x.ndim == 2 else 3.0)

    monkeypatch.setattr(RowNorm, "forward", norm)
    options = {"attention_backend": "torch", "max_num_seqs": 4, "max_num_batched_tokens": 16, "compile_model": "off"}
    said: list[str] = []
    config = EngineConfig(model=str(two_layers["llama"]), device="cpu", dtype="float32", **options)
    if fault == "device":
        with pytest.raises(torch.AcceleratorError):
            build_engine(config, said.append)
        return
    model = build_engine(config, said.append).core.executor._model
    assert not any(type(module).__name__ in ("RowLinear", "RowNorm") for module in model.modules())
    why = "no C compiler is installed" if fault == "compiler" else "answers differently with our own"
    assert any(line.startswith("without linears and norms of our own: ") and why in line for line in said)
