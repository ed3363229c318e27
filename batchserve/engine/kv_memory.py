"""How much K/V memory there is, and the attention backend that owns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from batchserve.attention import row_moves, slot_kernels
from batchserve.attention.cpu import CpuBackend, compile_kernels, has_matrix_instructions, kernel_supports
from batchserve.attention.paged import PagedBackend
from batchserve.attention.slab import EXTENT, SlabAllocator, bytes_per_token
from batchserve.attention.slots import SlotAllocator
from batchserve.attention.torch_paged import TorchKernel
from batchserve.config import EngineConfig, MiB
from batchserve.engine.free_memory import free_memory_bytes
from batchserve.errors import ConfigError
from batchserve.request import GREEDY, ResolvedSampling
from batchserve.runner import row_layout
from batchserve.runner.invariant import fix_activations
from batchserve.runner.loader import LoadedModel, has_cpu_backend
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.packed import split_linears
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.runner.row_dependence import find_row_dependence
from batchserve.sampling import argmax_kernel, device_columns, draw_kernel, sampled_walk, walk_kernel

if TYPE_CHECKING:
    from batchserve.attention.base import AttentionBackend
    from batchserve.attention.tree_metadata import TreeKernel

KV_SHARE_OF_FREE_MEMORY = 0.25
KEPT = 2  # times what all sequences at full length take, where nobody says how much: as much again of ended requests
GPU_KERNELS = ("flashinfer", "triton", "torch")  # the fastest first
Progress = Callable[[str], None]


class DeviceMemory(Protocol):
    """A device's memory as torch's allocator and the driver see it, in bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """What the driver could still give, and what the device has. Cached blocks of torch are given back first."""

    def allocated(self) -> int:
        """What tensors hold now."""

    def reserved(self) -> int:
        """What torch has taken from the driver."""

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        """The most that tensors held since reset_peak()."""


