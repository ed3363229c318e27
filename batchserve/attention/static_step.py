"""Step metadata at fixed addresses for CUDA graphs: one bucket of rows, padded with requests that have no rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchserve.attention.tree_metadata import TreeMetadata
from batchserve.kv.slot_kernels import WORD_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping


# Slot-table changes uploaded with a step. If there are more (a prompt's first step), they are uploaded separately.
MAX_CHANGES = 2048
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)


class StaticStep:
    """The buffers of one bucket, for steps of up to num_rows rows spread in any way over up to max_requests requests.

    Padding rows have position 0, see nothing and are written to the dummy slot. Padding requests have no rows and no
    keys. `fields` holds the dtypes and shapes that StepLayout needs; bind() supplies the memory.
    """

    def __init__(self, num_rows: int, max_requests: int) -> None:
        self.num_rows = num_rows
        self.max_requests = max_requests
        self.words = -(-num_rows // WORD_BITS)
        self.fields: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            "slot_mapping": (INT64, (num_rows,)),
            "qo_indptr": (INT32, (max_requests + 1,)),
            "kv_indptr": (INT32, (max_requests + 1,)),
            "table_offsets": (INT64, (max_requests,)),
            "positions": (INT32, (num_rows,)),
            "ancestors": (INT32, (num_rows, self.words)),
            "changed_places": (INT64, (MAX_CHANGES,)),
            "changed_slots": (INT32, (MAX_CHANGES,)),
        }
        self.views: Mapping[str, torch.Tensor] = {}

    def bind(self, views: Mapping[str, torch.Tensor], kv_indices: torch.Tensor, max_kv_len: int) -> None:
        """Attaches device memory. views: the fields. kv_indices: int32, with room for the keys of all requests.

        All buckets may share the memory of kv_indices. max_kv_len: the most keys that one request can have.
        """
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
            is_causal=False,  # the kernel is chosen once, so chains use their ancestor bits, too
            bucket=self.num_rows,
            max_kv_len=max_kv_len,
        )
        on_cpu = self.metadata.qo_indptr_cpu, self.metadata.kv_indptr_cpu, self.metadata.kv_lens_cpu
        self._on_cpu = [tensor.numpy() for tensor in on_cpu]  # views of the same memory

    def describe(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies a step (step_arrays() in this step's fields) into the metadata tensors that are on the CPU."""
        qo_indptr, kv_indptr, kv_lens = self._on_cpu
        qo_indptr[:] = arrays["qo_indptr"]
        kv_indptr[:] = arrays["kv_indptr"]
        np.subtract(kv_indptr[1:], kv_indptr[:-1], out=kv_lens)
