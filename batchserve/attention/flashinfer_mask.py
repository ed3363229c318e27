"""Builds FlashInfer's custom mask for a step's trees on the device: one bit per row and key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from batchserve.attention.step_buffer import upload
from batchserve.kv.slot_kernels import WORD_BITS

if TYPE_CHECKING:
    from batchserve.attention.tree_metadata import TreeMetadata

MASK_BLOCK = 1 << 17  # bytes of a mask built at once: more take more memory, fewer take more launches


def packed_mask(metadata: TreeMetadata, sliding_window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns FlashInfer's custom mask: (uint8 bits on the device, int32 [num_requests + 1], offsets in bytes).

    Each request has a matrix [rows, kv_len] in row-major order, lowest bit first, that starts at a new byte. FlashInfer
    checks no lengths: if a mask is short, its kernel reads past the end. Raises RuntimeError for a mask that FlashInfer
    cannot address.
    """
    num_bits = metadata.qo_indptr_cpu.diff().numpy().astype(np.int64) * metadata.kv_lens_cpu.numpy()
    offsets = np.concatenate([[0], np.cumsum(-(-num_bits // 8))])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise RuntimeError(f"the custom mask of this step has {offsets[-1]} bytes, more than FlashInfer can address")
    device = metadata.ancestors.device
    begins = upload({"begins": offsets}, device)["begins"]
    packed = torch.empty(int(offsets[-1]), dtype=torch.uint8, device=device)
    for start in range(0, len(packed), MASK_BLOCK):
        block = packed[start : start + MASK_BLOCK]
        block.copy_(_mask_bytes(metadata, sliding_window, begins, torch.arange(len(block), device=device) + start))
    return packed, begins.int()


def _mask_bytes(
    metadata: TreeMetadata, sliding_window: int | None, begins: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """Returns the mask's bytes at `places`, for all requests at once: one by one took a dozen launches each."""
    request = torch.searchsorted(begins, places, right=True) - 1  # of several that begin there, the one with rows
    first_row = metadata.qo_indptr[request][:, None]
    num_rows = (metadata.qo_indptr[request + 1][:, None] - first_row).long()  # rows * keys may exceed int32
    kv_len = (metadata.kv_indptr[request + 1] - metadata.kv_indptr[request])[:, None]
    in_byte = torch.arange(8, device=places.device)
    bit = 8 * (places - begins[request])[:, None] + in_byte
    key = bit % kv_len
    is_inside = bit < num_rows * kv_len  # false for the padding of a request's last byte
    row = first_row + (bit // kv_len) * is_inside
    own = key - (kv_len - num_rows)  # the key's row in the step; negative: context
    other = own.clamp(min=0)
    is_ancestor = (metadata.ancestors[row, other // WORD_BITS] >> (other % WORD_BITS).int()) & 1
    is_visible = (own < 0) | is_ancestor.bool()
    if sliding_window is not None:
        position = torch.where(own < 0, key, metadata.positions[first_row + other])
        is_visible &= position > metadata.positions[row] - sliding_window
    weights = 1 << in_byte.to(torch.uint8)
    return ((is_visible & is_inside) * weights).sum(1, dtype=torch.uint8)
