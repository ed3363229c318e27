"""Finds out what a GPU's memory leaves for K/V beside weights and steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from batchserve.attention.paged import PagedBackend
from batchserve.config import EngineConfig, MiB
from batchserve.kv.slab import bytes_per_token
from batchserve.kv.slots import SlotAllocator
from batchserve.request import ResolvedSampling
from batchserve.runner.loader import LoadedModel
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.ragged_batch import RequestRows, build_batch

if TYPE_CHECKING:
    from batchserve.attention.tree_metadata import TreeKernel
    from batchserve.startup.kv_memory import Progress


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
        backend = PagedBackend(loaded.layers, loaded.torch_dtype, loaded.device, self._kernel, allocator)
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
