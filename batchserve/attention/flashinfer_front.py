"""A step's own rows in front of their context: how keys are put in that order, and how many rows it is good for.

What it is for is in flashinfer_variant.py.
"""

from __future__ import annotations

import torch

LEAST_KEY_BLOCK = 64  # without a GPU to ask: that of an A100, H100 or H200, for head_dim up to 128


def own_rows_first(qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor) -> torch.Tensor:
    """TreeMetadata.kv_indices, but each request's own rows of the step before its context. Waits for nothing."""
    places = torch.arange(len(kv_indices), dtype=kv_indptr.dtype, device=kv_indices.device)
    request = torch.searchsorted(kv_indptr[1:], places, right=True).clamp_(max=len(kv_indptr) - 2)
    rows, place = qo_indptr.diff()[request], places - kv_indptr[request]
    moved = torch.where(place < rows, kv_indptr[1:][request] - rows + place, places - rows)
    return kv_indices[moved.clamp_(0, max(len(kv_indices) - 1, 0))]


def least_key_block(head_dim: int, device: torch.device) -> int:
    """Keys that any of FlashInfer's FA2 kernels for 16 bits attends to at once, at least, on this device.

    As its dispatch decides (prefill.cuh, BatchPrefillWithPagedKVCacheDispatched), by shared memory. 0: unknown.
    """
    if device.type != "cuda":
        return LEAST_KEY_BLOCK
    properties = torch.cuda.get_device_properties(device)
    of_sm = getattr(properties, "shared_memory_per_multiprocessor", 0)
    of_block = getattr(properties, "shared_memory_per_block_optin", 0)
    found = []
    for tile, warps, most in ((16, 4, 8), (64, 1, 8), (128, 1, 4)):
        if tile == 128 and head_dim >= 256:
            continue  # FlashInfer has none there
        query, block = tile * head_dim * 2, 16 * warps * 2 * head_dim * 2  # bytes
        programs = 2 if of_sm >= 2 * (query + block) else 1
        fitting = min((min(of_sm // programs, of_block) - query) // block, most)
        found.append(0 if fitting < 1 else 16 * warps << fitting.bit_length() - 1)
    return min(found)
