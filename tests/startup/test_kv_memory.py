"""How much K/V memory an engine gets, on a CPU, over the GPU path, and on a device that is only pretended."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchserve.attention.base import LayerShape
from batchserve.attention.paged import PagedBackend
from batchserve.attention.torch_paged import TorchKernel
from batchserve.config import EngineConfig
from batchserve.errors import ConfigError
from batchserve.kv.slots import SlotAllocator
from batchserve.request import ResolvedSampling
from batchserve.runner import loader, model_runner
from batchserve.runner.loader import load_model, resolve_device
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.queued_step import QueuedStep
from batchserve.sampling.device import DeviceSampler
from batchserve.startup import backend, device_memory, kv_memory, prepared
from batchserve.startup.backend import create_kernel
from batchserve.startup.build import build_engine
from batchserve.startup.device_memory import ProfilingStep, profiled_budget

PER_TOKEN = 3 * 2 * 2 * 16 * 4  # of the tiny llama in fp32
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def paged(folder: Path, **options: Any) -> EngineConfig:
    defaults = {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "drafter": "none"}
    return EngineConfig(model=str(folder), **{**defaults, **options})


class FakeDevice:
    """A GPU of 1000 bytes: 100 are the model's, others hold some, and a step needs some for a while."""

    def __init__(self, others: int, step: int) -> None:
        self.others, self.step = others, step
        self.held = self.most = 100
        self.kv_bytes = 40  # of the profiling step

    def free_and_total(self) -> tuple[int, int]:
        return 1000 - self.others - self.reserved(), 1000

    def allocated(self) -> int:
        return self.held

    def reserved(self) -> int:
        return self.held + 10  # what torch has in blocks that are partly free

    def reset_peak(self) -> None:
        self.most = self.held

    def peak(self) -> int:
        return self.most

    def __call__(self) -> None:
        self.most = max(self.most, self.held + self.kv_bytes + self.step)


def test_kv_gets_what_the_rest_leaves_of_our_share() -> None:
    says: list[str] = []
    device: Any = FakeDevice(others=200, step=150)
    assert profiled_budget(device, 0.9, device, says.append) == 900 - 200 - 100 - 150
    assert len(says) == 1
    device = FakeDevice(others=200, step=150)
    assert profiled_budget(device, 0.9, device, says.append, 0.5) == 900 - 200 - 100 - 150 - 75
    device = FakeDevice(others=200, step=700)
    assert profiled_budget(device, 0.9, device, says.append) <= 0


def test_what_is_kept_from_the_profiling_step_counts_once() -> None:
    """A kernel's workspace, for example, stays when the step is over."""

    class Keeping(FakeDevice):
        def __call__(self) -> None:
            self.held += 30
            super().__call__()

    device: Any = Keeping(others=0, step=50)
    assert profiled_budget(device, 1.0, device, lambda message: None) == 1000 - 100 - 30 - 50


@pytest.mark.parametrize(("rows", "max_model_len"), [(40, None), (300, 100), (64, 64)])
def test_the_profiling_step_has_all_the_rows_there_can_be(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch, rows: int, max_model_len: int | None
) -> None:
    """And the head runs on each of them."""
    config = paged(tiny_model["llama"], max_num_batched_tokens=rows, max_model_len=max_model_len)
    seen: list[tuple[int, int]] = []
    launch = device_memory.ModelRunner.launch

    def watching(runner, batch):  # type: ignore[no-untyped-def]
        seen.append((batch.num_rows, len(batch.logit_rows)))
        assert all(span.num_rows <= (max_model_len or 512) for span in batch.spans)
        return launch(runner, batch)

    monkeypatch.setattr(device_memory.ModelRunner, "launch", watching)
    step = ProfilingStep(config, load_model(config), TorchKernel())
    step()
    assert seen == [(rows, rows)]
    assert step.kv_bytes == (rows + 1) * PER_TOKEN


