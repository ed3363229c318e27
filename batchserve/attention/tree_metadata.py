"""Metadata of one step over paged K/V, and the interface of the tree-attention kernels that take it.

A page holds one token and is called a slot. K and V of a layer are [num_slots, num_kv_heads, dim]. Slot 0 belongs to no
request: padding rows are written there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from batchserve.kv.slot_kernels import WORD_BITS, fill_ancestors

if TYPE_CHECKING:
    from batchserve.attention.base import AttentionParams


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TreeMetadata:
    """One step. Tensors are on the device, except those whose names end in _cpu.

    qo_indptr: int32 [num_requests + 1], where each request's rows begin in the ragged batch.
    kv_indptr: int32 [num_requests + 1], where each request's slots begin in kv_indices.
    kv_indices: int32 [sum of kv_len], the slots in order: those of the context, then those of this step's rows. kv_len
    counts both.
    ancestors: int32 [num_rows, words]. Bit i of word w of a row: the row sees row 32 * w + i of its own request (every
    row sees itself). words is that of the request with the most rows.
    positions: int32 [num_rows], absolute. A context key's position is its index; a new key's position is its row's.
    slot_mapping: int64 [num_rows], where each row's K and V are written; 0 for a bucket's padding.
    is_causal: every request is a chain, so that attention is plain causal attention.
    bucket: None for an eager step. Otherwise the number of rows that a CUDA graph's steps are padded to (also
    max_rows). All steps of the graph use the same tensors in turn. Requests that a step lacks have no rows and no keys,
    and kv_indices is longer than kv_indptr says.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    ancestors: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    qo_indptr_cpu: torch.Tensor  # int32, as qo_indptr
    kv_indptr_cpu: torch.Tensor  # int32, as kv_indptr
    kv_lens_cpu: torch.Tensor  # int32 [num_requests]
    max_rows: int  # the most rows of one request
    is_causal: bool
    bucket: int | None = None
    max_kv_len: int = 0  # of a bucket: the most keys that one request can have

    @property
    def num_requests(self) -> int:
        return len(self.kv_lens_cpu)

    @property
    def num_rows(self) -> int:
        """The number of rows of all requests, including a bucket's padding."""
        return len(self.positions)


class TreeKernel(Protocol):
    """Attention of one layer under tree masks. Constructors raise ConfigError if the kernel cannot serve a model.

    can_be_captured: whether a CUDA graph may replay run(): what run() launches depends on device tensors only.
    most_rows_as_requests: graphs of up to this many rows have as many requests as rows, even above max_num_seqs.
    """

    name: str
    can_be_captured: bool
    most_rows_as_requests: int = 0

    def plan(self, metadata: TreeMetadata) -> None:
        """Prepares the kernel for one step. Called once, before the first layer's run().

        For a bucket, run() is called layer by layer in the first step only. A graph replays what run() launched then;
        later steps only call plan().
        """

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes a step's K and V, [num_rows, num_kv_heads, dim] of any strides, to their slots in a layer's caches."""
        key_cache.index_copy_(0, slot_mapping, key.to(key_cache.dtype))
        value_cache.index_copy_(0, slot_mapping, value.to(value_cache.dtype))

    def gather(
        self, table: torch.Tensor, kv_indptr: torch.Tensor, table_offsets: torch.Tensor, kv_indices: torch.Tensor
    ) -> None:
        """Fills TreeMetadata.kv_indices from the table of slots. In a CUDA graph only the device knows their number.

        table: int32, flat. table_offsets: int64 [num_requests], from an index in kv_indices to the index of its slot in
        the table. Entries after the last request's may be anything.
        """
        places = torch.arange(len(kv_indices), dtype=torch.int32, device=table.device)
        request = torch.searchsorted(kv_indptr[1:], places, right=True).clamp_(max=len(table_offsets) - 1)
        torch.index_select(table, 0, (places + table_offsets[request]).clamp_(0, len(table) - 1), out=kv_indices)

    def order(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor) -> None:
        """Reorders what gather() found for a graph's step, if the kernel needs another order."""
        return

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: TreeMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attends over the caches, which already hold this step's K and V.

        query [num_rows, num_heads, key_dim], of any strides but a contiguous last dimension; caches
        [num_slots, num_kv_heads, dim]. Returns [num_rows, num_heads, value_dim] in the query's dtype. Raises
        UnsupportedModelError if the kernel lacks something that `params` asks for.
        """


def ancestor_bits(parents: np.ndarray, qo_indptr: np.ndarray) -> tuple[np.ndarray, bool]:
    """Returns TreeMetadata.ancestors for the rows of all requests, and whether every request is a chain.

    parents: int32 [num_rows], counted inside each request, -1 for the context. A parent precedes its children.
    """
    bits = np.empty((len(parents), num_words(np.diff(qo_indptr))), np.uint32)
    is_causal = fill_ancestors(parents, qo_indptr, bits)
    return bits.view(np.int32), bool(is_causal)


def num_words(counts: np.ndarray) -> int:
    """Returns the number of ancestor words per row, given the number of rows of each request."""
    return -(-int(counts.max(initial=1)) // WORD_BITS)


def visible_slots(metadata: TreeMetadata, request: int, sliding_window: int | None) -> torch.Tensor:
    """Returns bool [rows, kv_len] on the device: the keys that each row of a request attends to."""
    start, end = metadata.qo_indptr_cpu[request : request + 2].tolist()
    kv_len, num_rows = int(metadata.kv_lens_cpu[request]), end - start
    device = metadata.ancestors.device
    row = torch.arange(num_rows, device=device)
    tree = (metadata.ancestors[start:end, row // WORD_BITS] >> (row % WORD_BITS).int()) & 1
    context = torch.ones(num_rows, kv_len - num_rows, dtype=torch.bool, device=device)
    mask = torch.cat([context, tree.bool()], 1)
    if sliding_window is not None:
        positions = metadata.positions[start:end]
        keys = torch.cat([torch.arange(kv_len - num_rows, dtype=torch.int32, device=device), positions])
        mask &= keys[None, :] > positions[:, None] - sliding_window
    return mask
