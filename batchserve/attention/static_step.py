"""Step metadata at fixed addresses, for CUDA graphs: one bucket of rows, padded with requests that have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchserve.attention.paged import step_arrays
from batchserve.attention.tree_metadata import WORD_BITS, TreeMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchserve.attention.base import Spans
    from batchserve.attention.slots import SlotAllocator

# Entries of the table of slots that travel with a step; a prompt's first step may have more, which go on their own.
MAX_CHANGES = 2048
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)


class StaticStep:
    """The buffers of a bucket: steps of up to num_rows rows, of up to max_requests requests, each with any number.

    What pads a step: rows of position 0 that see nothing and are written to the dummy slot, and requests without rows
    and keys. `fields` is what a StepLayout needs; bind() says where in memory that is.
    """

    def __init__(self, num_rows: int, max_requests: int) -> None:
        self.num_rows = num_rows
        self.max_requests = max_requests
        self.words = -(-num_rows // WORD_BITS)
        self.fields: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            "slot_mapping": (INT64, (num_rows,)),
            "qo_indptr": (INT32, (max_requests + 1,)),
            "kv_indptr": (INT32, (max_requests + 1,)),
            "table_rows": (INT32, (max_requests,)),
            "positions": (INT32, (num_rows,)),
            "ancestors": (INT32, (num_rows, self.words)),
            "changed_places": (INT64, (MAX_CHANGES,)),
            "changed_slots": (INT32, (MAX_CHANGES,)),
        }
        self.views: Mapping[str, torch.Tensor] = {}

    def bind(self, views: Mapping[str, torch.Tensor], kv_indices: torch.Tensor) -> None:
        """views: the fields on the device; kv_indices: int32, as many as max_requests can have, one memory for all."""
        self.views = views
        self.metadata = TreeMetadata(
            qo_indptr=views["qo_indptr"],
            kv_indptr=views["kv_indptr"],
            kv_indices=kv_indices,
            ancestors=views["ancestors"],
            positions=views["positions"],
            slot_mapping=views["slot_mapping"],
            qo_indptr_cpu=torch.zeros(self.max_requests + 1, dtype=torch.int32),
            kv_indptr_cpu=torch.zeros(self.max_requests + 1, dtype=torch.int32),
            kv_lens_cpu=torch.zeros(self.max_requests, dtype=torch.int32),
            max_rows=self.num_rows,
            is_causal=False,  # chains, too, are read from their bits: the kernel is chosen once
            bucket=self.num_rows,
        )

    def arrays(self, spans: Spans, allocator: SlotAllocator) -> dict[str, np.ndarray]:
        """The fields of one step, padded; only changes of the table are as many as there are."""
        arrays, _ = step_arrays(spans, allocator, self.num_rows, self.words)
        last = self.max_requests + 1
        for name, length, rest in (
            ("qo_indptr", last, arrays["qo_indptr"][-1]),
            ("kv_indptr", last, arrays["kv_indptr"][-1]),
            ("table_rows", self.max_requests, 0),
            ("positions", self.num_rows, 0),
            ("ancestors", self.num_rows, 0),
        ):
            arrays[name] = extended(arrays[name], length, rest)
        return arrays

    def describe(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Put the step that arrays() gave into those tensors of the metadata that are on the CPU."""
        for name in ("qo_indptr", "kv_indptr"):
            getattr(self.metadata, f"{name}_cpu").numpy()[:] = arrays[name]
        self.metadata.kv_lens_cpu.numpy()[:] = np.diff(arrays["kv_indptr"])


def extended(array: np.ndarray, length: int, value: int) -> np.ndarray:
    """The array with `value` behind it, [length, ...]."""
    out = np.full((length, *array.shape[1:]), value, array.dtype)
    out[: len(array)] = array
    return out