def test_the_profiling_step_fetches_no_logits(tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all rows they would be hundreds of megabytes, at each start."""

    def refuse(step: QueuedStep, index: int) -> None:
        raise AssertionError("the host samples")

    monkeypatch.setattr(QueuedStep, "_verify_on_host", refuse)
    monkeypatch.setattr(model_runner, "DeviceSampler", partial(DeviceSampler, num_candidates=4))
    config = paged(tiny_model["llama"], max_num_batched_tokens=40)
    step = ProfilingStep(config, load_model(config), TorchKernel())
    step()
    monkeypatch.setattr(device_memory, "ResolvedSampling", lambda t, k, p, *more: ResolvedSampling(t, 0, p, *more))
    with pytest.raises(AssertionError, match="the host samples"):
        step()


def test_the_gpu_path_on_a_cpu_is_chosen_by_name_and_runs_the_model_as_it_is(tiny_model: dict[str, Path]) -> None:
    says: list[str] = []
    built = build_engine(paged(tiny_model["llama"], kv_cache_memory=200 * PER_TOKEN), says.append)
    paged_backend = built.core.executor.backend
    assert isinstance(paged_backend, PagedBackend)
    assert isinstance(paged_backend.allocator, SlotAllocator)
    assert paged_backend.allocator.total_tokens == 199, "one slot is the dummy"
    assert (built.info.attention_backend, built.info.max_model_len) == ("torch", 199)
    assert any("K/V memory: 199 tokens" in message for message in says)
    assert says[-1].endswith("steps: modules")


@pytest.mark.parametrize(("max_model_len", "num_slots"), [(None, 3), (65, 66)])
def test_too_little_memory_is_refused_with_what_is_needed(
    tiny_model: dict[str, Path], max_model_len: int | None, num_slots: int
) -> None:
    folder, needed = tiny_model["llama"], num_slots * PER_TOKEN
    for given in (1, needed - 1):
        with pytest.raises(ConfigError, match=f"kv_cache_memory = {given} bytes: must be at least {needed} bytes"):
            build_engine(paged(folder, kv_cache_memory=given, max_model_len=max_model_len))
    built = build_engine(paged(folder, kv_cache_memory=needed, max_model_len=max_model_len))
    assert built.info.max_model_len == (max_model_len or 2)


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_more_memory_than_is_free_is_refused(
    tiny_model: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 4096 * PER_TOKEN
    for module in (backend, prepared):
        monkeypatch.setattr(module, "free_memory_bytes", lambda: free)
    options: dict[str, Any] = {"model": str(tiny_model["llama"]), "dtype": "float32", "attention_backend": name}
    with pytest.raises(ConfigError, match=f"kv_cache_memory = {2 * free} bytes: must be at most {free} bytes"):
        build_engine(EngineConfig(kv_cache_memory=2 * free, **options))
    allocator = build_engine(EngineConfig(kv_cache_memory=free, **options)).core.executor.allocator
    assert allocator.total_tokens >= 4095
    without_cache = {"kv_cache_memory": 2 * free, "prefix_cache": False, "max_num_seqs": 1, "max_model_len": 64}
    build_engine(EngineConfig(**without_cache, **options))  # uses little of it
    for module in (backend, prepared):
        monkeypatch.setattr(module, "free_memory_bytes", lambda: None)  # as on systems that do not say
    for given, num_tokens in ((2 * free, 8191), (None, 4096)):
        allocator = build_engine(EngineConfig(kv_cache_memory=given, **options)).core.executor.allocator
        assert allocator.total_tokens >= num_tokens


def on_gpu(**options: Any) -> Any:
    """A model that would be on a GPU."""
    defaults = {
        "layers": [LayerShape(2, 64, 64)],
        "dtype": "bfloat16",
        "torch_dtype": torch.bfloat16,
        "device": GPU,
        "has_sinks": False,
        "max_model_len": 100,
        "num_heads": 4,
        "model": None,
    }
    return SimpleNamespace(**{**defaults, **options})


def test_auto_takes_the_first_kernel_that_serves_the_model_and_says_why_not_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says: list[str] = []

    def make(name: str, config: EngineConfig, loaded: Any) -> Any:
        if name != "torch":
            raise ConfigError(f"{name} is not here")
        return name

    monkeypatch.setattr(backend, "_make_kernel", make)
    assert create_kernel(EngineConfig(), on_gpu(), says.append) == "torch"
    assert says == [
        "attention without triton: triton is not here",
        "attention without flashinfer: flashinfer is not here",
    ]
    with pytest.raises(ConfigError, match="attention_backend = 'triton': triton is not here"):
        create_kernel(EngineConfig(attention_backend="triton"), on_gpu(), says.append)


def test_a_kernel_that_turns_out_not_to_run_is_passed_over(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Uncompiled(TorchKernel):
        name = "triton"

        def plan(self, metadata: Any) -> None:
            raise FileNotFoundError("no gcc")

    kernels = {"triton": Uncompiled, "flashinfer": TorchKernel, "torch": TorchKernel}
    monkeypatch.setattr(backend, "_make_kernel", lambda name, config, loaded: kernels[name]())
    loaded, says = load_model(paged(tiny_model["llama"])), []
    assert isinstance(create_kernel(EngineConfig(), loaded, says.append), TorchKernel)
    assert [line.partition(" (")[0] for line in says] == [
        "trying attention with triton",
        "attention without triton: it cannot run: FileNotFoundError: no gcc",
        "trying attention with flashinfer",
    ]
    with pytest.raises(ConfigError, match="attention_backend = 'triton': it cannot run: FileNotFoundError: no gcc"):
        create_kernel(EngineConfig(attention_backend="triton"), loaded, says.append)


def test_no_other_kernel_is_blamed_for_a_device_that_is_lost(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Faulty(TorchKernel):
        def plan(self, metadata: Any) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    def check_device(runner: ModelRunner) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(backend, "_make_kernel", lambda name, config, loaded: Faulty())
    monkeypatch.setattr(ModelRunner, "check_device", check_device)
    loaded, says = load_model(paged(tiny_model["llama"])), []
    with pytest.raises(RuntimeError, match="CUDA error"):
        create_kernel(EngineConfig(), loaded, says.append)
    assert len(says) == 1, "one kernel was tried"


def test_flashinfer_leaves_models_with_sinks_to_others() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend = .flashinfer.: .* has attention sinks"):
        create_kernel(EngineConfig(attention_backend="flashinfer"), on_gpu(has_sinks=True), print)


def test_memory_that_profiling_leaves_too_little_of_is_refused_by_its_option() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization = 0.9: K/V memory of 0 bytes: .* at least 1536"):
        kv_memory.kv_capacity(EngineConfig(), on_gpu(), -5, 1, 1024, num_dummies=1, is_on_cpu=False)


@pytest.mark.parametrize(
    ("options", "device", "tokens"),
    [
        ({"prefix_cache": False}, CPU, 400),
        ({"prefix_cache": False, "kv_cache_memory": 1 << 20}, GPU, 400),
        ({}, CPU, 800),
        ({}, GPU, 4096),
        ({"kv_cache_memory": 1 << 20}, CPU, 4096),
    ],
    ids=str,
)
def test_what_no_sequence_can_use_is_kept_for_those_that_have_ended(
    options: dict[str, Any], device: torch.device, tokens: int
) -> None:
    """Four sequences of 100 tokens, and room for 4,096: all of it where it was given, or is nobody else's."""
    config, loaded = EngineConfig(max_num_seqs=4, **options), on_gpu(device=device, layers=[LayerShape(1, 64, 64)])
    assert kv_memory.kv_capacity(config, loaded, 1 << 20, 1, is_on_cpu=device.type == "cpu") == (tokens, 100)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "cuda"}, "device = 'cuda'"),
        ({"attention_backend": "flashinfer"}, "attention_backend = 'flashinfer'"),
        ({"attention_backend": "triton"}, "attention_backend = 'triton'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_what_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], named: str
) -> None:
    monkeypatch.setattr(loader.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"{named}: must be on a machine with a CUDA device, and torch"):
        resolve_device(EngineConfig(**options))
    for harmless in ({}, {"device": "cpu"}, {"attention_backend": "cpu"}, {"attention_backend": "torch"}):
        assert resolve_device(EngineConfig(**harmless)).type == "cpu"  # type: ignore[arg-type]


def test_a_device_that_is_there_is_taken_unless_another_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loader.torch.cuda, "current_device", lambda: 0)
    for options in ({}, {"attention_backend": "torch"}, {"device": "cuda"}):
        assert resolve_device(EngineConfig(**options)).type == "cuda"  # type: ignore[arg-type]
    for options in ({"device": "cpu"}, {"attention_backend": "cpu"}):
        assert resolve_device(EngineConfig(**options)).type == "cpu"  # type: ignore[arg-type]
