"""Tree attention of modules on a CPU, over one slab of K/V per request.

Compiled kernels (compiled.py) serve many small spans in one call. torch attends to one span at a time (sdpa.py), which
is faster once a span has enough work to hide the cost of a call. Compiled kernels also serve every span in bfloat16 on
a processor with matrix instructions or vectors of 16 floats.
"""

from __future__ import annotations

from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchserve.attention.base import AttentionParams, LayerShape, Span, Spans
from batchserve.attention.compiled import (
    ALONE,
    ELEMENTS,
    MAX_PARTS,
    PART_QUERIES,
    PART_ROWS,
    TURNS,
    attend_loop,
    supports_amx,
)
from batchserve.attention.module_spans import SpanArrays, SpanJob, gather_spans
from batchserve.attention.sdpa import attend_alone
from batchserve.attention.span_job import store_loop
from batchserve.attention.torch_reference import store, stored
from batchserve.kv.slab import SlabAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numba.core.ccallback import CFunc

    from batchserve.attention.module_spans import States

# A span is cheaper in the compiled kernel up to these queries per K/V head, or up to these rows and this work
# (gather_spans; benchmarks/attention.py). In bfloat16 SDPA is faster than vectors if only SDPA multiplies matrices. If
# neither does, it is no faster than vectors of 16 for any measured span, within a few per cent. Nor is it in float32 on
# an EPYC. On other processors a better library may make it faster for long chunks of prompts.
ANY_QUERIES = 1 << 40
SMALL_QUERIES = {"float32": 32, "bfloat16": 24}
SMALL_QUERIES_WITH_AVX512 = {"float32": 256, "bfloat16": ANY_QUERIES}
SMALL_QUERIES_BESIDE_AMX = 10
SMALL_ROWS, SMALL_SPAN = 32, 10_000


def has_matrix_instructions(dtype: str) -> bool:
    """Returns whether oneDNN multiplies this dtype with matrix instructions: bfloat16 on AMX."""
    has_amx = hasattr(torch.cpu, "get_capabilities") and torch.cpu.get_capabilities().get("amx_bf16", False)
    return dtype == "bfloat16" and bool(has_amx)


def _small_queries(dtype: str) -> int:
    if has_matrix_instructions(dtype):
        return SMALL_QUERIES_BESIDE_AMX
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return (SMALL_QUERIES_WITH_AVX512 if has_avx512 else SMALL_QUERIES).get(dtype, 0)


