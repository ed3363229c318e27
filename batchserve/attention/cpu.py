"""Tree attention on a CPU, over one slab of K/V a request.

Two kernels: a compiled loop nest that serves many small spans in one call, and SDPA, which is faster once a span has
enough work to hide its fixed cost. Under `batch_invariant` everything takes the first: it reduces keys in the order of
their positions, whatever else is in the batch. So does everything in bfloat16 where a processor multiplies whole
matrices (matrix_kernel.py) or vectors of 16 (path_kernel.py). Large spans of layers with sinks or a soft cap, which
SDPA has not, take the reference's arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.nn.functional as F

from batchserve import openmp
from batchserve.attention.base import AttentionParams, LayerShape, Span, Spans
from batchserve.attention.mask import visible_keys
from batchserve.attention.slab import SlabAllocator
from batchserve.attention.torch_reference import attend_span, store, stored

if TYPE_CHECKING:
    from collections.abc import Sequence

# Up to so many queries of a K/V head, or so many rows and so much work (gather_spans), a span is cheaper in the
# compiled kernel (benchmarks/attention.py). In bfloat16 SDPA is faster than vectors where only it multiplies matrices;
# where nothing does it is no faster than vectors of 16 for any span that was measured, give or take a few per cent.
SMALL_QUERIES = {torch.float32: 32, torch.bfloat16: 24}
SMALL_QUERIES_BESIDE_AMX, ANY_QUERIES = 10, 1 << 40
SMALL_ROWS, SMALL_SPAN = 32, 10_000
ALONE = 1_000  # work that one thread has done before another one has begun
# Of a span, that a thread takes at once: more are no faster, fewer heads than threads would leave some idle. Matrices
# take a block's queries of a K/V head, or those of several heads; each thread should find work so many times.
PART_ROWS, MOST_PARTS, PART_QUERIES, TURNS = 8, 16, 16, 8
KERNEL_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Spans:
    """Spans as the compiled kernels take them. addresses int64 [num_layers, num_spans, 2].

    is_small bool [num_spans]: those that are cheaper in the compiled kernel; work: what it has to do for all of them.
    """

    addresses: np.ndarray
    capacities: np.ndarray  # int64 [num_spans]
    rows: np.ndarray  # int64 [num_spans, 3]: row start, rows, context length
    parents: np.ndarray  # int32 [num_tokens]
    is_small: np.ndarray
    work: int

    def small(self) -> _Spans:
        """The small ones."""
        is_small = self.is_small
        if is_small.all():
            return self
        addresses = np.ascontiguousarray(self.addresses[:, is_small])
        small = is_small[is_small]
        return _Spans(addresses, self.capacities[is_small], self.rows[is_small], self.parents, small, self.work)

    def job(self) -> np.ndarray:
        """What path_kernel.attend_loop takes, but for what a layer adds; ADDRESSES are those of the first one."""
        from batchserve.attention import path_kernel as kernel

        job = np.zeros(kernel.JOB_SIZE, np.int64)
        job[kernel.NUM_SPANS], job[kernel.LONGEST] = len(self.rows), (self.rows[:, 1] + self.rows[:, 2]).max()
        job[kernel.MOST_ROWS] = self.rows[:, 1].max()
        arrays = (self.addresses, self.capacities, self.rows, self.parents)
        job[[kernel.ADDRESSES, kernel.CAPACITIES, kernel.SPANS, kernel.PARENTS]] = [a.ctypes.data for a in arrays]
        return job


def kernel_supports(layers: list[LayerShape], dtype: torch.dtype) -> bool:
    """Whether the compiled kernel can serve these layers."""
    is_whole = all(shape.key_dim * dtype.itemsize % 4 == 0 for shape in layers)
    return dtype in KERNEL_DTYPES and is_whole and all(shape.key_dim == shape.value_dim for shape in layers)


def has_matrix_instructions(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype with instructions for whole matrices: bfloat16 beside AMX."""
    has_amx = hasattr(torch.cpu, "get_capabilities") and torch.cpu.get_capabilities().get("amx_bf16", False)
    return dtype == torch.bfloat16 and bool(has_amx)


def takes_matrices(layers: Sequence[LayerShape], dtype: torch.dtype) -> bool:
    """Whether attention itself can multiply whole matrices: what oneDNN may do, compiled kernels may not."""
    from batchserve.attention import matrix_code

    is_whole = all(shape.key_dim % matrix_code.PAIRS == 0 for shape in layers)
    return dtype == torch.bfloat16 and is_whole and matrix_code.has_matrices()


