"""The GPU path's backend: K/V in slots on a device, one kernel call per layer for the trees of all requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchserve.attention.step_buffer import upload
from batchserve.attention.tree_metadata import TreeKernel, TreeMetadata, num_words
from batchserve.kv.slot_kernels import describe_rows
from batchserve.kv.slots import SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.attention.base import AttentionParams, LayerShape, Spans
    from batchserve.attention.static_step import StaticStep


class PagedBackend:
    """AttentionBackend with one K and one V cache per layer, [num_slots, num_kv_heads, dim], on any device.

    Everything except the kernel is the same on a CPU and on a GPU. Nothing here waits for the device.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        kernel: TreeKernel,
        allocator: SlotAllocator,
    ) -> None:
        self.allocator = allocator
        self.kernel = kernel
        self.name = kernel.name
        self.device = device
        shapes = [(allocator.num_slots, layer.num_kv_heads) for layer in layers]
        self.caches = [
            (
                torch.zeros(*shape, layer.key_dim, dtype=dtype, device=device),
                torch.zeros(*shape, layer.value_dim, dtype=dtype, device=device),
            )
            for layer, shape in zip(layers, shapes, strict=True)
        ]
        self._table = self._new_table()
        self._table_shape = allocator.table_shape
        self._metadata: TreeMetadata | None = None

    def begin(self, spans: Spans) -> None:
        arrays, is_causal = step_arrays(spans, self.allocator)
        tensors = upload(arrays, self.device)
        self.update_table(tensors["changed_places"], tensors["changed_slots"])
        kv_lens = np.diff(arrays["kv_indptr"])
        kv_indices = torch.empty(int(arrays["kv_indptr"][-1]), dtype=torch.int32, device=self.device)
        self.kernel.gather(self._table, tensors["kv_indptr"], tensors["table_offsets"], kv_indices)
        self._metadata = TreeMetadata(
            qo_indptr=tensors["qo_indptr"],
            kv_indptr=tensors["kv_indptr"],
            kv_indices=kv_indices,
            ancestors=tensors["ancestors"],
            positions=tensors["positions"],
            slot_mapping=tensors["slot_mapping"],
            qo_indptr_cpu=torch.from_numpy(arrays["qo_indptr"]),
            kv_indptr_cpu=torch.from_numpy(arrays["kv_indptr"]),
            kv_lens_cpu=torch.from_numpy(kv_lens),
            max_rows=int(spans.rows[:, 1].max()),
            is_causal=is_causal,
        )
        self.kernel.plan(self._metadata)

    def begin_static(self, step: StaticStep, arrays: Mapping[str, np.ndarray]) -> None:
        """Prepares a step of a CUDA graph, which starts with find_slots(). arrays: step_arrays() in its fields."""
        step.describe(arrays)
        self._metadata = step.metadata
        self.kernel.plan(step.metadata)

    def _new_table(self) -> torch.Tensor:
        """Returns a flat table of slots on the device, with one spare entry that padding changes write to."""
        rows, columns = self.allocator.table_shape
        return torch.zeros(rows * columns + 1, dtype=torch.int32, device=self.device)

    def update_table(self, changed_places: torch.Tensor, changed_slots: torch.Tensor) -> None:
        """Writes the result of SlotAllocator.changes() to the device's table of slots."""
        if self._table_shape != self.allocator.table_shape:
            old, self._table, self._table_shape = self._table[:-1], self._new_table(), self.allocator.table_shape
            self._table[: len(old)] = old
        self._table.index_copy_(0, changed_places, changed_slots)

    def find_slots(self, step: StaticStep) -> None:
        """Updates the table of slots and a static step's kv_indices. A CUDA graph starts with this."""
        views = step.views
        self._table.index_copy_(0, views["changed_places"], views["changed_slots"])
        kv_indices = step.metadata.kv_indices
        self.kernel.gather(self._table, views["kv_indptr"], views["table_offsets"], kv_indices)
        self.kernel.order(views["qo_indptr"], views["kv_indptr"], kv_indices)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        return self.attend_over(*self.caches[layer], query, key, value, params)

    def attend_over(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Like attend(), but with a layer's caches as arguments, because a compiler may have replaced them."""
        metadata = self._metadata
        if metadata is None:
            raise RuntimeError("attend() before begin()")
        num_rows, num_tokens = metadata.num_rows, query.shape[2]
        key, value = (each[0, :, :num_rows].transpose(0, 1) for each in (key, value))
        self.kernel.store(key, value, key_cache, value_cache, metadata.slot_mapping)
        out = self.kernel.run(query[0, :, :num_rows].transpose(0, 1), key_cache, value_cache, metadata, params)
        if num_rows < num_tokens:
            out = torch.cat([out, out.new_zeros(num_tokens - num_rows, *out.shape[1:])])
        return out.unsqueeze(0)


def step_arrays(
    spans: Spans, allocator: SlotAllocator, out: Mapping[str, np.ndarray] | None = None
) -> tuple[dict[str, np.ndarray], bool]:
    """Returns the arrays that describe a step to the device, and whether every request of the step is a chain.

    Besides TreeMetadata's fields: table_offsets int64 [num_requests], from an index in kv_indices to the index of its
    slot in the flattened table; SlotAllocator.changes() as changed_places and changed_slots, which count as uploaded.

    out: buffers to fill and pad (StaticStep) instead of new arrays. Changes fill only the beginning of their buffers.
    If they do not fit, new arrays are returned for them.
    """
    counts = spans.rows[:, 1]
    arrays = dict(out) if out is not None else _new_arrays(len(spans), len(spans.parents), num_words(counts))
    rows, table = allocator.rows(spans.request_ids)
    filled = tuple(arrays[name] for name in STEP_FIELDS)
    bits = arrays["ancestors"].view(np.uint32)
    is_causal = describe_rows(spans.rows, spans.parents, spans.positions, rows, table, (*filled, bits))
    room = None if out is None else (arrays["changed_places"], arrays["changed_slots"])
    arrays["changed_places"], arrays["changed_slots"] = allocator.changes(spans.request_ids, room)
    if room is not None:
        num_changes, rows_and_columns = len(arrays["changed_places"]), allocator.table_shape
        room[0][num_changes if num_changes <= len(room[0]) else 0 :] = math.prod(rows_and_columns)  # the spare entry
    return arrays, bool(is_causal)


STEP_FIELDS = ("slot_mapping", "qo_indptr", "kv_indptr", "table_offsets", "positions")


def _new_arrays(num_requests: int, num_rows: int, words: int) -> dict[str, np.ndarray]:
    return {
        "slot_mapping": np.empty(num_rows, np.int64),
        "qo_indptr": np.empty(num_requests + 1, np.int32),
        "kv_indptr": np.empty(num_requests + 1, np.int32),
        "table_offsets": np.empty(num_requests, np.int64),
        "positions": np.empty(num_rows, np.int32),
        "ancestors": np.empty((num_rows, words), np.int32),
    }
