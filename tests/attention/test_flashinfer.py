"""The FlashInfer kernel without a GPU: its calls against the real signatures, and what they ask for against torch.

The stand-in for FlashInfer's wrapper takes what the real one takes (its signatures are the installed package's), and
does with it what the real kernels are documented to do, trap included.
"""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import gc
import inspect
import platform
import random
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata as packages
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from batchserve.attention import flashinfer as kernels
from batchserve.attention import flashinfer_mask
from batchserve.attention.base import AttentionParams, LayerShape
from batchserve.attention.flashinfer import (
    QUERY_TILE,
    VERSIONS,
    FlashInferKernel,
    load_wrapper,
)
from batchserve.attention.flashinfer_front import MIN_KEY_BLOCK, min_key_block, new_rows_first
from batchserve.attention.flashinfer_mask import packed_mask
from batchserve.attention.flashinfer_variant import (
    FRONT_SCALARS,
    SCALARS,
    TENSORS,
    variant_arguments,
    variant_run_arguments,
)
from batchserve.attention.mask import visible_keys
from batchserve.attention.paged import PagedBackend, step_arrays
from batchserve.attention.static_step import StaticStep
from batchserve.attention.step_buffer import StepLayout
from batchserve.attention.torch_paged import TorchKernel
from batchserve.attention.torch_reference import attend_span
from batchserve.attention.tree_metadata import TreeMetadata
from batchserve.errors import ConfigError, UnsupportedModelError
from batchserve.kv.slots import SlotAllocator
from benchmarks.gpu.cases import Case, compare, make_step, reference
from benchmarks.gpu.pages import PagedKernel
from tests.attention.test_paged import Recording, make_spans, random_step, reserved
from tests.factories import examples

CPU = torch.device("cpu")
LAYERS = [LayerShape(2, 64, 64)]
NUM_HEADS = 6
CHUNK = 128  # keys, at least, that FlashInfer splits a request's into
PLANNED_TILE = 16  # the stand-ins' query tile


@pytest.fixture(scope="module")
def flashinfer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The installed package, which would look for a GPU and write to the home folder otherwise."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("FlashInfer is for Linux")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path_factory.mktemp("flashinfer")))
        patch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        import flashinfer

        yield flashinfer


