"""Sizes the K/V memory: what a budget holds, and on a GPU what weights and steps leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from batchserve.attention.paged import PagedBackend
from batchserve.config import EngineConfig, MiB
from batchserve.errors import ConfigError
from batchserve.kv.slab import bytes_per_token
from batchserve.kv.slots import SlotAllocator
from batchserve.request import ResolvedSampling
from batchserve.runner.loader import LoadedModel
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.ragged_batch import RequestRows, build_batch

if TYPE_CHECKING:
    from batchserve.attention.tree_metadata import TreeKernel

KEPT = 2  # times what all sequences at full length take, if no size is given; half of it keeps ended requests
Progress = Callable[[str], None]


class DeviceMemory(Protocol):
    """A device's memory as torch's allocator and the driver see it, in bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """Returns what the driver can still give, and the device's total. torch first gives back its cached blocks."""

    def allocated(self) -> int:
        """Returns the bytes that tensors hold now."""

    def reserved(self) -> int:
        """Returns the bytes that torch has taken from the driver."""

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        """Returns the most bytes that tensors held since reset_peak()."""


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


def kv_capacity(
    config: EngineConfig, loaded: LoadedModel, budget: int, unit: int, draft_rows: int = 0, num_dummies: int = 0
) -> tuple[int, int]:
    """Returns (tokens of K/V, longest request) for a budget in bytes, in units of `unit` tokens. Raises ConfigError.

    draft_rows: tokens that can be used beyond all sequences' full length; num_dummies: tokens that no request gets.
    """
    per_token = bytes_per_token(loaded.layers, loaded.dtype)
    wanted_len = config.max_model_len or loaded.max_model_len
    if wanted_len > loaded.max_model_len:
        raise ConfigError(f"max_model_len = {wanted_len}: the model's own limit is {loaded.max_model_len}")

    def rounded(tokens: int) -> int:
        return -(-tokens // unit) * unit

    # Memory beyond every sequence at full length is used only to keep the K/V of ended requests.
    most = config.max_num_seqs * rounded(wanted_len) + draft_rows
    total_tokens = budget // per_token // unit * unit - num_dummies
    if not config.prefix_cache:
        total_tokens = min(total_tokens, most)
    elif config.kv_cache_memory is None and loaded.device.type != "cuda":  # other programs share the machine's memory
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


class ProfilingStep:
    """Runs a step with as many rows as a step may have, all of them sampled, over K/V of its own.

    No other step needs more memory besides the K/V: drafts run the head on every row, prompts on one row of each
    request. Not included are the masks of trees with FlashInfer's own custom mask (rows x keys / 8 bytes for each kind
    of layer), and tables of slots (12 bytes for each token of max_num_seqs whole contexts).
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
        # Sampling that takes the most memory. With this top_k, the device decides. A nucleus alone may be too wide for
        # it, and the logits of all rows would then be sent to the host.
        nucleus = ResolvedSampling(1.0, 1, 0.9, 0, 1, frozenset())
        requests = []
        for i, count in enumerate(self._counts):
            allocator.reserve(f"profile-{i}", count)
            requests.append(RequestRows(f"profile-{i}", 0, [0] * count, list(range(-1, count - 1)), 1, nucleus))
        ModelRunner(loaded, backend).launch(build_batch(requests)).wait()


def profiled_budget(
    memory: DeviceMemory, utilization: float, profile: ProfilingStep, say: Progress, graph_share: float = 0.0
) -> int:
    """Returns the bytes for K/V: our share of the device's memory, less everything else that is needed.

    As in vLLM, everything else is what others hold outside of torch, and the most that tensors held in a profiling
    step. CUDA graphs, captured later, need graph_share of a step's memory. Not positive if nothing is left.
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
