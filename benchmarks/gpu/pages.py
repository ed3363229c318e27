"""FlashInfer over pages of several tokens; the engine has pages of one, so that accepted rows stay where they are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from batchserve.attention.flashinfer import FlashInferKernel
from batchserve.attention.tree_metadata import TreeMetadata


class PagedKernel(FlashInferKernel):
    """Each request's slots are whole pages, behind each other in a page, but for its last one."""

    can_be_captured = False

    def __init__(self, *arguments: Any, page_size: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._page_size = page_size

    def _pages(self, metadata: TreeMetadata) -> dict[str, Any]:
        size, kv_lens, begins = self._page_size, metadata.kv_lens_cpu, metadata.kv_indptr_cpu.tolist()
        firsts = [torch.arange(begin, end, size) for begin, end in pairwise(begins)]
        indptr = torch.tensor([0, *map(len, firsts)]).cumsum(0).int()
        places = torch.cat(firsts).to(metadata.kv_indices.device)
        return {
            "paged_kv_indptr": indptr,
            "paged_kv_indices": metadata.kv_indices[places] // size,
            "paged_kv_last_page_len": (kv_lens - 1) % size + 1,
            "page_size": size,
        }

    def _in_pages(self, cache: torch.Tensor) -> torch.Tensor:
        return cache.unflatten(0, (-1, self._page_size))
