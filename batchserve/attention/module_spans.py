"""A step's spans as jobs for compiled loops whose q, k and v are a module's, layer by layer."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numba import carray

from batchserve.attention.span_job import SPAN_JOB
from batchserve.native import openmp
from batchserve.native.addresses import as_pointer, offset
from batchserve.native.jit import njit

if TYPE_CHECKING:
    import torch
    from numba.core.ccallback import CFunc

    from batchserve.attention.base import AttentionParams

    States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v, each [1, heads, num_tokens, dim]

LAYER = [name for name in SPAN_JOB.names or () if offset(SPAN_JOB, name) >= offset(SPAN_JOB, "planes")]


@njit(nogil=True, cache=True)
def gather_spans(slabs, spans, group, num_kv_heads, limits, addresses, capacities, is_small):  # type: ignore[no-untyped-def]
    """Fills addresses int64 [num_layers, num_spans, 2] and capacities [num_spans] from SlabAllocator.slabs().

    is_small bool [num_spans]: true for spans within `limits` (rows, work, queries). A span is within them by its rows
    and its work (tiles of up to four queries times keys), or by its queries per K/V head (rows times `group`). Returns
    the total work of the small spans.
    """
    most_rows, max_work, max_queries = limits
    total = 0
    for s in range(len(spans)):
        rows, keys = spans[s, 1], spans[s, 1] + spans[s, 2]
        own = carray(as_pointer(slabs[s, 0]), (addresses.shape[0], 2), np.int64)
        for layer in range(addresses.shape[0]):
            addresses[layer, s, 0], addresses[layer, s, 1] = own[layer, 0], own[layer, 1]
        capacities[s] = slabs[s, 1]
        work = (rows * group + 3) // 4 * num_kv_heads * keys
        is_small[s] = (rows <= most_rows and work <= max_work) or rows * group <= max_queries
        total += work if is_small[s] else 0
    return total


@dataclass(frozen=True, slots=True)
class SpanArrays:
    """Spans in the form that compiled kernels take. addresses: int64 [num_layers, num_spans, 2].

    is_small: bool [num_spans], the spans that are cheaper in the compiled kernel. work: their total work.
    """

    addresses: np.ndarray
    capacities: np.ndarray  # int64 [num_spans]
    rows: np.ndarray  # int64 [num_spans, 3]: row start, rows, context length
    parents: np.ndarray  # int32 [num_tokens]
    is_small: np.ndarray
    work: int

    def small(self) -> SpanArrays:
        """Returns only the small spans."""
        addresses, small = np.ascontiguousarray(self.addresses[:, self.is_small]), self.is_small[self.is_small]
        return SpanArrays(
            addresses, self.capacities[self.is_small], self.rows[self.is_small], self.parents, small, self.work
        )


class SpanJob:
    """Some of a step's spans as a job for compiled loops, run layer by layer."""

    def __init__(self, spans: SpanArrays, num_threads: int) -> None:
        self.num_spans, self.most_rows, self.num_threads = len(spans.rows), int(spans.rows[:, 1].max()), num_threads
        self._spans = spans  # kept alive: the job holds addresses of its arrays
        self._planes_at, self._by_layer = spans.addresses.ctypes.data, spans.addresses.strides[0]
        self._jobs = np.zeros(1, SPAN_JOB)
        job = self._jobs[0]
        job["num_tokens"], job["num_spans"], job["most_rows"] = len(spans.parents), self.num_spans, self.most_rows
        job["longest"] = (spans.rows[:, 1] + spans.rows[:, 2]).max()
        for name, array in (("capacities", spans.capacities), ("spans", spans.rows), ("parents", spans.parents)):
            job[name] = array.ctypes.data

    def run(
        self,
        loop: CFunc[Any],
        layer: int,
        states: States,
        out: torch.Tensor,
        params: AttentionParams,
        shares: tuple[int, int, bool],
    ) -> None:
        """Runs a loop for one layer. shares: part_rows, heads_at_once and stores of SPAN_JOB."""
        rows = [each if each.stride(3) == 1 else each.contiguous() for each in states]  # copies must live until the end
        size = out.itemsize
        where = [(each.data_ptr(), size * each.stride(2), size * each.stride(1)) for each in rows]
        sinks = None if params.sinks is None else params.sinks.detach().float().contiguous()
        (num_heads, dim), num_kv_heads = out.shape[1:], states[1].shape[1]
        addresses = self._planes_at + layer * self._by_layer, out.data_ptr(), 0 if sinks is None else sinks.data_ptr()
        shape = num_heads, dim, num_heads // num_kv_heads, params.sliding_window or 0
        scales = params.scaling, params.softcap or 0.0
        self._jobs[LAYER] = np.array((*addresses, *shape, *scales, *where, *shares, 0), self._jobs[LAYER].dtype)
        openmp.run(cast("int", loop.address), self._jobs.ctypes.data, self.num_threads)
        if self._jobs["next"][0] == 0:  # compiled code cannot raise: a thread without working memory claims nothing
            raise MemoryError("attention: there is no memory to work in")
