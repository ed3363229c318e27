"""Builds the attention backend of a model's modules, with the K/V memory that it owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchserve.attention.compiled import kernel_supports
from batchserve.attention.cpu import CpuBackend, compile_kernels
from batchserve.attention.paged import PagedBackend
from batchserve.attention.torch_paged import TorchKernel
from batchserve.config import EngineConfig
from batchserve.errors import ConfigError
from batchserve.free_memory import free_memory_bytes
from batchserve.kernel_overlap import can_overlap
from batchserve.kv import slot_kernels
from batchserve.kv.slab import EXTENT, SlabAllocator, bytes_per_token
from batchserve.kv.slots import SlotAllocator
from batchserve.native.compile_progress import Part
from batchserve.request import GREEDY
from batchserve.runner.loader import LoadedModel, has_cpu_backend
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.sampling import device_columns, draw_kernel
from batchserve.startup import kernels
from batchserve.startup.device_memory import CudaMemory, ProfilingStep, profiled_budget
from batchserve.startup.kernels import ATTENTION_S, COMMON_PARTS, CPU_PARTS
from batchserve.startup.kv_memory import check_free, described, kv_capacity, share_of

if TYPE_CHECKING:
    from batchserve.attention.base import AttentionBackend
    from batchserve.attention.tree_metadata import TreeKernel
    from batchserve.startup.kv_memory import Progress

GPU_KERNELS = ("triton", "flashinfer", "torch")  # fastest first (docs/gpu.md)

PAGED_PARTS = (
    *COMMON_PARTS,
    Part("columns", 1.0, device_columns.compile_kernels),
    Part("slots", 4.0, slot_kernels.compile_kernels),
    Part("draws", 12.6, draw_kernel.compile_kernels),
)


def build_backend(config: EngineConfig, loaded: LoadedModel, say: Progress) -> tuple[AttentionBackend, int]:
    """Returns (backend, longest request in tokens). Raises ConfigError."""
    if has_cpu_backend(config, loaded.device):
        return _cpu_backend(config, loaded, say)
    if config.batch_invariant:
        raise ConfigError(f"batch_invariant = True: must be on a CPU; the device is {loaded.device.type}")
    return _paged_backend(config, loaded, say)


def _cpu_backend(config: EngineConfig, loaded: LoadedModel, say: Progress) -> tuple[AttentionBackend, int]:
    free = free_memory_bytes()
    budget = config.kv_cache_memory or share_of(free)
    total_tokens, max_model_len = kv_capacity(config, loaded, budget, unit=EXTENT)
    check_free(config, total_tokens * bytes_per_token(loaded.layers, loaded.dtype), free)
    allocator = SlabAllocator(loaded.layers, loaded.dtype, total_tokens)
    has_kernel = kernel_supports(loaded.layers, loaded.dtype)
    attention = Part("attention", ATTENTION_S, lambda: compile_kernels(loaded.layers, loaded.dtype))
    kernels.compile_kernels([*CPU_PARTS, *([attention] if has_kernel else [])], say)
    if config.batch_invariant:
        raise ConfigError(
            f"batch_invariant = True: {loaded.architecture} in {loaded.dtype} has no native program (the log says why)"
        )
    say(described(config, total_tokens, allocator.bytes_per_token, max_model_len))
    backend = CpuBackend(allocator, loaded.num_heads, has_kernel=has_kernel, has_sinks=loaded.has_sinks)
    return backend, max_model_len


def _paged_backend(config: EngineConfig, loaded: LoadedModel, say: Progress) -> tuple[AttentionBackend, int]:
    kernels.compile_kernels(PAGED_PARTS, say)
    kernel = create_kernel(config, loaded, say)
    budget = config.kv_cache_memory
    if budget is None and loaded.device.type == "cuda":
        say(f"measuring the memory of a step of {config.max_num_batched_tokens} rows")
        profile = ProfilingStep(config, loaded, kernel)
        share = 0.0 if config.enforce_eager else min(1.0, config.max_graph_rows / config.max_num_batched_tokens)
        budget = profiled_budget(CudaMemory(loaded.device), config.gpu_memory_utilization, profile, say, share)
    free = CudaMemory(loaded.device).free_and_total()[0] if loaded.device.type == "cuda" else free_memory_bytes()
    if budget is None:
        budget = share_of(free)
    total_tokens, max_model_len = kv_capacity(
        config,
        loaded,
        budget,
        1,
        config.max_num_batched_tokens,
        num_dummies=1,
        is_on_cpu=loaded.device.type != "cuda",
    )
    per_token = bytes_per_token(loaded.layers, loaded.dtype)
    check_free(config, total_tokens * per_token, free)
    max_tokens = max_model_len + config.max_num_batched_tokens  # one request's context and the rows of a step
    # Timing steps takes up to max_num_seqs requests besides those with contexts. CUDA graphs use this table size only.
    allocator = SlotAllocator(total_tokens, 2 * config.max_num_seqs, max_tokens, per_token)
    say(described(config, total_tokens, per_token, max_model_len))
    return PagedBackend(loaded.layers, loaded.torch_dtype, loaded.device, kernel, allocator), max_model_len


def create_kernel(config: EngineConfig, loaded: LoadedModel, say: Progress) -> TreeKernel:
    """Returns the kernel asked for, or the first one that can serve the model. Raises ConfigError."""
    wanted = config.attention_backend
    for name in GPU_KERNELS if wanted == "auto" else (wanted,):
        try:
            kernel = _make_kernel(name, config, loaded)
            if name != "torch":
                say(f"trying attention with {name} (what is not compiled yet is compiled now, which may take minutes)")
                _try(kernel, loaded)
            return kernel
        except ConfigError as error:
            if wanted != "auto":
                raise ConfigError(f"attention_backend = {name!r}: {error}") from error
            say(f"attention without {name}: {error}")
    raise AssertionError("torch serves every model")


def _try(kernel: TreeKernel, loaded: LoadedModel) -> None:
    """Runs a tree step and a chain step. Raises ConfigError, as what a kernel lacks may show only when it runs."""
    for parents in ([-1, 0, 0], [-1, 0, 1]):
        allocator = SlotAllocator(len(parents), 1, len(parents), 0)
        allocator.reserve("trial", len(parents))
        backend = PagedBackend(loaded.layers, loaded.torch_dtype, loaded.device, kernel, allocator)
        num_pending, sampling = (3, None) if parents[-1] == 1 else (1, GREEDY)
        rows = RequestRows("trial", 0, [0] * len(parents), parents, num_pending, sampling)
        runner = ModelRunner(loaded, backend)
        try:
            runner.launch(build_batch([rows])).wait()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no compiler, no module for this GPU, a library that cannot be loaded
            runner.check_device()  # after a persistent fault, no other kernel would run either
            raise ConfigError(f"it cannot run: {type(error).__name__}: {error}") from error


def _make_kernel(name: str, config: EngineConfig, loaded: LoadedModel) -> TreeKernel:
    if name == "flashinfer":
        from batchserve.attention.flashinfer import FlashInferKernel

        if loaded.has_sinks:
            raise ConfigError(f"{type(loaded.model).__name__} has attention sinks, which only triton and torch have")
        return FlashInferKernel(
            loaded.layers, loaded.num_heads, loaded.torch_dtype, loaded.device, mask=config.flashinfer_mask
        )
    if name == "triton":
        from batchserve.attention.triton import TritonTreeKernel

        longest = config.max_model_len or loaded.max_model_len
        overlaps = config.kernel_overlap and can_overlap(loaded.device)
        return TritonTreeKernel(
            loaded.layers, loaded.torch_dtype, longest + config.max_num_batched_tokens, overlaps=overlaps
        )
    return TorchKernel()