def _small_queries(dtype: torch.dtype) -> int:
    if has_matrix_instructions(dtype):
        return SMALL_QUERIES_BESIDE_AMX
    if dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX512":
        return ANY_QUERIES
    return SMALL_QUERIES.get(dtype, 0)


class CpuBackend:
    """Both kernels over one allocator.

    has_kernel: only where kernel_supports.
    """

    def __init__(
        self, allocator: SlabAllocator, num_heads: int, *, has_kernel: bool = True, batch_invariant: bool = False
    ) -> None:
        self.allocator = allocator
        self.name = "cpu_batch_invariant" if batch_invariant else "cpu"
        self._group = num_heads // allocator.fewest_kv_heads  # where layers differ, the most that one has to do
        self._takes_matrices = has_kernel and takes_matrices(allocator.layers, allocator.dtype)
        takes_all = batch_invariant or self._takes_matrices
        most_queries = ANY_QUERIES if takes_all else _small_queries(allocator.dtype)
        self._limits = SMALL_ROWS, SMALL_SPAN, most_queries
        self._has_kernel = has_kernel
        self._spans = Spans.of([])
        self._large: list[Span] = []
        self._stored: _Spans | None = None  # all, where kernels store them
        self._small: _Spans | None = None
        self._job = np.zeros(0, np.int64)  # of the small ones
        self._num_threads = 1

    def begin(self, spans: Spans) -> None:
        self._spans, self._large, self._stored, self._small = spans, [], None, None
        if not self._has_kernel:
            self._large = spans.each()
            return
        self._stored = self._gather(spans)
        is_small = self._stored.is_small
        if not is_small.all():
            self._large = list(compress(spans.each(), (~is_small).tolist()))
        if is_small.any():
            self._small = self._stored.small()
            self._job = self._small.job()
            self._num_threads = torch.get_num_threads() if self._small.work > ALONE else 1

    def _gather(self, spans: Spans) -> _Spans:
        from batchserve.attention.path_kernel import gather_spans

        slabs, count = self.allocator.slabs(spans.request_ids), len(spans)
        addresses = np.empty((self.allocator.num_layers, count, 2), np.int64)
        capacities, is_small = np.empty(count, np.int64), np.empty(count, np.bool_)
        size = (self._group, self.allocator.num_kv_heads, self._limits)
        work = gather_spans(slabs, spans.rows, *size, addresses, capacities, is_small)
        return _Spans(addresses, capacities, spans.rows, spans.parents, is_small, work)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        num_tokens, num_heads = query.shape[2], query.shape[1]
        self._store(layer, key, value)
        small, large = self._small, self._large
        out = query.new_zeros(num_tokens, num_heads, value.shape[-1], dtype=torch.float32 if small else None)
        if small is not None:
            self._attend_small(layer, query, key.shape[1], params, out)
        for span in large:
            keys, values = stored(self.allocator, span, layer)
            rows = slice(span.row_start, span.row_start + span.num_rows)
            if params.softcap is not None or params.sinks is not None:
                out[rows] = attend_span(query[0, :, rows], keys, values, self._bool_mask(span, params), params)
            else:
                out[rows] = self._sdpa(span, query[:, :, rows], keys, values, params)
        return out.to(query.dtype).unsqueeze(0)

    def _store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if self._stored is None:
            for span in self._spans:
                store(self.allocator, span, layer, key, value)
            return
        from batchserve.attention import path_kernel

        spans = self._stored
        keys, values = _token_major(key), _token_major(value)
        path_kernel.store_rows(keys, values, spans.addresses[layer], spans.capacities, spans.rows)

    def _attend_small(
        self, layer: int, query: torch.Tensor, num_kv_heads: int, params: AttentionParams, out: torch.Tensor
    ) -> None:
        from batchserve.attention import path_kernel as kernel

        assert self._small is not None
        rows = query[0].transpose(0, 1).to(torch.bfloat16 if self._takes_matrices else torch.float32).contiguous()
        group, job = rows.shape[1] // num_kv_heads, self._job.copy()
        job[kernel.NUM_TOKENS], job[kernel.NUM_HEADS], job[kernel.DIM] = rows.shape
        job[kernel.GROUP], job[kernel.WINDOW] = group, params.sliding_window or 0
        job.view(np.float32)[2 * kernel.SCALES : 2 * kernel.SCALES + 2] = params.scaling, params.softcap or 0.0
        job[kernel.QUERY], job[kernel.OUT] = rows.data_ptr(), out.data_ptr()
        sinks = None if params.sinks is None else params.sinks.detach().float().contiguous()
        job[kernel.SINKS] = 0 if sinks is None else sinks.data_ptr()
        job[kernel.ADDRESSES] += layer * self._small.addresses.strides[0]
        rows_at_once = max(1, PART_QUERIES // group) if self._takes_matrices else PART_ROWS
        job[kernel.PART_ROWS] = max(rows_at_once, -(-int(job[kernel.MOST_ROWS]) // MOST_PARTS))
        job[kernel.HEADS_AT_ONCE] = max(1, num_kv_heads * len(self._small.rows) // (TURNS * self._num_threads))
        openmp.run(self._loop(), job.ctypes.data, self._num_threads)

    def _loop(self) -> int:
        """The address of the compiled loop over what job() says."""
        from batchserve.attention import matrix_kernel, path_kernel

        if self._takes_matrices:
            return cast("int", matrix_kernel.attend_loop().address)
        element = np.uint16 if self.allocator.dtype == torch.bfloat16 else np.float32
        return cast("int", path_kernel.attend_loop(element).address)

    def _bool_mask(self, span: Span, params: AttentionParams) -> torch.Tensor:
        slot = ("bool", params.sliding_window)
        if slot not in span.cache:
            span.cache[slot] = torch.from_numpy(visible_keys(span, params.sliding_window))
        mask: torch.Tensor = span.cache[slot]
        return mask

    def _sdpa(
        self, span: Span, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """SDPA of one request with the GQA group folded into the query length; returns [n, num_heads, dim]."""
        num_kv_heads, n = keys.shape[0], span.num_rows
        start, mask = self._folded_mask(span, query, num_kv_heads, params.sliding_window)
        folded = query.reshape(1, num_kv_heads, -1, query.shape[-1])
        out = F.scaled_dot_product_attention(
            folded, keys[None, :, start:], values[None, :, start:], mask, scale=params.scaling
        )
        return out.reshape(query.shape[1], n, -1).transpose(0, 1)

    def _folded_mask(
        self, span: Span, query: torch.Tensor, num_kv_heads: int, sliding_window: int | None
    ) -> tuple[int, torch.Tensor | None]:
        """(first key that any row sees, additive mask [group * n, keys] or None where all rows see all keys)."""
        group = query.shape[1] // num_kv_heads
        slot = (group, sliding_window)
        if slot not in span.cache:
            start = 0
            if sliding_window is not None:
                start = max(0, min(span.context_len, int(span.positions[0]) - sliding_window + 1))
            if span.num_rows == 1:
                span.cache[slot] = (start, None)
            else:
                visible = torch.from_numpy(visible_keys(span, sliding_window)[:, start:])
                additive = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, float("-inf"))
                span.cache[slot] = (start, additive.repeat(group, 1))
        cached: tuple[int, torch.Tensor | None] = span.cache[slot]
        return cached


def _token_major(states: torch.Tensor) -> np.ndarray:
    """[1, heads, num_tokens, dim] as a contiguous array [num_tokens, heads, dim]; bfloat16 as its bits."""
    laid_out = states[0].transpose(0, 1).contiguous()
    array: np.ndarray = (laid_out.view(torch.uint16) if laid_out.dtype == torch.bfloat16 else laid_out).numpy()
    return array


def compile_kernels(layers: Sequence[LayerShape], dtype: torch.dtype) -> None:
    """Compile what serves such layers, or load it from the cache on disk, by attending once over one token."""
    dim = layers[0].key_dim
    allocator = SlabAllocator([LayerShape(1, layer.key_dim, layer.key_dim) for layer in layers], dtype, 64)
    allocator.reserve("warm-up", 1)
    backend = CpuBackend(allocator, 1)
    none = np.array([-1], dtype=np.int32)
    backend.begin(Spans.of([Span("warm-up", 0, 0, none, np.zeros(1, dtype=np.int64), is_chain=True)]))
    token = torch.ones(1, 1, 1, dim, dtype=dtype)
    backend.attend(0, token, token, token, AttentionParams(scaling=1.0))