class FakeWrapper:
    """BatchPrefillWithPagedKVCacheWrapper in torch."""

    def __init__(self, real: type, jit_args: list[Any] | None, workspace: torch.Tensor, needed: int = 0) -> None:
        self.real, self.jit_args, self.needed = real, jit_args, needed
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = torch.empty(8, dtype=torch.uint8)
        self._mask_indptr_buf: torch.Tensor | None = None
        self._plan_info = [*range(QUERY_TILE), PLANNED_TILE, *range(QUERY_TILE + 1, 15)]
        self.plans: list[dict[str, Any]] = []

    def _bound(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = inspect.signature(inspect.unwrap(getattr(self.real, method))).bind(self, *args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def workspace_size(self, **kwargs: Any) -> tuple[int, int]:
        self._bound("workspace_size", **kwargs)
        return self.needed, 16

    def reset_workspace_buffer(self, *buffers: torch.Tensor) -> None:
        self._bound("reset_workspace_buffer", *buffers)
        self._float_workspace_buffer, self._int_workspace_buffer = buffers

    def plan(self, **kwargs: Any) -> None:
        plan = self._bound("plan", **kwargs)
        assert len(self._float_workspace_buffer) >= self.needed, "the workspace overflows"
        for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"):
            assert plan[name].dtype == torch.int32, name
        rows, pages = plan["qo_indptr"].diff(), plan["paged_kv_indptr"].diff()
        kv_lens = (pages - 1) * plan["page_size"] + plan["paged_kv_last_page_len"]
        assert torch.equal(plan["seq_lens"], torch.where(pages > 0, kv_lens, 0))
        assert plan["max_token_per_sequence"] == rows.max()
        self._mask_indptr_buf = None
        if plan["packed_custom_mask"] is not None:  # in bits, as the real one leaves it
            self._mask_indptr_buf = torch.cat([torch.zeros(1), (rows * kv_lens).cumsum(0)]).int()
        self.plans.append(plan)

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], *more: Any) -> torch.Tensor:
        self._bound("run", q, caches, *more)
        plan = self.plans[-1]
        qo, kv = plan["qo_indptr"].tolist(), plan["paged_kv_indptr"].tolist()
        assert len(q) == qo[-1]
        assert (*q.shape[1:], q.dtype) == (plan["num_qo_heads"], plan["head_dim_qk"], plan["q_data_type"])
        assert q.is_contiguous()
        assert caches[0].shape[1:] == (plan["page_size"], plan["num_kv_heads"], plan["head_dim_qk"])
        out = q.new_zeros(*q.shape[:2], plan["head_dim_vo"])
        for i in range(len(qo) - 1):
            pages, rows = plan["paged_kv_indices"][kv[i] : kv[i + 1]].long(), slice(qo[i], qo[i + 1])
            kv_len = max(0, (len(pages) - 1) * plan["page_size"] + int(plan["paged_kv_last_page_len"][i]))
            keys, values = (cache[pages].flatten(0, 1)[:kv_len].transpose(0, 1) for cache in caches)
            if self.jit_args is None:
                mask, params = self._stock_mask(i, qo[i + 1] - qo[i], kv_len), self._stock_params()
            else:
                given = dict(zip([*self.jit_args[7], *self.jit_args[9]], more, strict=True))
                qo_len, is_front = qo[i + 1] - qo[i], "front" in self.jit_args[0]
                mask = literal_variant(given, qo[i], qo_len, kv_len, is_front)
                assert is_front or plan["packed_custom_mask"] is not None, "it would be asked about the last keys only"
                if is_front:
                    assert given["query_tile"] == self._plan_info[QUERY_TILE]
                    group = plan["num_qo_heads"] // plan["num_kv_heads"]
                    assert not mistakes(qo_len, kv_len, given["query_tile"], group)
                    asked = asked_about(qo_len, kv_len, given["query_tile"], group)
                    mask = mask if plan["packed_custom_mask"] is not None else mask | ~asked
                    # Summed in the order of all others, so that it comes to the same bits.
                    natural = np.argsort(front_places(qo_len, kv_len))
                    keys, values, mask = keys[:, natural], values[:, natural], mask[:, natural]
                params = AttentionParams(given["sm_scale"], softcap=given["softcap"] or None)
            out[rows] = attend_span(q[rows].transpose(0, 1), keys, values, mask, params)
        return out

    def _stock_params(self) -> AttentionParams:
        return AttentionParams(self.plans[-1]["sm_scale"], softcap=self.plans[-1]["logits_soft_cap"])

    def _stock_mask(self, request: int, qo_len: int, kv_len: int) -> torch.Tensor:
        plan = self.plans[-1]
        row, key = torch.arange(qo_len)[:, None], torch.arange(kv_len)[None, :]
        mask = torch.ones(qo_len, kv_len, dtype=torch.bool)
        if plan["packed_custom_mask"] is not None:
            assert self._mask_indptr_buf is not None
            bit = row * kv_len + key
            packed = plan["packed_custom_mask"][int(self._mask_indptr_buf[request]) :]
            mask = (packed[bit // 8] >> (bit % 8).to(torch.uint8)) & 1 > 0
        elif plan["causal"]:
            mask = key <= kv_len - qo_len + row
        if plan["window_left"] >= 0:
            mask = mask & (key + qo_len + plan["window_left"] >= kv_len + row)
        return mask


def front_places(qo_len: int, kv_len: int) -> np.ndarray:
    """Where a request's keys are otherwise, of those that begin with the step's own rows."""
    return np.roll(np.arange(kv_len), qo_len)


def told(qo_len: int, kv_len: int, query_tile: int, group: int, tile: int) -> tuple[int, int]:
    """The variant's qo_len and window_left for one query tile, where a step's own rows come first."""
    return min(qo_len, -(-(tile + 1) * query_tile // group)), kv_len - 1


def asked_about(
    qo_len: int, kv_len: int, query_tile: int, group: int, chunk: int = CHUNK, block: int = MIN_KEY_BLOCK
) -> torch.Tensor:
    """Which rows FlashInfer's kernel asks its variant about which keys for, if it has no mask (prefill.cuh).

    A row's heads may lie in two tiles: what neither of them is asked about is not asked about.
    """
    asked = np.ones((qo_len, kv_len), np.bool_)
    for tile in range(-(-qo_len * group // query_tile)):
        first, behind = tile * query_tile // group, -(-(tile + 1) * query_tile // group)
        told_rows, left = told(qo_len, kv_len, query_tile, group, tile)
        for start in range(0, kv_len, chunk):
            end = min(start + chunk, kv_len)
            in_window = -(-max(0, kv_len + behind - told_rows - left - start) // block)
            for i, begin in enumerate(range(start, end, block)):
                if in_window <= i < (end - start) // block:
                    asked[first:behind, begin : min(begin + block, end)] = False
    return torch.from_numpy(asked)


def mistakes(qo_len: int, kv_len: int, query_tile: int, group: int, chunk: int = CHUNK) -> set[str]:
    """What FlashInfer's kernel does wrong by what the variant tells it, whatever it is asked about (prefill.cuh)."""
    found = set()
    for tile in range(-(-qo_len * group // query_tile)):
        first, behind = tile * query_tile // group, -(-(tile + 1) * query_tile // group)
        told_rows, left = told(qo_len, kv_len, query_tile, group, tile)
        if kv_len + first > told_rows + left:
            found.add("keys are skipped")
        if min(told_rows, behind) != min(qo_len, behind):
            found.add("rows are not written")
        # Where each chunk's results are written goes by the window, too; the plan knows of none.
        if -(-min(kv_len, left + query_tile) // chunk) != -(-kv_len // chunk):
            found.add("results are written over others")
    return found


@examples(200)
@given(
    qo_len=st.integers(1, 128),
    context=st.integers(0, 600),
    query_tile=st.sampled_from([16, 64, 128]),
    group=st.sampled_from([1, 2, 3, 4, 7, 8]),
    chunk=st.sampled_from([128, 256, 10_000]),
    block=st.sampled_from([64, 128]),
)
def test_the_kernel_asks_about_the_rows_that_come_first_and_few_other_keys(
    qo_len: int, context: int, query_tile: int, group: int, chunk: int, block: int
) -> None:
    qo_len = min(qo_len, block)
    kv_len = qo_len + context
    assert mistakes(qo_len, kv_len, query_tile, group, chunk) == set()
    asked = asked_about(qo_len, kv_len, query_tile, group, chunk, block)
    assert asked[:, :qo_len].all()
    # The rest: what a first block has, one more for each that a query tile's rows reach into, and each chunk's last.
    most = block * (1 + -(-(query_tile // group + 2) // block)) + block * -(-kv_len // chunk)
    assert int(asked.sum(1).max()) <= most


def test_the_kernel_does_not_ask_about_more_rows_than_a_block_of_keys() -> None:
    assert not asked_about(80, 400, query_tile=16, group=1, block=64)[:, :80].all()


@examples(200)
@given(
    qo_len=st.integers(1, 600),
    context=st.integers(0, 600),
    query_tile=st.sampled_from([16, 64, 128]),
    group=st.sampled_from([1, 4, 7]),
    chunk=st.sampled_from([128, 384]),
)
def test_of_more_rows_no_key_is_skipped_and_no_result_written_over_another(
    qo_len: int, context: int, query_tile: int, group: int, chunk: int
) -> None:
    """They have a mask; the kernel goes by the variant's window all the same."""
    assert mistakes(qo_len, qo_len + context, query_tile, group, chunk) == set()


@pytest.mark.parametrize(
    ("rows", "left", "mistake"),
    [
        (40, 390, "keys are skipped"),
        (15, 400, "rows are not written"),
        (40, 360, "results are written over others"),  # a window that begins at the first key of the first tile
    ],
)
def test_a_kernel_that_is_told_otherwise_makes_mistakes(
    monkeypatch: pytest.MonkeyPatch, rows: int, left: int, mistake: str
) -> None:
    monkeypatch.setitem(globals(), "told", lambda *_: (rows, left))
    assert mistake in mistakes(40, 400, query_tile=16, group=1)


@examples(60)
@given(st.integers(0, 2**32))
def test_a_requests_own_rows_are_put_before_its_context(seed: int) -> None:
    spans, allocator, _ = random_step(seed)
    kernel = Recording()
    PagedBackend(LAYERS, torch.bfloat16, CPU, kernel, allocator).begin(spans)
    metadata = kernel.planned[0]
    behind = torch.cat([metadata.kv_indices, torch.full((7,), 99, dtype=torch.int32)])  # a graph's buffer is longer
    found = new_rows_first(metadata.qo_indptr, metadata.kv_indptr, behind)
    expected = [
        metadata.kv_indices[begin:end][front_places(rows, end - begin)]
        for begin, end, rows in zip(
            metadata.kv_indptr_cpu.tolist(),
            metadata.kv_indptr_cpu[1:].tolist(),
            metadata.qo_indptr_cpu.diff().tolist(),
            strict=False,
        )
    ]
    assert found.dtype == torch.int32
    assert torch.equal(found[: len(metadata.kv_indices)], torch.cat(expected))


@pytest.mark.parametrize(
    ("of_sm", "of_block", "blocks"),
    [
        (228, 227, {64: 64, 128: 64, 256: 64}),  # KiB of an H100
        (164, 163, {64: 64, 128: 64, 256: 32}),  # of an A100
        (100, 99, {64: 64, 128: 32, 256: 16}),  # of an L4
        (0, 0, {64: 0, 128: 0, 256: 0}),
    ],
)
def test_how_many_keys_a_kernel_attends_to_at_once_follows_from_shared_memory(
    monkeypatch: pytest.MonkeyPatch, of_sm: int, of_block: int, blocks: dict[int, int]
) -> None:
    """As prefill.cuh of the pinned version reads, by hand."""
    properties = SimpleNamespace(
        shared_memory_per_multiprocessor=of_sm << 10, shared_memory_per_block_optin=of_block << 10
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert {dim: min_key_block(dim, torch.device("cuda")) for dim in blocks} == blocks


def literal_variant(
    given: dict[str, Any], start: int, qo_len: int, kv_len: int, is_front: bool = False
) -> torch.Tensor:
    """The variant's mask as its source says it, for every row and key."""
    if is_front:
        return literal_variant(given, start, qo_len, kv_len)[:, front_places(qo_len, kv_len)]
    words = given["ancestors"].numpy().view(np.uint32).reshape(-1, given["ancestor_words"])
    positions, window = given["positions"].numpy(), given["window"]
    row, key = np.arange(qo_len)[:, None], np.arange(kv_len)[None, :]
    in_context = key < kv_len - qo_len
    behind = np.where(in_context, 0, key - (kv_len - qo_len))
    position = np.where(in_context, key, positions[start + behind])
    is_seen = in_context | (words[start + row, behind // 32] >> (behind % 32).astype(np.uint32) & 1 > 0)
    is_near = position > positions[start + row] - window if window else True
    return torch.from_numpy(is_seen & is_near)


class FakeModule:
    """A compiled module's own plan(), by the positional arguments that the wrapper gives it."""

    NAMES = (
        "self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer, "
        "qo_indptr_host, paged_kv_indptr_host, kv_lens_arr_host, self._max_total_num_rows or total_num_rows, "
        "batch_size, num_qo_heads, num_kv_heads, page_size, self.is_cuda_graph_enabled, head_dim_qk, head_dim_vo, "
        "causal, window_left, fixed_split_size or -1, disable_split_kv, 0, 0"
    ).split(", ")

    def __init__(self) -> None:
        self.plans: list[list[Any]] = []
        self.info = [*range(QUERY_TILE), PLANNED_TILE, *range(QUERY_TILE + 1, 15)]

    def plan(self, *args: Any) -> list[int]:
        assert len(args) == len(self.NAMES)
        # What the kernels find on the device is what was planned last, not what the host's tensors become.
        self.plans.append([a.clone() if isinstance(a, torch.Tensor) and a.dtype == torch.int32 else a for a in args])
        return self.info


class FakeGraphWrapper(FakeWrapper):
    """The same in its graph mode: it reads the caller's buffers, and what was planned last."""

    def __init__(self, real: type, jit_args: list[Any] | None, workspace: torch.Tensor, **options: Any) -> None:
        super().__init__(real, jit_args, workspace)
        self._bound("__init__", workspace, "NHD", backend="fa2", jit_args=jit_args, **options)
        assert options["use_cuda_graph"]
        self.qo, self.kv = options["qo_indptr_buf"], options["paged_kv_indptr_buf"]
        self.indices, self.last = options["paged_kv_indices_buf"], options["paged_kv_last_page_len_buf"]
        self.mask, self.mask_indptr = options.get("custom_mask_buf"), options.get("mask_indptr_buf")
        assert len(self.qo) - 1 == len(self.kv) - 1 == len(self.last)
        self._cached_module = FakeModule()
        self._plan_info = self._cached_module.info

    def plan(self, **kwargs: Any) -> None:
        plan = self._bound("plan", **kwargs)
        assert not self.plans, "the wrapper's plan() is slow: it is for the first time"
        assert plan["packed_custom_mask"] is None, "it would be put where the graph's is, its offsets in bits"
        assert plan["qo_indptr"].tolist() == [0] + [plan["qo_indptr"][-1]] * len(self.last), "not the largest step"
        assert not plan["causal"]
        self.qo.copy_(plan["qo_indptr"])
        self.kv.copy_(plan["paged_kv_indptr"])
        self.indices[: len(plan["paged_kv_indices"])] = 0
        self.plans.append(plan)

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], *more: Any) -> torch.Tensor:
        args = dict(zip(FakeModule.NAMES[:16], self._cached_module.plans[-1][:16], strict=True))
        assert torch.equal(args["qo_indptr_host"], self.qo)
        assert torch.equal(args["paged_kv_indptr_host"], self.kv)
        assert torch.equal(args["kv_lens_arr_host"], self.kv.diff())
        assert args["self._float_workspace_buffer"] is self._float_workspace_buffer
        assert args["self._int_workspace_buffer"] is self._int_workspace_buffer
        assert args["self.is_cuda_graph_enabled"] is True
        assert (args["self._max_total_num_rows or total_num_rows"], args["batch_size"]) == (len(q), len(self.last))
        first = self.plans[0]
        for name in ("num_qo_heads", "num_kv_heads", "page_size", "head_dim_qk", "head_dim_vo", "causal"):
            assert args[name] == first[name], name
        rows, self._mask_indptr_buf = int(self.qo[-1]), self.mask_indptr
        now = {"qo_indptr": self.qo, "paged_kv_indptr": self.kv, "paged_kv_indices": self.indices}
        self.plans = [{**first, **now, "packed_custom_mask": self.mask}]
        out = q.new_zeros(*q.shape[:2], first["head_dim_vo"])
        out[:rows] = super().run(q[:rows], caches, *more)
        return out


def make_kernel(flashinfer: Any, mask: str, made: list[FakeWrapper], needed: int = 0) -> FlashInferKernel:
    real = flashinfer.BatchPrefillWithPagedKVCacheWrapper

    def make(jit_args: list[Any] | None, workspace: torch.Tensor, **graph: Any) -> FakeWrapper:
        made.append(
            FakeGraphWrapper(real, jit_args, workspace, **graph)
            if graph
            else FakeWrapper(real, jit_args, workspace, needed)
        )
        return made[-1]

    return FlashInferKernel(LAYERS, NUM_HEADS, torch.bfloat16, CPU, mask=mask, make_wrapper=make)


PARAMS = [
    AttentionParams(0.125),
    AttentionParams(0.2, sliding_window=7),
    AttentionParams(0.125, sliding_window=1, softcap=5.0),
    AttentionParams(0.125, softcap=5.0),
]


def attend_all(kernel: Any, seed: int) -> list[torch.Tensor]:
    """One random step through layers of every kind, some of them twice."""
    spans, allocator, _ = random_step(seed)
    backend, states = filled_backend(kernel, allocator, seed)
    backend.begin(spans)
    num_rows = sum(span.num_rows for span in spans)
    return [
        backend.attend(layer, *states(num_rows), PARAMS[layer % len(PARAMS)]) for layer in range(len(backend.caches))
    ]


def filled_backend(
    kernel: Any, allocator: SlotAllocator, seed: int
) -> tuple[PagedBackend, Callable[[int], Iterator[torch.Tensor]]]:
    """With contexts, which this test never computed; and what gives q, k and v of so many rows for the next layer."""
    backend = PagedBackend(LAYERS * len(PARAMS) * 2, torch.bfloat16, CPU, kernel, allocator)
    generator = torch.Generator().manual_seed(seed)
    for caches in backend.caches:
        for cache in caches:
            cache.copy_(torch.randn(cache.shape, generator=generator))

    def states(num_rows: int) -> Iterator[torch.Tensor]:
        return (torch.randn(1, h, num_rows, 64, generator=generator).bfloat16() for h in (NUM_HEADS, 2, 2))

    return backend, states


@pytest.mark.parametrize("mask", ["custom", "tree", "front"])
def test_all_masks_ask_for_what_the_reference_does(flashinfer: Any, mask: str) -> None:
    @examples(6)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        made: list[FakeWrapper] = []
        actual = attend_all(make_kernel(flashinfer, mask, made), seed)
        for mine, expected in zip(actual, attend_all(TorchKernel(), seed), strict=True):
            assert torch.equal(mine, expected)
        # One plan for each kind of layer; to the variant, windows and scales are all the same, but whether it is asked
        # about every key.
        is_variant, num_kinds = made[0].jit_args is not None, len(made)
        assert num_kinds in ({2, 4} if mask == "front" else {2} if is_variant else {4})
        assert [len(wrapper.plans) for wrapper in made] == [1] * num_kinds

    check()


@pytest.mark.parametrize("mask", ["custom", "tree"])
@pytest.mark.parametrize("page_size", [2, 5, 16])
def test_larger_pages_are_told_as_flashinfer_wants_them(flashinfer: Any, mask: str, page_size: int) -> None:
    case = Case("pages", (0, 33, 16, 5), (3, -4, 16, 1), heads=4, kv_heads=2, head_dim=64, page_size=page_size)
    step = make_step(case, CPU, torch.bfloat16)
    shape = [LayerShape(case.kv_heads, case.head_dim, case.head_dim)]
    made: list[FakeWrapper] = []

    def make(jit_args: list[Any] | None, workspace: torch.Tensor) -> FakeWrapper:
        made.append(FakeWrapper(flashinfer.BatchPrefillWithPagedKVCacheWrapper, jit_args, workspace))
        return made[-1]

    kernel = PagedKernel(shape, case.heads, torch.bfloat16, CPU, mask=mask, page_size=page_size, make_wrapper=make)
    exact = reference(step, case.params)

    def found() -> dict[str, object]:
        kernel.plan(step.metadata)
        out = kernel.run(step.query, step.key_cache, step.value_cache, step.metadata, case.params)
        return compare(out, exact, torch.bfloat16)

    assert found()["is_right"]
    assert made[0].plans[0]["page_size"] == page_size
    step.metadata.kv_indices[int(step.metadata.kv_indptr_cpu[1])] += page_size
    assert not found()["is_right"], "another page in place of a context's first"


GRAPH_ROWS, GRAPH_REQUESTS = 512, 6


class Bucket:
    """The buffers of one graph."""

    def __init__(self, num_rows: int = GRAPH_ROWS) -> None:
        self.static = StaticStep(num_rows, GRAPH_REQUESTS)
        self.layout = StepLayout(self.static.fields)
        self.blob = torch.zeros(self.layout.num_bytes, dtype=torch.uint8)
        self.static.bind(self.layout.views(self.blob), torch.zeros(GRAPH_REQUESTS * 500, dtype=torch.int32), 500)


def attend_static(kernel: FlashInferKernel, seeds: Sequence[int], bucket: Bucket) -> list[list[torch.Tensor]]:
    """As attend_all of every seed, all in the buffers of one bucket; without padding."""
    static, results = bucket.static, []
    for seed in seeds:
        spans, allocator, _ = random_step(seed)
        backend, states = filled_backend(kernel, allocator, seed)
        arrays, _ = step_arrays(spans, allocator, bucket.layout.arrays(bucket.blob))
        backend.begin_static(static, arrays)
        backend.find_slots(static)
        num_rows = sum(span.num_rows for span in spans)
        outputs = []
        for layer in range(len(backend.caches)):
            q, k, v = (torch.zeros(1, heads, static.num_rows, 64).bfloat16() for heads in (NUM_HEADS, 2, 2))
            for padded, state in zip((q, k, v), states(num_rows), strict=True):
                padded[:, :, :num_rows] = state
            outputs.append(backend.attend(layer, q, k, v, PARAMS[layer % len(PARAMS)])[:, :num_rows])
        results.append(outputs)
    return results


@pytest.mark.parametrize(("mask", "num_rows"), [("custom", 512), ("tree", 512), ("front", 512), ("front", 64)])
def test_a_graphs_steps_are_planned_over_its_buffers(flashinfer: Any, mask: str, num_rows: int) -> None:
    @examples(4)
    @given(st.lists(st.integers(0, 2**32), min_size=3, max_size=3))
    def check(seeds: list[int]) -> None:
        assume(all(sum(span.num_rows for span in random_step(seed)[0]) <= num_rows for seed in seeds))
        made: list[FakeWrapper] = []
        actual = attend_static(make_kernel(flashinfer, mask, made), seeds, Bucket(num_rows))
        for mine, seed in zip(actual, seeds, strict=True):
            for out, expected in zip(mine, attend_all(TorchKernel(), seed), strict=True):
                assert torch.equal(out, expected)
        assert len(made) == (2 if mask in ("tree", "front") and num_rows == 512 else 4)
        assert all(isinstance(wrapper, FakeGraphWrapper) for wrapper in made)

    check()


def test_a_plan_that_a_graph_was_not_made_for_is_an_error(flashinfer: Any) -> None:
    made: list[Any] = []
    kernel, bucket = make_kernel(flashinfer, "tree", made), Bucket()
    attend_static(kernel, [1], bucket)
    made[0]._cached_module.info = [99, *range(14)]
    with pytest.raises(RuntimeError, match="otherwise than its graph"):
        attend_static(kernel, [2], bucket)


def test_buckets_of_the_same_rows_have_wrappers_of_their_own(flashinfer: Any) -> None:
    made: list[FakeWrapper] = []
    kernel, buckets = make_kernel(flashinfer, "tree", made), (Bucket(), Bucket())
    for seed in (1, 2):
        for bucket in buckets:
            (mine,) = attend_static(kernel, [seed], bucket)
            for out, expected in zip(mine, attend_all(TorchKernel(), seed), strict=True):
                assert torch.equal(out, expected)
    assert len(made) == 2 * 2  # with a soft cap and without


def test_the_wrappers_of_a_graph_go_with_it(flashinfer: Any) -> None:
    kernel, buckets = make_kernel(flashinfer, "tree", []), [Bucket(), Bucket()]
    for i in range(2):
        attend_static(kernel, [1], buckets[i])
    gc.collect()
    assert len(kernel._graph_wrappers) == 2
    buckets.pop()
    gc.collect()
    assert list(kernel._graph_wrappers) == [buckets[0].static.metadata]


def test_the_installed_module_is_planned_by_these_arguments(flashinfer: Any) -> None:
    real = inspect.unwrap(flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan)
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(real)))))
    (first,) = [n.value for n in nodes if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "args"]
    assert isinstance(first, ast.List)
    more = [n.args[0] for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "args.append"]
    assert [ast.unparse(item) for item in [*first.elts, *more]] == FakeModule.NAMES


def metadata_of(contexts: list[int], trees: list[list[int]]) -> TreeMetadata:
    kernel = Recording()
    allocator = reserved(contexts, trees, random.Random(0))
    PagedBackend(LAYERS, torch.bfloat16, CPU, kernel, allocator).begin(make_spans(contexts, trees))
    return kernel.planned[0]


@pytest.mark.parametrize("mask", ["custom", "tree"])
def test_chains_go_to_the_causal_kernel(flashinfer: Any, mask: str) -> None:
    made: list[FakeWrapper] = []
    kernel = make_kernel(flashinfer, mask, made)
    metadata = metadata_of([0, 9], [[-1, 0, 1], [-1]])
    assert metadata.is_causal
    kernel.plan(metadata)
    query, cache = torch.ones(4, NUM_HEADS, 64).bfloat16(), torch.ones(100, 2, 64).bfloat16()
    kernel.run(query, cache, cache, metadata, AttentionParams(0.1, sliding_window=4))
    (plan,) = made[0].plans
    assert (plan["causal"], plan["packed_custom_mask"], plan["window_left"]) == (True, None, 3)
    assert made[0].jit_args is None


def test_every_step_is_planned_anew(flashinfer: Any) -> None:
    made: list[FakeWrapper] = []
    kernel = make_kernel(flashinfer, "custom", made)
    for context in (3, 8):
        metadata = metadata_of([context], [[-1, 0, 0]])
        kernel.plan(metadata)
        cache = torch.ones(100, 2, 64).bfloat16()
        for _ in range(3):
            kernel.run(torch.ones(3, NUM_HEADS, 64).bfloat16(), cache, cache, metadata, PARAMS[0])
    assert [plan["seq_lens"].tolist() for plan in made[0].plans] == [[6], [11]]


def test_all_wrappers_share_a_workspace_that_grows(flashinfer: Any) -> None:
    made: list[FakeWrapper] = []
    kernel = make_kernel(flashinfer, "custom", made, needed=kernels.WORKSPACE_BYTES + 1)
    metadata = metadata_of([3], [[-1, 0, 0]])
    cache = torch.ones(100, 2, 64).bfloat16()
    for _ in range(2):
        kernel.plan(metadata)
        for params in PARAMS:
            kernel.run(torch.ones(3, NUM_HEADS, 64).bfloat16(), cache, cache, metadata, params)
    assert len({wrapper._float_workspace_buffer.data_ptr() for wrapper in made}) == 1
    assert {len(wrapper._int_workspace_buffer) for wrapper in made} == {16}


@examples(60)
@given(st.integers(0, 2**32), st.sampled_from([None, 1, 9]), st.sampled_from([1, 5, 1 << 17]))
def test_the_custom_mask_is_numpys_bits_from_a_new_byte_for_each_request(
    seed: int, window: int | None, block: int
) -> None:
    spans, allocator, _ = random_step(seed)
    kernel = Recording()
    PagedBackend(LAYERS, torch.bfloat16, CPU, kernel, allocator).begin(spans)
    with mock.patch.object(flashinfer_mask, "MASK_BLOCK", block):
        packed, offsets = packed_mask(kernel.planned[0], window)
    assert (packed.dtype, offsets.dtype, int(offsets[-1])) == (torch.uint8, torch.int32, len(packed))
    for i, span in enumerate(spans):
        expected = np.packbits(visible_keys(span, window).reshape(-1), bitorder="little")
        np.testing.assert_array_equal(packed[offsets[i] : offsets[i + 1]].numpy(), expected)


def test_a_mask_that_cannot_be_addressed_is_never_given() -> None:
    metadata = metadata_of([30], [[-1, 0, 0]])
    long = dataclasses.replace(metadata, kv_lens_cpu=torch.tensor([6_000_000_000]))
    with pytest.raises(RuntimeError, match="2250000000 bytes, more than FlashInfer can address"):
        packed_mask(long, None)


def test_the_pins_are_those_of_the_package_and_of_what_is_installed(flashinfer: Any) -> None:
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {f"{name}=={version}" for name, version in VERSIONS.items()} <= set(extras["cuda"])
    constraints = (root / "constraints.txt").read_text().split()
    for name, version in VERSIONS.items():
        assert f"{name}=={version}" in constraints
        assert packages.version(name) == version
    assert flashinfer.__version__ == VERSIONS["flashinfer-python"]
    assert callable(load_wrapper())


@pytest.mark.parametrize(
    ("name", "found"), [("flashinfer-python", "0.7.2"), ("flashinfer-python", None), ("apache-tvm-ffi", None)]
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, name: str, found: str | None) -> None:
    def version(asked: str) -> str:
        if asked != name:
            return VERSIONS[asked]
        if found is None:
            raise packages.PackageNotFoundError(asked)
        return found

    monkeypatch.setattr(kernels.packages, "version", version)
    with pytest.raises(
        ConfigError, match=f"{VERSIONS[name]}.*batchserve.cuda.*installed: .*{name} {found or 'missing'}"
    ):
        FlashInferKernel(LAYERS, NUM_HEADS, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("layer", "heads", "dtype", "named"),
    [
        (LayerShape(2, 64, 64), 4, torch.float32, "dtype = float32"),
        (LayerShape(2, 80, 80), 4, torch.float16, "head_dim = 80"),
        (LayerShape(2, 128, 64), 4, torch.float16, r"head_dim = 128 \(K\), 64 \(V\)"),
        (LayerShape(3, 64, 64), 4, torch.float16, "multiple of 3"),
    ],
)
def test_models_without_a_kernel_are_refused(layer: LayerShape, heads: int, dtype: torch.dtype, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        FlashInferKernel([*LAYERS, layer], heads, dtype, CPU, make_wrapper=lambda *args: None)


def test_sinks_are_refused(flashinfer: Any) -> None:
    kernel = make_kernel(flashinfer, "custom", [])
    query, cache = torch.ones(3, NUM_HEADS, 64).bfloat16(), torch.ones(100, 2, 64).bfloat16()
    params = AttentionParams(1.0, sinks=torch.ones(NUM_HEADS))
    with pytest.raises(UnsupportedModelError, match="sinks"):
        kernel.run(query, cache, cache, metadata_of([3], [[-1, 0, 0]]), params)


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("has_softcap", [False, True])
@pytest.mark.parametrize("head_dim", kernels.HEAD_DIMS)
def test_flashinfer_makes_the_variants_sources(
    flashinfer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int, has_softcap: bool, rows_first: bool
) -> None:
    from flashinfer.jit import env
    from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module

    monkeypatch.setattr(env, "FLASHINFER_GEN_SRC_DIR", tmp_path)
    arguments = variant_arguments(head_dim, head_dim, torch.bfloat16, has_softcap, rows_first=rows_first)
    module = gen_customize_batch_prefill_module("fa2", *arguments)
    kind = f"{'front' if rows_first else 'tree'}_bfloat16_d{head_dim}{'_softcap' if has_softcap else ''}"
    assert module.name == arguments[0] == f"batchserve_{kind}_v4"
    config = (tmp_path / module.name / "batch_prefill_config.inc").read_text()
    for declared in ("struct TreeAttention", *(f"{kind}* {name};" for name, kind in TENSORS.items())):
        assert declared in config
    assert all(f"{kind} {name};" in config for name, kind in (FRONT_SCALARS if rows_first else SCALARS).items())
    assert f"rows_first = {str(rows_first).lower()};" in config
    assert "IdType* qo_tile_indices;" in config
    assert "group_size;" in config
    assert f"has_softcap = {str(has_softcap).lower()};" in config
    assert f"HEAD_DIM_QK = {head_dim};" in config
    for number, mode in ((0, "kNone"), (2, "kCustom")):
        source = (tmp_path / module.name / f"batch_prefill_paged_kernel_mask_{number}.cu").read_text()
        assert f"MaskMode::{mode}" in source
        assert "TreeAttention, PagedParams" in source


HOST = """
#include <cmath>
#include <cstddef>
#include <cstdint>
#define __device__
#define __host__
#define __forceinline__ inline
#define __ldg(pointer) (*(pointer))
static struct { uint32_t x; } blockIdx;
static uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
namespace math { constexpr float log2e = 1.4426950408889634f; inline float tanh(float x) { return std::tanh(x); } }
MACROS
struct AttentionVariantBase {};
SOURCE
struct Params {
  const int32_t *q_indptr, *kv_lens;
  int32_t *ancestors, *positions;
  double sm_scale, softcap;
  int64_t ancestor_words, window, query_tile;
  const int32_t* qo_tile_indices;
  uint32_t group_size;
  uint32_t get_qo_len(uint32_t i) const { return q_indptr[i + 1] - q_indptr[i]; }
  uint32_t get_kv_len(uint32_t i) const { return kv_lens[i]; }
};
extern "C" void masks(const int32_t* qo, const int32_t* kv_lens, int requests, int32_t* ancestors, int32_t* positions,
                      double scale, double cap, int64_t words, int64_t window, uint8_t* out, float* score,
                      uint32_t query_tile, uint32_t group, int32_t tile, uint32_t* told) {
  Params params{qo, kv_lens, ancestors, positions, scale, cap, words, window, query_tile, &tile - 5, group};
  blockIdx.x = 5;
  for (int i = 0; i < requests; ++i) {
    TreeAttention variant(params, i, nullptr);
    told[2 * i] = variant.qo_len;
    told[2 * i + 1] = variant.window_left;
    score[i] = variant.LogitsTransform(params, 3.f, i, 0, 0, 0, 0) * variant.sm_scale_log2 / math::log2e;
    for (uint32_t row = 0; row < params.get_qo_len(i); ++row)
      for (uint32_t key = 0; key < variant.kv_len + 2; ++key)  // tiles reach beyond the last key
        *out++ = variant.LogitsMask(params, i, row, key, 0, 0);
  }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_variants_source_masks_as_the_reference_does(
    flashinfer: Any, tmp_path: Path, softcap: float | None, rows_first: bool
) -> None:
    """The source itself, compiled for the CPU with FlashInfer's own macros."""
    header = Path(flashinfer.__file__).parent / "data/include/flashinfer/attention/variant_helper.cuh"
    macros = re.search(
        r"#define REGISTER_QUERY_TRANSFORM.*(?=struct AttentionVariantBase)", header.read_text(), re.DOTALL
    )
    assert macros is not None
    source = variant_arguments(64, 64, torch.bfloat16, softcap is not None, rows_first=rows_first)[-1]
    (tmp_path / "host.cpp").write_text(HOST.replace("MACROS", macros[0]).replace("SOURCE", source))
    library = tmp_path / "host.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "host.cpp")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    masks: Callable[..., None] = ctypes.CDLL(str(library)).masks

    @examples(40)
    @given(st.integers(0, 2**32), st.sampled_from([None, 1, 9, 1000]), st.sampled_from([(16, 3, 2), (128, 7, 1)]))
    def check(seed: int, window: int | None, tile: tuple[int, int, int]) -> None:
        spans, allocator, _ = random_step(seed)
        kernel = Recording()
        PagedBackend(LAYERS, torch.bfloat16, CPU, kernel, allocator).begin(spans)
        metadata = kernel.planned[0]
        ancestors, positions, scale, cap, *rest = variant_run_arguments(
            metadata, AttentionParams(0.25, window, softcap)
        )
        seen = [visible_keys(span, window) for span in spans]
        if rows_first:
            seen = [each[:, front_places(*each.shape)] for each in seen]
        expected = [np.pad(each, ((0, 0), (0, 2))).reshape(-1) for each in seen]
        seen_by_kernel = np.zeros((len(spans), 2), np.uint32)
        out, score = np.zeros(sum(map(len, expected)), np.uint8), np.zeros(len(spans), np.float32)
        tensors = [tensor.contiguous() for tensor in (metadata.qo_indptr, metadata.kv_lens_cpu, ancestors, positions)]
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        scalars = [ctypes.c_double(scale), ctypes.c_double(cap), *map(ctypes.c_int64, rest)]
        masks(
            *pointers[:2], len(spans), *pointers[2:], *scalars, *(ctypes.c_void_p(a.ctypes.data) for a in (out, score)),
            *map(ctypes.c_uint32, tile), ctypes.c_void_p(seen_by_kernel.ctypes.data)
        )  # fmt: skip
        for each, found in zip(seen, seen_by_kernel.tolist(), strict=True):
            assert tuple(found) == (told(*each.shape, *tile) if rows_first else each.shape)
        np.testing.assert_array_equal(out.astype(bool), np.concatenate(expected))
        wanted = 0.75 if softcap is None else softcap * np.tanh(0.75 / softcap)
        np.testing.assert_allclose(score, wanted, rtol=1e-6)

    check()
