"""(a) The engine's own graphs of one attention layer, replayed over ragged steps, against torch's kernel and no graph.

Everything is as in the engine: slots and their table, buckets, plans, buffers that take turns. The model is a layer
that looks its queries, keys and values up by token and gives attention's output for logits. Keys of a step's rows, and
those at the ends of a context, weigh as much as all others: a wrong mask, slot or length shows.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from batchserve.attention.base import AttentionParams, LayerShape
from batchserve.attention.paged import PagedBackend
from batchserve.attention.torch_paged import TorchKernel
from batchserve.attention.tree_metadata import TreeKernel
from batchserve.kv.slots import SlotAllocator
from batchserve.request import GREEDY
from batchserve.runner.cuda_graphs import Capturer, CudaCapturer, StepGraphs
from batchserve.runner.ragged_batch import RaggedBatch, RequestRows, build_batch
from batchserve.sampling.recordings import Recordings
from benchmarks.gpu.cases import Case, compare, random_parents
from benchmarks.gpu.kit import Kit

VOCAB = 512
MAX_NUM_SEQS = 8
STEPS = 24


@dataclass(frozen=True, slots=True)
class Layer:
    """tables: of queries, keys and values, each [VOCAB, heads, head_dim]."""

    backend: PagedBackend
    tables: list[torch.Tensor]
    params: AttentionParams
    heavy: float

    @classmethod
    def of(cls, case: Case, backend: PagedBackend, dtype: torch.dtype) -> Layer:
        generator = torch.Generator(backend.device).manual_seed(0)
        tables = [
            torch.randn(VOCAB, heads, case.head_dim, generator=generator, device=backend.device).to(dtype)
            for heads in (case.heads, case.kv_heads, case.kv_heads)
        ]
        for cache in backend.caches[0]:
            cache.normal_(generator=generator)
        heavy = math.log(max(case.contexts)) / (4.0 * case.params.scaling)
        tables[0][..., 0], tables[1][..., 0] = 4.0, heavy
        return cls(backend, tables, case.params, heavy)

    def begin_context(self, slots: np.ndarray) -> None:
        """These are a context's from now on."""
        keys, places = self.backend.caches[0][0], torch.from_numpy(slots.astype(np.int64)).to(self.backend.device)
        keys[places, :, 0] = 0.0
        keys[places[[0, -1]], :, 0] = self.heavy

    def __call__(self, ids: torch.Tensor, position_ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """ModelRunner's: int64 [num_rows], int64 [num_rows], int64 [num_logits] -> [num_logits, heads * head_dim]"""
        query, key, value = (table[ids].transpose(0, 1).unsqueeze(0) for table in self.tables)
        out = self.backend.attend(0, query, key, value, self.params)
        return out[0].flatten(1)[keep]


def check_replays(kit: Kit, kernel: TreeKernel, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`case` says heads, window and soft cap; contexts are up to its longest, rows up to a bucket's most."""
    longest, most_rows = max(case.contexts), max(case.rows)
    allocator = SlotAllocator(MAX_NUM_SEQS * (longest + most_rows), MAX_NUM_SEQS, longest + most_rows, 1)
    shape = LayerShape(case.kv_heads, case.head_dim, case.head_dim)
    backend = PagedBackend([shape], dtype, kit.device, kernel, allocator)
    layer = Layer.of(case, backend, dtype)
    graphs = StepGraphs(
        backend,
        layer,
        _capturer(kit),
        max_rows=most_rows,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=longest + most_rows,
        say=lambda line: kit.beat(),
    )
    rng, results, buckets = random.Random(0), [], set()
    for number in range(kit.pick(STEPS, 6)):
        kit.beat()
        batch = _random_step(rng, layer, allocator, number, longest, most_rows)
        queued = graphs.launch(batch, Recordings())
        if queued is None:
            raise RuntimeError(f"no graph has room for {batch.num_rows} rows")
        buckets.add(graphs._bucket_for(batch))
        count = sum(1 + rows.num_draft_tokens for rows in batch.requests if rows.sampling is not None)
        queued.wait()
        found = queued._logits[:count].clone()
        results.append(compare(found, _eager(layer, batch)[:count], dtype))
        for rows in batch.requests:
            allocator.release(rows.request_id)
    return {
        "is_right": all(found["is_right"] for found in results),
        "max_error": max(found["max_error"] for found in results),  # type: ignore[type-var]
        "steps": len(results),
        "buckets": len(buckets),
    }


def _capturer(kit: Kit) -> Capturer:
    if not kit.is_dry:
        return CudaCapturer()
    from tests.graphs import RerunCapturer

    return RerunCapturer()


def _random_step(
    rng: random.Random, layer: Layer, allocator: SlotAllocator, number: int, longest: int, most_rows: int
) -> RaggedBatch:
    """Trees, plain rows and prompts of some requests; few rows as often as many."""
    rows_left = rng.choice([rng.randint(1, min(16, most_rows)), rng.randint(1, most_rows)])
    requests = []
    for place in range(rng.randint(1, min(MAX_NUM_SEQS, rows_left))):
        name, context = f"{number}-{place}", rng.choice([0, rng.randint(0, longest // 8), rng.randint(0, longest)])
        others = MAX_NUM_SEQS - place - 1  # a row for each that may come
        count = rng.choice([1, rng.randint(1, max(1, rows_left - others))])
        rows_left -= count
        is_prompt = rng.random() < 0.2
        parents = list(range(-1, count - 1)) if is_prompt else [-1, *(p + 1 for p in random_parents(rng, count - 1))]
        if not allocator.reserve(name, context + count):
            raise RuntimeError(f"no slots for {context + count} tokens")
        allocator.commit(name, range(context))
        if context:
            layer.begin_context(allocator.slots(name)[:context])
        token_ids = [rng.randrange(VOCAB) for _ in range(count)]
        num_pending = count if is_prompt else 1
        requests.append(RequestRows(name, context, token_ids, parents, num_pending, GREEDY))
        if rows_left < 1:
            break
    return build_batch(requests)


@torch.inference_mode()
def _eager(layer: Layer, batch: RaggedBatch) -> torch.Tensor:
    """The same step over the same slots, whose K/V is written again, by the reference in fp32."""
    backend = layer.backend
    kernel, backend.kernel = backend.kernel, _Exact()
    try:
        backend.begin(batch.spans)
        arrays = batch.input_ids[: batch.num_rows], batch.position_ids[: batch.num_rows], batch.logit_rows
        return layer(*(torch.from_numpy(array).to(backend.device) for array in arrays))
    finally:
        backend.kernel = kernel


class _Exact(TorchKernel):
    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: Any,
        params: AttentionParams,
    ) -> torch.Tensor:
        return super().run(query.float(), key_cache.float(), value_cache.float(), metadata, params)
