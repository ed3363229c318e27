"""Divides a step's draft trees by branches over ranks (Lookahead Decoding, section 3.4)."""

# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from batchserve.draft.forest import DraftForest
from batchserve.native.jit import njit
from batchserve.runner.ragged_batch import RaggedBatch, flatten
from batchserve.runner.row_layout import ALL, SAMPLED

if TYPE_CHECKING:
    from collections.abc import Collection


class Share(NamedTuple):
    """One rank's part of a step.

    batch: all requests at their places, each with its pending rows and some branches of its tree. nodes int64: of each
    of its tree rows, the place in the whole tree; starts int64 [num_requests + 1]: where each request's part of it is.
    """

    batch: RaggedBatch
    nodes: np.ndarray
    starts: np.ndarray

    def whole_row(self, place: int, row: int, num_pending: int) -> int:
        """Returns the row in the whole step, counted inside of its request, of a row that is counted so here."""
        return row if row < num_pending else num_pending + int(self.nodes[self.starts[place] + row - num_pending])


@njit(cache=True, nogil=True)
def _assign(starts, parents, is_divided, num_ranks):  # type: ignore[no-untyped-def]
    """Returns the rank of every node, int64 [num_nodes]: whole branches, the largest first, to whom has least.

    A branch is a child of a tree's root with all that hangs from it. Trees that are not divided are rank 0's.
    """
    owners = np.zeros(starts[-1], np.int64)
    branches = np.empty(starts[-1], np.int64)  # of each node, the first node of its branch
    sizes = np.zeros(starts[-1], np.int64)
    loads = np.zeros(num_ranks, np.int64)
    for tree in range(len(starts) - 1):
        for node in range(starts[tree], starts[tree + 1]):
            branches[node] = node if parents[node] < 0 else branches[starts[tree] + parents[node]]
            if is_divided[tree]:
                sizes[branches[node]] += 1
            else:
                loads[0] += 1
    for branch in np.argsort(-sizes, kind="mergesort"):
        if sizes[branch] == 0:
            break
        owners[branch] = np.argmin(loads)
        loads[owners[branch]] += sizes[branch]
    for tree in range(len(starts) - 1):
        if is_divided[tree]:
            for node in range(starts[tree], starts[tree + 1]):
                owners[node] = owners[branches[node]]
    return owners


def divide(batch: RaggedBatch, num_ranks: int, undivided: Collection[int] = ()) -> list[Share]:
    """Returns the share of each rank. undivided: places of requests whose trees are rank 0's.

    Every rank computes all pending rows, whose K/V it needs from then on. A request is sampled by the ranks that have
    rows of its tree, and by rank 0 if it has none. Prompts' log probabilities are rank 0's.
    """
    count = len(batch.request_ids)
    sizes = batch.spans.rows[:, 1]
    places = np.repeat(np.arange(count), sizes)
    inside = np.arange(batch.num_rows) - np.repeat(batch.spans.rows[:, 0], sizes)
    is_node = inside >= batch.num_pending[places]
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes - batch.num_pending)))
    rows = np.flatnonzero(is_node)
    parents = batch.spans.parents[rows] - batch.num_pending[places[rows]]  # in the tree; below 0: of its root
    is_divided = np.ones(count, np.bool_)
    is_divided[[*undivided]] = False
    owners = _assign(starts, parents, is_divided, num_ranks)
    pending = batch.input_ids[: batch.num_rows][~is_node]
    is_sampled = batch.first_logit >= 0
    shares = []
    for rank in range(num_ranks):
        is_own = owners == rank
        before = np.concatenate((np.zeros(1, np.int64), np.cumsum(is_own)))
        own_starts, own = before[starts], np.flatnonzero(is_own)
        tree_of = places[rows[own]]
        own_parents = np.where(
            parents[own] < 0, -1, before[np.maximum(parents[own], 0) + starts[tree_of]] - own_starts[tree_of]
        )
        has_nodes = np.diff(own_starts) > 0
        takes_part = is_sampled & (has_nodes | ((rank == 0) & ((np.diff(starts) == 0) | ~is_divided)))
        kinds = np.where(takes_part, SAMPLED, 0)
        if rank == 0:
            kinds[[*batch.prompts]] |= ALL
        heads = np.stack((batch.spans.rows[:, 2], batch.num_pending, kinds), axis=1)
        samplings = [each if part else None for each, part in zip(batch.samplings, takes_part.tolist(), strict=True)]
        trees = DraftForest(
            own_starts,
            batch.input_ids[rows[own]],
            own_parents,
            np.ones(len(own)),
            batch.is_verified[rows[own]],
        )
        part = flatten(batch.request_ids, samplings, heads, pending, trees)
        if rank == 0:
            part = replace(part, adjustments=batch.adjustments, prompts=batch.prompts)
        shares.append(Share(part, own - starts[tree_of], own_starts))
    return shares


def compile_kernels() -> None:
    """Compiles _assign, or loads it from the cache on disk."""
    _assign(np.array([0, 1]), np.array([-1]), np.ones(1, np.bool_), 1)
