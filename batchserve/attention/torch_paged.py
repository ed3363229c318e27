"""Tree attention over paged K/V in plain torch: the reference for the GPU kernels, and the substitute without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchserve.attention.torch_reference import attend_span
from batchserve.attention.tree_metadata import TreeKernel, TreeMetadata, visible_slots

if TYPE_CHECKING:
    import torch

    from batchserve.attention.base import AttentionParams


class TorchKernel(TreeKernel):
    """Attends to one request at a time, in fp32, on any device, for any shape, dtype, window, soft cap and sinks."""

    name = "torch"
    can_be_captured = False  # Python reads where requests begin and end

    def plan(self, metadata: TreeMetadata) -> None:
        pass

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: TreeMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        out = query.new_zeros(query.shape[0], query.shape[1], value_cache.shape[-1])
        qo, kv = metadata.qo_indptr_cpu.tolist(), metadata.kv_indptr_cpu.tolist()
        for i in range(metadata.num_requests):
            slots = metadata.kv_indices[kv[i] : kv[i + 1]].long()
            rows = slice(qo[i], qo[i + 1])
            if qo[i] == qo[i + 1]:
                continue
            keys, values = key_cache[slots].transpose(0, 1), value_cache[slots].transpose(0, 1)
            mask = visible_slots(metadata, i, params.sliding_window)
            out[rows] = attend_span(query[rows].transpose(0, 1), keys, values, mask, params)
        return out
