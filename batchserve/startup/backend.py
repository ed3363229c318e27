"""Builds the attention backend that serves a model, with the K/V memory that it owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchserve.attention.cpu import CpuBackend, compile_kernels, kernel_supports
from batchserve.attention.paged import PagedBackend
from batchserve.attention.torch_paged import TorchKernel
from batchserve.config import EngineConfig, MiB
from batchserve.engine import commit
from batchserve.errors import ConfigError
from batchserve.free_memory import free_memory_bytes
from batchserve.kernel_overlap import can_overlap
from batchserve.kv import row_moves, slot_kernels
from batchserve.kv.slab import EXTENT, SlabAllocator, bytes_per_token
from batchserve.kv.slots import SlotAllocator
from batchserve.native import pool
from batchserve.native.compile_progress import Part, compile_parts
from batchserve.request import GREEDY
from batchserve.runner import row_layout
from batchserve.runner.loader import LoadedModel, has_cpu_backend
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.sampling import argmax_kernel, device_columns, draw_kernel, sampled_walk, walk_kernel
from batchserve.scheduler import plan
from batchserve.startup.kv_memory import CudaMemory, ProfilingStep, kv_capacity, profiled_budget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.attention.base import AttentionBackend
    from batchserve.attention.tree_metadata import TreeKernel
    from batchserve.startup.kv_memory import Progress

KV_SHARE_OF_FREE_MEMORY = 0.25
UNKNOWN_BYTES = 4096 * MiB  # assumed to be free if the system does not say
GPU_KERNELS = ("triton", "flashinfer", "torch")  # fastest first (docs/gpu.md)

# Compile times in seconds, on one core of a server's processor.
COMMON_PARTS = (
    Part("row layout", 1.0, row_layout.compile_kernels),
    Part("plan", 0.8, plan.compile_kernels),
    Part("commit", 1.0, commit.compile_kernels),
    Part("pool", 0.5, pool.compile_kernels),
    Part("argmax", 1.6, argmax_kernel.compile_kernels),
    Part("draws", 12.6, draw_kernel.compile_kernels),
)
CPU_PARTS = (
    Part("row moves", 0.5, row_moves.compile_kernels),
    Part("greedy walk", 0.5, walk_kernel.compile_kernels),
    Part("sampled walk", 4.2, sampled_walk.compile_kernels),
)
PAGED_PARTS = (
    Part("columns", 1.0, device_columns.compile_kernels),
    Part("slots", 4.0, slot_kernels.compile_kernels),
)
ATTENTION_S = 13.6


def build_backend(config: EngineConfig, loaded: LoadedModel, say: Progress) -> tuple[AttentionBackend, int]:
    """Returns (backend, longest request in tokens). Raises ConfigError."""
    if has_cpu_backend(config, loaded.device):
        return _cpu_backend(config, loaded, say)
    if config.batch_invariant:
        raise ConfigError(f"batch_invariant = True: must be on a CPU; the device is {loaded.device.type}")
    return _paged_backend(config, loaded, say)


def _compile(parts: Sequence[Part], say: Progress) -> None:
    say("preparing kernels (compiled at the first start)")
    compile_parts(parts, say)


def _cpu_backend(config: EngineConfig, loaded: LoadedModel, say: Progress) -> tuple[AttentionBackend, int]:
    free = free_memory_bytes()
    budget = config.kv_cache_memory or _share_of(free)
    total_tokens, max_model_len = kv_capacity(config, loaded, budget, unit=EXTENT)
    _check_free(config, total_tokens * bytes_per_token(loaded.layers, loaded.dtype), free)
    allocator = SlabAllocator(loaded.layers, loaded.dtype, total_tokens)
    has_kernel = kernel_supports(loaded.layers, loaded.dtype)
    attention = Part("attention", ATTENTION_S, lambda: compile_kernels(loaded.layers, loaded.dtype))
    _compile([*COMMON_PARTS, *CPU_PARTS, *([attention] if has_kernel else [])], say)
    if config.batch_invariant:
        check_batch_invariant(loaded)
    say(_described(config, total_tokens, allocator.bytes_per_token, max_model_len))
    how = {"has_kernel": has_kernel, "has_sinks": loaded.has_sinks, "is_native": loaded.native is not None}
    backend = CpuBackend(allocator, loaded.num_heads, **how)
    return backend, max_model_len


def _paged_backend(config: EngineConfig, loaded: LoadedModel, say: Progress) -> tuple[AttentionBackend, int]:
    _compile([*COMMON_PARTS, *PAGED_PARTS], say)
    kernel = create_kernel(config, loaded, say)
    budget = config.kv_cache_memory
    if budget is None and loaded.device.type == "cuda":
        say(f"measuring the memory of a step of {config.max_num_batched_tokens} rows")
        profile = ProfilingStep(config, loaded, kernel)
        share = 0.0 if config.enforce_eager else min(1.0, config.max_graph_rows / config.max_num_batched_tokens)
        budget = profiled_budget(CudaMemory(loaded.device), config.gpu_memory_utilization, profile, say, share)
    free = CudaMemory(loaded.device).free_and_total()[0] if loaded.device.type == "cuda" else free_memory_bytes()
    if budget is None:
        budget = _share_of(free)
    total_tokens, max_model_len = kv_capacity(config, loaded, budget, 1, config.max_num_batched_tokens, num_dummies=1)
    per_token = bytes_per_token(loaded.layers, loaded.dtype)
    _check_free(config, total_tokens * per_token, free)
    max_tokens = max_model_len + config.max_num_batched_tokens  # one request's context and the rows of a step
    # Timing steps takes up to max_num_seqs requests besides those with contexts. CUDA graphs use this table size only.
    allocator = SlotAllocator(total_tokens, 2 * config.max_num_seqs, max_tokens, per_token)
    say(_described(config, total_tokens, per_token, max_model_len))
    return PagedBackend(loaded.layers, loaded.dtype, loaded.device, kernel, allocator), max_model_len


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
        backend = PagedBackend(loaded.layers, loaded.dtype, loaded.device, kernel, allocator)
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
            loaded.layers, loaded.num_heads, loaded.dtype, loaded.device, mask=config.flashinfer_mask
        )
    if name == "triton":
        from batchserve.attention.triton import TritonTreeKernel

        longest = config.max_model_len or loaded.max_model_len
        overlaps = config.kernel_overlap and can_overlap(loaded.device)
        return TritonTreeKernel(loaded.layers, loaded.dtype, longest + config.max_num_batched_tokens, overlaps=overlaps)
    return TorchKernel()


def check_batch_invariant(loaded: LoadedModel) -> None:
    """Raises ConfigError unless a native program runs the whole model. Only that is bitwise the same in any batch."""
    name = type(loaded.model).__name__
    if loaded.native is None:
        raise ConfigError(f"batch_invariant = True: {name} in {loaded.dtype} has no native program (the log says why)")
    if names := loaded.native.torch_operators:
        raise ConfigError(
            f"batch_invariant = True: {name} has operators that torch computes, whose bits may depend on the batch: "
            f"{', '.join(names)}"
        )


def _share_of(free: int | None) -> int:
    return int((UNKNOWN_BYTES if free is None else free) * KV_SHARE_OF_FREE_MEMORY)


def _check_free(config: EngineConfig, kv_bytes: int, free: int | None) -> None:
    """Raises ConfigError if more was asked for, and could be used, than is free."""
    if config.kv_cache_memory is not None and free is not None and kv_bytes > free:
        raise ConfigError(
            f"kv_cache_memory = {config.kv_cache_memory} bytes: must be at most {free} bytes, what is free"
        )


def _described(config: EngineConfig, total_tokens: int, per_token: int, max_model_len: int) -> str:
    return (
        f"K/V memory: {total_tokens} tokens of {per_token} bytes, {total_tokens * per_token / MiB:.0f} MiB at most; "
        f"max_model_len {max_model_len}, max_num_seqs {config.max_num_seqs}"
    )