class CpuBackend:
    """Attends with compiled kernels and with torch's, over one allocator.

    has_kernel: allowed only if kernel_supports(). has_sinks: some layer has sinks. torch's kernels have none, so the
    compiled ones are faster for every span.
    """

    def __init__(
        self,
        allocator: SlabAllocator,
        num_heads: int,
        *,
        has_kernel: bool = True,
        has_sinks: bool = False,
    ) -> None:
        self.allocator = allocator
        self.name = "cpu"
        self._group = num_heads // allocator.min_kv_heads  # of the layer where it is largest
        self._supports_amx = has_kernel and supports_amx(allocator.layers, allocator.dtype)
        takes_all = has_sinks or self._supports_amx
        max_queries = ANY_QUERIES if takes_all else _small_queries(allocator.dtype)
        self._limits = SMALL_ROWS, SMALL_SPAN, max_queries
        self._has_kernel = has_kernel
        self._shapes = [(s.num_kv_heads, s.key_dim, s.num_kv_heads, s.value_dim) for s in allocator.layers]
        self._num_rows = 0
        self._large: list[Span] = []
        self._all: SpanJob | None = None  # every span, if compiled code stores their K and V
        self._small: SpanJob | None = None

    def begin(self, spans: Spans) -> None:
        self._num_rows, self._large, self._all, self._small = len(spans.parents), [], None, None
        if not self._has_kernel or not len(spans):
            self._large = spans.each()
            return
        gathered = self._gather(spans)
        is_small = gathered.is_small
        if not is_small.all():
            self._large = list(compress(spans.each(), (~is_small).tolist()))
        num_threads = torch.get_num_threads() if self._large or gathered.work > ALONE else 1
        self._all = SpanJob(gathered, num_threads)
        if is_small.any():
            self._small = SpanJob(gathered.small(), num_threads) if self._large else self._all

    def _gather(self, spans: Spans) -> SpanArrays:
        slabs, count = self.allocator.slabs(spans.request_ids), len(spans)
        addresses = np.empty((self.allocator.num_layers, count, 2), np.int64)
        capacities, is_small = np.empty(count, np.int64), np.empty(count, np.bool_)
        size = (self._group, self.allocator.num_kv_heads, self._limits)
        work = gather_spans(slabs, spans.rows, *size, addresses, capacities, is_small)
        return SpanArrays(addresses, capacities, spans.rows, spans.parents, is_small, work)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        dtype, states = getattr(torch, self.allocator.dtype), (query, key, value)
        self._check(layer, *states)
        if any(each.dtype != dtype for each in states):
            states = query.to(dtype), key.to(dtype), value.to(dtype)
        out = query.new_empty(query.shape[2], query.shape[1], value.shape[-1], dtype=dtype)
        if len(out) > self._num_rows:
            out[self._num_rows :] = 0
        if self._all is None:
            for span in self._large:
                store(self.allocator, span, layer, states[1], states[2])
        else:
            self._run_kernels(self._all, layer, states, out, params)
        for span in self._large:
            rows = slice(span.row_start, span.row_start + span.num_rows)
            out[rows] = attend_alone(span, states[0][:, :, rows], *stored(self.allocator, span, layer), params)
            if layer == self.allocator.num_layers - 1:
                span.cache.clear()  # masks of a long prompt are large, and are not needed again
        return out.to(query.dtype).unsqueeze(0)

    def _check(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raises ValueError if q, k and v are not as in the probe: compiled code would access other memory."""
        _, num_heads, num_rows, dim = query.shape
        found = (key.shape[1], key.shape[3], value.shape[1], value.shape[3])
        is_whole = dim == found[1] and num_heads % found[0] == 0
        if (
            found != self._shapes[layer]
            or not is_whole
            or not self._num_rows <= num_rows == key.shape[2] == value.shape[2]
        ):
            shapes = [list(each.shape) for each in (query, key, value)]
            raise ValueError(
                f"layer {layer}: q, k and v are {shapes} in a step of {self._num_rows} rows, not as at load"
            )

    @cached_property
    def _attend_loop(self) -> CFunc[Any]:
        return attend_loop(self.allocator.dtype, has_tiles=self._supports_amx)

    def _run_kernels(
        self, everything: SpanJob, layer: int, states: States, out: torch.Tensor, params: AttentionParams
    ) -> None:
        """Stores all spans, and attends for the small ones."""
        small = self._small
        part_rows, heads_at_once, stores = self._shares(everything, small, states[1].shape[1], out.shape[1])
        if not stores:
            everything.run(store_loop(ELEMENTS[self.allocator.dtype]), layer, states, out, params, (0, 1, False))
        if small is not None:
            small.run(self._attend_loop, layer, states, out, params, (part_rows, heads_at_once, stores))

    def _shares(
        self, everything: SpanJob, small: SpanJob | None, num_kv_heads: int, num_heads: int
    ) -> tuple[int, int, bool]:
        """Returns PART_ROWS, HEADS_AT_ONCE and STORES for the job of the small spans."""
        if small is None:
            return 0, 1, False
        rows_at_once = max(1, PART_QUERIES * num_kv_heads // num_heads) if self._supports_amx else PART_ROWS
        part_rows = max(rows_at_once, -(-small.most_rows // MAX_PARTS))
        heads_at_once = max(1, num_kv_heads * small.num_spans // (TURNS * small.num_threads))
        return part_rows, heads_at_once, small is everything and small.most_rows <= part_rows


def compile_kernels(layers: Sequence[LayerShape], dtype: str) -> None:
    """Compiles the kernels for such layers, or loads them from the disk cache, by running them on one token."""
    dim = layers[0].key_dim
    allocator = SlabAllocator([LayerShape(1, layer.key_dim, layer.key_dim) for layer in layers], dtype, 64)
    allocator.reserve("warm-up", 1)
    backend = CpuBackend(allocator, 1)
    none = np.array([-1], dtype=np.int32)
    backend.begin(Spans.of([Span("warm-up", 0, 0, none, np.zeros(1, dtype=np.int64), is_chain=True)]))
    token = torch.ones(1, 1, 1, dim, dtype=getattr(torch, dtype))
    backend.attend(0, token, token, token, AttentionParams(scaling=1.0))
    store_loop(ELEMENTS[dtype])
