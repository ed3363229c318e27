"""(c) Attention of few rows a request, alone: what a graph loses because its query tile is that of its largest step.

An eager plan picks FlashInfer's query tile for the rows that the step's requests have on average. A graph's is picked
once, for a request that has all rows of the bucket but one for each other request: so the number of requests, padding
included, decides it. One layer, its K/V not in the caches of the device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from batchserve.attention.base import AttentionParams
from batchserve.attention.flashinfer import PAGE_SIZE, QUERY_TILE, WORKSPACE_BYTES
from batchserve.attention.tree_metadata import TreeKernel, TreeMetadata
from batchserve.kv.slot_kernels import WORD_BITS
from benchmarks.gpu.cases import Case, Step, make_step
from benchmarks.gpu.correctness import kernels, missing_module
from benchmarks.gpu.kit import Kit, Report, kernel_ms, tolerated
from benchmarks.gpu.models import SHAPES, shape_names
from benchmarks.gpu.modules import decode, is_ready, stock

# The most telling first.
CONTEXTS = (2048, 512, 8192)
BATCHES = (1, 16, 4)
ROWS = (1, 2, 4, 8)
LARGE_PAGE = 16
FEW = 4  # cells: both shapes with one request and with many, at the first context
MAX_NUM_SEQS = 32  # as in the other parts
CACHE_BYTES = 256 << 20  # several times what a device keeps of its memory at hand
MIN_CALLS = 4


def run(kit: Kit, report: Report, bandwidth: float, most: int | None = None) -> None:
    """The first `most` cells, or all that are missing."""
    contexts, batches = kit.pick(CONTEXTS, (64,)), kit.pick(BATCHES, (1, 4))
    for context, batch, shape in list(itertools.product(contexts, batches, shape_names(kit)))[:most]:
        name = f"small_q/{shape}/b{batch}/c{context}"
        report.cell(name, partial(measure, kit, bandwidth, shape, batch, context))
        kit.free()


def measure(kit: Kit, bandwidth: float, shape: str, batch: int, context: int) -> dict[str, Any]:
    """Microseconds by contender and rows of each request; query tiles; times of what a copy of the K/V would take."""
    dtype, heads = kit.pick(torch.bfloat16, torch.float32), heads_of(shape)
    num_bytes = 2 * batch * context * heads["kv_heads"] * heads["head_dim"] * dtype.itemsize
    floor_us = num_bytes / bandwidth * 1e6
    found: dict[str, Any] = {"kv_bytes": num_bytes, "copy_us": round(floor_us, 3), "us": {}, "tile": {}}
    for rows in kit.pick(ROWS, ROWS[:3]):
        case = Case("small q", (context,) * batch, (rows,) * batch, **heads)
        for each in (case, dataclasses.replace(case, page_size=LARGE_PAGE)):
            step = make_step(each, kit.device, dtype)
            caches = several(step, num_bytes)
            for name, kernel, metadata in contenders(kit, each, step.metadata, dtype):
                try:
                    us = call_us(kit, kernel, step.query, caches, metadata, each.params)
                except Exception as error:  # the others are to be measured
                    found.setdefault("failed", {})[name] = tolerated(error)
                    continue
                found["us"].setdefault(name, {})[str(rows)] = round(us, 3)
                tile = query_tile(kernel)
                if tile is not None:
                    found["tile"].setdefault(name, {})[str(rows)] = tile
    found["over_copy"] = {
        name: {rows: round(us / floor_us, 3) for rows, us in by_rows.items()} for name, by_rows in found["us"].items()
    }
    return found


def heads_of(shape: str) -> dict[str, int]:
    sizes = SHAPES[shape]
    heads = sizes["num_attention_heads"]
    return {
        "heads": heads,
        "kv_heads": sizes["num_key_value_heads"],
        "head_dim": sizes["hidden_size"] // heads,
    }


def contenders(
    kit: Kit, case: Case, metadata: TreeMetadata, dtype: torch.dtype
) -> Iterator[tuple[str, TreeKernel, TreeMetadata]]:
    """Name, kernel and what it is told of the step. Every kernel is new: FlashInfer's keep the buffers of a graph.

    `graph` is as the engine captures the bucket; `graph, all` has all requests in it, `graph, fitting` those that there
    are, and `graph, tile of one row` as many as it has rows, so that the tile is the smallest. Where two of them have
    the same number of requests, the first of their names stands for both. Of larger pages, which the engine does not
    have, there are eager steps of FlashInfer's.
    """
    total = metadata.num_rows
    trees = dataclasses.replace(metadata, is_causal=False)  # also of single rows, and of trees that happen to be chains
    graphs: dict[int, str] = {}
    for name, requests in (
        ("graph", min(total, MAX_NUM_SEQS)),
        ("graph, all", MAX_NUM_SEQS),
        ("graph, fitting", len(case.contexts)),
        ("graph, tile of one row", total),
    ):
        graphs.setdefault(requests, name)
    tree_case = dataclasses.replace(case, rows=(2,))  # whatever the rows, the kernel is that of trees
    makers = kernels(kit)
    for kernel_name, make in makers.items():
        if missing_module(kit, kernel_name, tree_case, dtype) is not None:
            continue
        if case.page_size > 1:
            if kernel_name.startswith("flashinfer"):
                yield f"{kernel_name}, eager, pages of {case.page_size}", make(case, dtype), trees
            continue
        yield f"{kernel_name}, eager", make(case, dtype), trees
        for requests, name in graphs.items():
            if name == "graph" or kernel_name.startswith("flashinfer"):
                yield f"{kernel_name}, {name}", make(case, dtype), as_graph(trees, requests)
    if "flashinfer_custom" not in makers or case.page_size > 1:
        return
    chains = dataclasses.replace(metadata, is_causal=True)
    if is_ready(kit, stock(case.head_dim, dtype)):
        yield "flashinfer causal, eager", makers["flashinfer_custom"](case, dtype), chains
        yield "flashinfer decode on tensor cores, eager", DecodeKernel(case, kit.device, dtype, True), chains
    if case.rows[0] == 1 and is_ready(kit, decode(case.head_dim, dtype)):
        yield "flashinfer decode, eager", DecodeKernel(case, kit.device, dtype, False), chains


def as_graph(metadata: TreeMetadata, num_requests: int) -> TreeMetadata:
    """The step in a bucket of its rows and so many requests: as static_step.StaticStep pads it."""
    missing = num_requests - metadata.num_requests
    longest = int(metadata.kv_lens_cpu.max())
    words = -(-metadata.num_rows // WORD_BITS)

    def longer(indptr: torch.Tensor) -> torch.Tensor:
        return torch.cat([indptr, indptr[-1:].expand(missing)])

    # As long as the requests' could be.
    indices = metadata.kv_indices.new_zeros(num_requests * longest)
    indices[: len(metadata.kv_indices)] = metadata.kv_indices
    return dataclasses.replace(
        metadata,
        qo_indptr=longer(metadata.qo_indptr),
        kv_indptr=longer(metadata.kv_indptr),
        kv_indices=indices,
        ancestors=torch.nn.functional.pad(metadata.ancestors, (0, words - metadata.ancestors.shape[1])),
        qo_indptr_cpu=longer(metadata.qo_indptr_cpu),
        kv_indptr_cpu=longer(metadata.kv_indptr_cpu),
        kv_lens_cpu=torch.nn.functional.pad(metadata.kv_lens_cpu, (0, missing)),
        max_rows=metadata.num_rows,
        is_causal=False,
        bucket=metadata.num_rows,
        max_kv_len=longest,
    )


class DecodeKernel(TreeKernel):
    """FlashInfer's decode wrapper as a TreeKernel; every request has a chain of equally many rows.

    With tensor cores it is the stock prefill module, otherwise a module of its own, for one row only.
    """

    name = "flashinfer_decode"
    can_be_captured = False  # not as it is used here

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype, has_tensor_cores: bool) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self._case, self._dtype = case, dtype
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=has_tensor_cores, backend="fa2"
        )

    def plan(self, metadata: TreeMetadata) -> None:
        case = self._case
        self._wrapper.plan(
            indptr=metadata.kv_indptr_cpu,
            indices=metadata.kv_indices,
            last_page_len=torch.ones(metadata.num_requests, dtype=torch.int32),
            num_qo_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            page_size=PAGE_SIZE,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=case.params.scaling,
            seq_lens=metadata.kv_lens_cpu,
            q_len_per_req=case.rows[0],
        )

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: TreeMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        out: torch.Tensor = self._wrapper.run(query, (key_cache.unsqueeze(1), value_cache.unsqueeze(1)))
        return out


def several(step: Step, num_bytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V so often that together they are more than the device keeps at hand: as the layers of a model are."""
    first = step.key_cache, step.value_cache
    count = 1 if step.query.device.type == "cpu" else -(-CACHE_BYTES // num_bytes)
    return [first, *((first[0].clone(), first[1].clone()) for _ in range(count - 1))]


def call_us(
    kit: Kit,
    kernel: TreeKernel,
    query: torch.Tensor,
    caches: list[tuple[torch.Tensor, torch.Tensor]],
    metadata: TreeMetadata,
    params: AttentionParams,
) -> float:
    """Microseconds of one layer on the device."""
    layers = itertools.cycle(caches)
    kernel.plan(metadata)

    def attend() -> torch.Tensor:
        return kernel.run(query, *next(layers), metadata, params)

    return kernel_ms(kit, attend, repeats=max(MIN_CALLS, len(caches))) * 1e3


def query_tile(kernel: Any) -> int | None:
    """Rows times heads of a K/V head that one program of FlashInfer's takes, from its plan; None of other kernels."""
    eager = [each.wrapper for each in getattr(kernel, "_wrappers", {}).values()]
    graphs = [each.wrapper for kinds in getattr(kernel, "_graph_wrappers", {}).values() for each in kinds.values()]
    plans = [wrapper._plan_info for wrapper in [*eager, *graphs]]
    return int(plans[0][QUERY_TILE]) if plans else None