class CudaMemory:
    """DeviceMemory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return free, total

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


def build_backend(config: EngineConfig, loaded: LoadedModel, say: Progress) -> tuple[AttentionBackend, int]:
    """(backend, longest request in tokens). Raises ConfigError."""
    say("preparing kernels (compiled at the first start, some seconds)")
    row_layout.compile_kernels()
    argmax_kernel.compile_kernels()
    draw_kernel.compile_kernels()
    if has_cpu_backend(config, loaded.device):
        return _cpu_backend(config, loaded, say)
    if config.batch_invariant:
        raise ConfigError(f"batch_invariant = True: must be on a CPU; the device is {loaded.device.type}")
    return _paged_backend(config, loaded, say)


def _cpu_backend(config: EngineConfig, loaded: LoadedModel, say: Progress) -> tuple[AttentionBackend, int]:
    free = free_memory_bytes()
    budget = config.kv_cache_memory or int(free * KV_SHARE_OF_FREE_MEMORY)
    total_tokens, max_model_len = _capacity(config, loaded, budget, unit=EXTENT)
    _check_free(config, total_tokens * bytes_per_token(loaded.layers, loaded.dtype), free)
    allocator = SlabAllocator(loaded.layers, loaded.dtype, total_tokens)
    row_moves.compile_kernels()
    walk_kernel.compile_kernels()
    sampled_walk.compile_kernels()
    has_kernel = kernel_supports(loaded.layers, loaded.dtype)
    if config.batch_invariant:
        say("checking that no operator gives a row other bits among other rows")
        check_batch_invariant(loaded, has_kernel)
    if has_kernel:
        compile_kernels(loaded.layers, loaded.dtype)
    say(_described(config, total_tokens, allocator.bytes_per_token, max_model_len))
    backend = CpuBackend(allocator, _num_heads(loaded), has_kernel=has_kernel, batch_invariant=config.batch_invariant)
    return backend, max_model_len


def _paged_backend(config: EngineConfig, loaded: LoadedModel, say: Progress) -> tuple[AttentionBackend, int]:
    kernel = create_kernel(config, loaded, say)
    device_columns.compile_kernels()
    slot_kernels.compile_kernels()
    budget = config.kv_cache_memory
    if budget is None and loaded.device.type == "cuda":
        say(f"measuring the memory of a step of {config.max_num_batched_tokens} rows")
        profile = ProfilingStep(config, loaded, kernel)
        share = 0.0 if config.enforce_eager else min(1.0, config.max_graph_rows / config.max_num_batched_tokens)
        budget = profiled_budget(CudaMemory(loaded.device), config.gpu_memory_utilization, profile, say, share)
    free = CudaMemory(loaded.device).free_and_total()[0] if loaded.device.type == "cuda" else free_memory_bytes()
    if budget is None:
        budget = int(free * KV_SHARE_OF_FREE_MEMORY)
    total_tokens, max_model_len = _capacity(config, loaded, budget, 1, config.max_num_batched_tokens, num_dummies=1)
    per_token = bytes_per_token(loaded.layers, loaded.dtype)
    _check_free(config, total_tokens * per_token, free)
    max_tokens = max_model_len + config.max_num_batched_tokens  # a request's context and the rows of a step
    allocator = SlotAllocator(total_tokens, config.max_num_seqs, max_tokens, per_token)
    say(_described(config, total_tokens, per_token, max_model_len))
    return PagedBackend(loaded.layers, loaded.dtype, loaded.device, kernel, allocator), max_model_len


def create_kernel(config: EngineConfig, loaded: LoadedModel, say: Progress) -> TreeKernel:
    """The kernel that was asked for, or the first that can serve the model. Raises ConfigError."""
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
    """Run a step of a tree and one of a chain. Raises ConfigError: what a kernel lacks may show only when it runs."""
    for parents in ([-1, 0, 0], [-1, 0, 1]):
        allocator = SlotAllocator(len(parents), 1, len(parents), 0)
        allocator.reserve("trial", len(parents))
        backend = PagedBackend(loaded.layers, loaded.dtype, loaded.device, kernel, allocator)
        num_pending, sampling = (3, None) if parents[-1] == 1 else (1, GREEDY)
        rows = RequestRows("trial", 0, [0] * len(parents), parents, num_pending, sampling)
        try:
            ModelRunner(loaded, backend).launch(build_batch([rows])).wait()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no compiler, no module for this GPU, a library that cannot be loaded
            raise ConfigError(f"it cannot run: {type(error).__name__}: {error}") from error


def _make_kernel(name: str, config: EngineConfig, loaded: LoadedModel) -> TreeKernel:
    if name == "flashinfer":
        from batchserve.attention.flashinfer import FlashInferKernel

        if loaded.has_sinks:
            raise ConfigError(f"{type(loaded.model).__name__} has attention sinks, which only triton and torch have")
        heads = _num_heads(loaded)
        return FlashInferKernel(loaded.layers, heads, loaded.dtype, loaded.device, mask=config.flashinfer_mask)
    if name == "triton":
        from batchserve.attention.triton import TritonTreeKernel

        longest = config.max_model_len or loaded.max_model_len
        return TritonTreeKernel(loaded.layers, loaded.dtype, longest + config.max_num_batched_tokens)
    return TorchKernel()


def _num_heads(loaded: LoadedModel) -> int:
    return int(loaded.model.config.get_text_config().num_attention_heads)


def _capacity(
    config: EngineConfig, loaded: LoadedModel, budget: int, unit: int, draft_rows: int = 0, num_dummies: int = 0
) -> tuple[int, int]:
    """(tokens of K/V, longest request) that so many bytes hold, in units of so many tokens. Raises ConfigError.

    draft_rows: tokens that can be used beyond all sequences' full length; num_dummies: those that nobody is given.
    """
    per_token = bytes_per_token(loaded.layers, loaded.dtype)
    wanted_len = config.max_model_len or loaded.max_model_len
    if wanted_len > loaded.max_model_len:
        raise ConfigError(f"max_model_len = {wanted_len}: the model's own limit is {loaded.max_model_len}")

    def rounded(tokens: int) -> int:
        return -(-tokens // unit) * unit

    # More than every sequence at full length is never used, but by what is kept of those that have ended.
    most = config.max_num_seqs * rounded(wanted_len) + draft_rows
    total_tokens = budget // per_token // unit * unit - num_dummies
    if not config.prefix_cache:
        total_tokens = min(total_tokens, most)
    elif config.kv_cache_memory is None and loaded.device.type != "cuda":  # the machine's memory is not ours alone
        total_tokens = min(total_tokens, KEPT * most)
    max_model_len = min(wanted_len, total_tokens)
    least = config.max_model_len or 2  # a token of the prompt and one of the answer
    if max_model_len < least:
        what = f"kv_cache_memory = {budget} bytes"
        if config.kv_cache_memory is None and loaded.device.type == "cuda":
            what = f"gpu_memory_utilization = {config.gpu_memory_utilization}: K/V memory of {max(0, budget)} bytes"
        needed = rounded(least) + num_dummies
        raise ConfigError(
            f"{what}: must be at least {needed * per_token} bytes, for {needed} tokens of {per_token} bytes"
            + (f" (max_model_len = {least})" if config.max_model_len else " (memory is taken in units of so many)")
        )
    return total_tokens, max_model_len


def _check_free(config: EngineConfig, kv_bytes: int, free: int) -> None:
    """Raises ConfigError where more was asked for, and could be used, than there is."""
    if config.kv_cache_memory is not None and kv_bytes > free:
        raise ConfigError(
            f"kv_cache_memory = {config.kv_cache_memory} bytes: must be at most {free} bytes, what is free"
        )


def _described(config: EngineConfig, total_tokens: int, per_token: int, max_model_len: int) -> str:
    return (
        f"K/V memory: {total_tokens} tokens of {per_token} bytes, {total_tokens * per_token / MiB:.0f} MiB at most; "
        f"max_model_len {max_model_len}, max_num_seqs {config.max_num_seqs}"
    )


class ProfilingStep:
    """A step of as many rows as a step may have, all with their logits and sampled, over K/V of its own.

    No other step takes more memory beside the K/V: drafts run the head on every row, prompts on one of each request.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, kernel: TreeKernel) -> None:
        self._loaded = loaded
        self._kernel = kernel
        rows, longest = config.max_num_batched_tokens, config.max_model_len or loaded.max_model_len
        self._counts = [min(longest, rows - start) for start in range(0, rows, longest)]
        self.kv_bytes = (rows + 1) * bytes_per_token(loaded.layers, loaded.dtype)

    def __call__(self) -> None:
        loaded, rows = self._loaded, sum(self._counts)
        allocator = SlotAllocator(rows, len(self._counts), rows, 0)
        backend = PagedBackend(loaded.layers, loaded.dtype, loaded.device, self._kernel, allocator)
        nucleus = ResolvedSampling(1.0, 0, 0.9, 0, 1, frozenset())  # sampling that takes the most memory
        requests = []
        for i, count in enumerate(self._counts):
            allocator.reserve(f"profile-{i}", count)
            requests.append(RequestRows(f"profile-{i}", 0, [0] * count, list(range(-1, count - 1)), 1, nucleus))
        ModelRunner(loaded, backend).launch(build_batch(requests)).wait()


