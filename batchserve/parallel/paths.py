"""K and V of accepted paths, on their way from the rank that has computed them to the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchserve.kv.slab import SlabAllocator
    from batchserve.runner.ragged_batch import RaggedBatch
    from batchserve.sampling.verify import StepTokens


def gather_paths(allocator: SlabAllocator, batch: RaggedBatch, tokens: StepTokens) -> dict[int, bytes]:
    """Moves each request's accepted rows to right after its pending ones; returns their K and V, by place."""
    paths = {}
    for place, count in enumerate(tokens.num_accepted.tolist()):
        if count > 0:
            start, name, pending = int(tokens.starts[place]), batch.request_ids[place], int(batch.num_pending[place])
            rows = tokens.rows[start : start + count].tolist()
            allocator.move_rows(name, pending, rows)
            paths[place] = allocator.read_rows(name, pending, count)
    return paths
