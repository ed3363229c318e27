"""What the GPU kit times of attention of few rows: on a CPU, with FlashInfer's wrappers replaced, all say the same."""

from __future__ import annotations

import dataclasses
import inspect
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from batchserve.attention.base import AttentionParams
from batchserve.attention.flashinfer import QUERY_TILE
from batchserve.attention.torch_paged import TorchKernel
from batchserve.attention.torch_reference import attend_span
from benchmarks.gpu import small_q
from benchmarks.gpu.cases import Case, make_step, reference
from benchmarks.gpu.kit import Kit
from tests.attention import test_flashinfer as fakes

flashinfer = fakes.flashinfer
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"heads": fakes.NUM_HEADS, "kv_heads": 2, "head_dim": 64}


@pytest.mark.parametrize("num_requests", [3, 8, 32])
def test_a_padded_step_is_the_same_step(num_requests: int) -> None:
    case = Case("padded", (30, 9, 70), (4, 4, 4), **SIZES)
    step = make_step(case, CPU, torch.float32)
    padded = small_q.as_graph(step.metadata, num_requests)
    assert (padded.num_requests, padded.num_rows, padded.bucket, padded.max_rows) == (num_requests, 12, 12, 12)
    assert len(padded.kv_indices) == num_requests * 74
    out = TorchKernel().run(step.query, step.key_cache, step.value_cache, padded, case.params)
    assert torch.equal(out, reference(step, case.params))


class FakeDecode:
    """FlashInfer's decode wrapper: takes what the installed one takes, and is causal attention."""

    real: type

    def __init__(self, *args: Any, **options: Any) -> None:
        self._bound("__init__", *args, **options)

    def _bound(self, method: str, *args: Any, **options: Any) -> dict[str, Any]:
        return inspect.signature(inspect.unwrap(getattr(self.real, method))).bind(self, *args, **options).arguments

    def plan(self, **options: Any) -> None:
        self.given = self._bound("_plan_impl", **options)  # plan() itself takes anything

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        self._bound("run", q, caches)
        given, out = self.given, torch.zeros_like(q)
        kv, rows = given["indptr"].tolist(), given["q_len_per_req"]
        for i, (start, end) in enumerate(pairwise(kv)):
            keys, values = (cache[given["indices"][start:end].long(), 0].transpose(0, 1) for cache in caches)
            mask = torch.ones(rows, end - start, dtype=torch.bool).tril(end - start - rows)
            mine = slice(i * rows, (i + 1) * rows)
            params = AttentionParams(given["sm_scale"])
            out[mine] = attend_span(q[mine].transpose(0, 1), keys, values, mask, params)
        return out


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_contender_attends_to_the_same_step(
    flashinfer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: int
) -> None:
    makers = {
        f"flashinfer_{mask}": lambda case, dtype, mask=mask: fakes.make_kernel(flashinfer, mask, [])
        for mask in ("tree", "custom")
    }
    real = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    monkeypatch.setattr(flashinfer, "BatchDecodeWithPagedKVCacheWrapper", type("Fake", (FakeDecode,), {"real": real}))
    monkeypatch.setattr(small_q, "kernels", lambda kit: {**makers, "triton": lambda case, dtype: TorchKernel()})
    monkeypatch.setattr(small_q, "missing_module", lambda *args: None)
    monkeypatch.setattr(small_q, "is_ready", lambda *args: True)
    kit, case = Kit(True, tmp_path), Case("contenders", (40, 17, 3), (rows,) * 3, **SIZES)
    trees = make_step(case, CPU, torch.bfloat16)
    chains = make_step(dataclasses.replace(case, rows=(-rows,) * 3), CPU, torch.bfloat16)
    found: dict[str, int | None] = {}
    for name, kernel, metadata in small_q.contenders(kit, case, trees.metadata, torch.bfloat16):
        step = trees
        if metadata.is_causal:  # those are told of the same step, which is only timed: here it has to be one of chains
            step, metadata = chains, chains.metadata
        kernel.plan(metadata)
        out = kernel.run(step.query, step.key_cache, step.value_cache, metadata, case.params)
        torch.testing.assert_close(out, reference(step, case.params).bfloat16(), rtol=0.02, atol=0.02)
        found[name] = small_q.query_tile(kernel)
    # As many requests as rows, and as fit, are as many as the engine has in its graph.
    graphs = ["graph", "graph, all"] if rows == 1 else ["graph", "graph, all", "graph, fitting"]
    names = [f"flashinfer_{mask}, {way}" for mask in ("tree", "custom") for way in ("eager", *graphs)]
    names += ["triton, eager", "triton, graph", "flashinfer causal, eager"]
    names += ["flashinfer decode on tensor cores, eager", *(["flashinfer decode, eager"] if rows == 1 else [])]
    assert list(found) == names
    with_tile = [name for name in names if "triton" not in name and "decode" not in name]
    assert found == {name: fakes.PLANNED_TILE if name in with_tile else None for name in names}


def test_the_tile_is_where_flashinfers_plan_has_it(flashinfer: Any) -> None:
    header = Path(flashinfer.__file__).parent / "data/include/flashinfer/attention/scheduler.cuh"
    plan_info = header.read_text().split("struct PrefillPlanInfo", 1)[1]
    listed = re.search(r"ToVector\(\) const \{\s*return \{(.*?)\};", plan_info, re.DOTALL)
    assert listed is not None
    assert [name.strip() for name in listed[1].split(",")][QUERY_TILE] == "cta_tile_q"