def profiled_budget(
    memory: DeviceMemory, utilization: float, profile: ProfilingStep, say: Progress, graph_share: float = 0.0
) -> int:
    """Bytes for K/V: the share of the device's memory that we may use, less all that is needed beside it.

    As vLLM does it: what others hold and torch knows nothing of, and the most that tensors held in a profiling step.
    CUDA graphs, captured later, have memory of their own: graph_share of a step's. Not positive where nothing is left.
    """
    before = memory.allocated()
    memory.reset_peak()
    profile()
    needed = memory.peak() - profile.kv_bytes
    free, total = memory.free_and_total()
    others = total - free - memory.reserved()
    graphs = int((needed - before) * graph_share)
    budget = int(total * utilization) - others - needed - graphs
    say(
        f"device memory: {total / MiB:.0f} MiB, {utilization:.0%} of it for us: {before / MiB:.0f} MiB weights, "
        f"{(needed - before) / MiB:.0f} MiB for a step, {graphs / MiB:.0f} MiB for CUDA graphs, "
        f"{others / MiB:.0f} MiB of others and libraries, {max(0, budget) / MiB:.0f} MiB for K/V"
    )
    return budget


def check_batch_invariant(loaded: LoadedModel, has_kernel: bool) -> None:
    """Raises ConfigError where bitwise equality cannot be promised.

    For its sake the model's activations are changed, and how many rows a linear multiplies at once.
    """
    name = type(loaded.model).__name__
    fix_activations(loaded.model)
    if not has_kernel:
        raise ConfigError(f"batch_invariant: {name} in {loaded.dtype} has no attention kernel with a fixed order")
    if has_matrix_instructions(loaded.dtype):
        split_linears(loaded.model)
    if reason := find_row_dependence(loaded.model):
        raise ConfigError(f"batch_invariant: {name} gives a row other bits in another batch ({reason})")
