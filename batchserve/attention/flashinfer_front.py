"""Puts a step's own rows in front of their context: orders the keys, and says up to how many rows that pays.

flashinfer_variant.py explains why.
"""

from __future__ import annotations

import torch

MIN_KEY_BLOCK = 64  # without a GPU to query: that of an A100, H100 or H200, for head_dim up to 128


def new_rows_first(qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor) -> torch.Tensor:
    """Returns TreeMetadata.kv_indices with each request's own rows before its context. Does not wait for the device."""
    places = torch.arange(len(kv_indices), dtype=kv_indptr.dtype, device=kv_indices.device)
    request = torch.searchsorted(kv_indptr[1:], places, right=True).clamp_(max=len(kv_indptr) - 2)
    rows, place = qo_indptr.diff()[request], places - kv_indptr[request]
    moved = torch.where(place < rows, kv_indptr[1:][request] - rows + place, places - rows)
    return kv_indices[moved.clamp_(0, max(len(kv_indices) - 1, 0))]


def min_key_block(head_dim: int, device: torch.device) -> int:
    """Returns the fewest keys that any of FlashInfer's 16-bit FA2 kernels attends to at once on this device.

    Follows its dispatch by shared memory (prefill.cuh, BatchPrefillWithPagedKVCacheDispatched). 0: unknown.
    """
    if device.type != "cuda":
        return MIN_KEY_BLOCK
    properties = torch.cuda.get_device_properties(device)
    of_sm = getattr(properties, "shared_memory_per_multiprocessor", 0)
    of_block = getattr(properties, "shared_memory_per_block_optin", 0)
    found = []
    for tile, warps, most in ((16, 4, 8), (64, 1, 8), (128, 1, 4)):
        if tile == 128 and head_dim >= 256:
            continue  # FlashInfer has no such kernel
        query, block = tile * head_dim * 2, 16 * warps * 2 * head_dim * 2  # bytes
        programs = 2 if of_sm >= 2 * (query + block) else 1
        fitting = min((min(of_sm // programs, of_block) - query) // block, most)
        found.append(0 if fitting < 1 else 16 * warps << fitting.bit_length() - 1)
    return min(found)
