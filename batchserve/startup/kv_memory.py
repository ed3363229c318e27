"""How much K/V memory there is: what a budget holds, and on a GPU what weights and steps leave."""

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

KEPT = 2  # times what all sequences at full length take, where nobody says how much: as much again of ended requests
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


def kv_capacity(
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


class ProfilingStep:
    """A step of as many rows as a step may have, all with their logits and sampled, over K/V of its own.

    No other step's model takes more memory beside the K/V: drafts run the head on every row, prompts on one of each
    request. Not in it: the masks of trees where FlashInfer is told of them by its own (rows x keys / 8 bytes for each
    kind of layer), and tables of slots (12 bytes for each token of max_num_seqs whole contexts).
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
        # Sampling that takes the most memory. With that top_k the device decides: a nucleus alone may be too wide for
        # it, and then the logits of all rows would be sent to the host.
        nucleus = ResolvedSampling(1.0, 1, 0.9, 0, 1, frozenset())
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
