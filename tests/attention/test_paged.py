"""What the GPU path tells a kernel of a step: bits, places and slots, against their plain definitions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchserve.attention.base import AttentionParams, LayerShape, Spans
from batchserve.attention.mask import ancestor_mask, visible_keys
from batchserve.attention.paged import PagedBackend, step_arrays
from batchserve.attention.static_step import StaticStep
from batchserve.attention.step_buffer import ALIGNMENT, StepLayout, upload
from batchserve.attention.torch_paged import TorchKernel
from batchserve.attention.tree_metadata import TreeMetadata, ancestor_bits, visible_slots
from batchserve.kv.slot_kernels import DUMMY_SLOT, fill_ancestors
from batchserve.kv.slots import SlotAllocator
from tests.attention.test_mask import make_span, random_parents
from tests.factories import examples

CPU = torch.device("cpu")


class Recording(TorchKernel):
    """Keeps the metadata that it was given, by plan() and by run()."""

    def __init__(self) -> None:
        self.planned: list[TreeMetadata] = []
        self.ran: list[TreeMetadata] = []

    def plan(self, metadata: TreeMetadata) -> None:
        self.planned.append(metadata)

    def run(self, query, key_cache, value_cache, metadata, params):  # type: ignore[no-untyped-def]
        self.ran.append(metadata)
        return super().run(query, key_cache, value_cache, metadata, params)


def random_trees(rng: random.Random, count: int) -> list[list[int]]:
    """Of all kinds: single rows, chains, bushes, chains that branch late, more rows than a word has bits."""
    trees = []
    for _ in range(count):
        size = rng.choice([1, 2, rng.randint(2, 30), rng.randint(30, 70)])
        chain = list(range(-1, rng.randint(0, size) - 1))
        rest = random_parents(rng, size)[len(chain) :]
        trees.append(rng.choice([chain + rest, list(range(-1, size - 1))]))
    return trees


def unpacked(bits: np.ndarray, num_rows: int) -> np.ndarray:
    """bool [rows, num_rows] of int32 words."""
    flat = np.unpackbits(bits.astype("<i4").view(np.uint8).reshape(len(bits), -1), axis=1, bitorder="little")
    assert not flat[:, num_rows:].any(), "bits beyond the request's rows"
    return flat[:, :num_rows].astype(bool)


def indptr(counts: list[int]) -> np.ndarray:
    return np.cumsum([0, *counts]).astype(np.int32)


@examples(200)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_ancestor_bits_are_those_of_the_mask(seed: int, count: int) -> None:
    trees = random_trees(random.Random(seed), count)
    qo = indptr([len(tree) for tree in trees])
    bits, is_causal = ancestor_bits(np.concatenate(trees).astype(np.int32), qo)
    assert bits.dtype == np.int32
    assert bits.shape == (qo[-1], -(-max(map(len, trees)) // 32))
    for tree, start, end in zip(trees, qo[:-1], qo[1:], strict=True):
        np.testing.assert_array_equal(unpacked(bits[start:end], len(tree)), ancestor_mask(np.array(tree)))
    assert is_causal == all(tree == list(range(-1, len(tree) - 1)) for tree in trees)


def test_words_can_be_fixed() -> None:
    bits = np.full((3, 4), 77, np.uint32)
    assert not fill_ancestors(np.array([-1, 0, 0], np.int32), indptr([3]), bits)
    np.testing.assert_array_equal(bits, [[0b1, 0, 0, 0], [0b11, 0, 0, 0], [0b101, 0, 0, 0]])


def test_a_chain_of_a_thousand_rows_sees_all_before_it() -> None:
    bits, is_causal = ancestor_bits(np.arange(-1, 1023, dtype=np.int32), indptr([1024]))
    assert is_causal
    np.testing.assert_array_equal(unpacked(bits, 1024), np.tri(1024, dtype=bool))


def make_spans(contexts: list[int], trees: list[list[int]]) -> Spans:
    starts = indptr([len(tree) for tree in trees])
    places = enumerate(zip(trees, contexts, starts, strict=False))
    return Spans.of([make_span(tree, c, row_start=int(start), request_id=f"r{i}") for i, (tree, c, start) in places])


def reserved(contexts: list[int], trees: list[list[int]], rng: random.Random) -> SlotAllocator:
    """With every request's context committed, out of rows that were partly thrown away."""
    allocator = SlotAllocator(4000, max_requests=2, max_tokens=500, bytes_per_token=1)
    for i, (context, tree) in enumerate(zip(contexts, trees, strict=True)):
        extra = rng.randint(0, 5)
        assert allocator.reserve(f"r{i}", context + extra)
        allocator.commit(f"r{i}", sorted(rng.sample(range(context + extra), context)))
        assert allocator.reserve(f"r{i}", len(tree))
    return allocator


def random_step(seed: int) -> tuple[Spans, SlotAllocator, list[list[int]]]:
    rng = random.Random(seed)
    trees = random_trees(rng, rng.randint(1, 5))
    contexts = [rng.choice([0, 1, rng.randint(0, 300)]) for _ in trees]
    return make_spans(contexts, trees), reserved(contexts, trees, rng), trees


@examples(100)
@given(st.integers(0, 2**32))
def test_a_step_is_described_once_and_as_the_spans_say(seed: int) -> None:
    spans, allocator, trees = random_step(seed)
    kernel = Recording()
    backend = PagedBackend([LayerShape(1, 4, 4)], torch.float32, CPU, kernel, allocator)
    backend.begin(spans)
    (metadata,) = kernel.planned
    assert (metadata.num_requests, metadata.num_rows) == (len(trees), sum(map(len, trees)))
    assert metadata.max_rows == max(map(len, trees))
    assert torch.equal(metadata.qo_indptr, metadata.qo_indptr_cpu)
    assert torch.equal(metadata.kv_indptr, metadata.kv_indptr_cpu)
    assert torch.equal(metadata.kv_lens_cpu, metadata.kv_indptr_cpu.diff())
    int32 = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.ancestors, metadata.positions)
    assert {tensor.dtype for tensor in int32} == {torch.int32}
    assert metadata.slot_mapping.dtype == torch.int64
    for i, span in enumerate(spans):
        rows = slice(*metadata.qo_indptr[i : i + 2].tolist())
        slots = allocator.slots(span.request_id)[: span.context_len + span.num_rows]
        assert metadata.kv_indices[slice(*metadata.kv_indptr[i : i + 2].tolist())].tolist() == slots.tolist()
        assert metadata.slot_mapping[rows].tolist() == slots[span.context_len :].tolist()
        assert metadata.positions[rows].tolist() == span.positions.tolist()
        for window in (None, 1, 9, 1000):
            np.testing.assert_array_equal(visible_slots(metadata, i, window).numpy(), visible_keys(span, window))
    query = torch.ones(1, 2, metadata.num_rows, 4)
    for _ in range(2):
        backend.attend(0, query, query[:, :1], query[:, :1], AttentionParams(1.0))
    assert kernel.ran == [metadata] * 2
    assert len(kernel.planned) == 1


def test_padding_is_written_to_the_dummy_slot() -> None:
    spans, allocator, trees = random_step(1)
    num_rows = sum(map(len, trees))
    layout = StepLayout(StaticStep(num_rows + 3, 8).fields)
    out = layout.arrays(torch.full((layout.num_bytes,), 77, dtype=torch.uint8))
    arrays, _ = step_arrays(spans, allocator, out)
    assert arrays["slot_mapping"] is out["slot_mapping"]
    assert arrays["slot_mapping"][num_rows:].tolist() == [DUMMY_SLOT] * 3
    assert DUMMY_SLOT not in arrays["slot_mapping"][:num_rows]
    assert not arrays["ancestors"][num_rows:].any()


def test_the_devices_table_grows_with_the_requests_and_keeps_what_it_had() -> None:
    trees: list[list[int]] = [[-1]] * 5
    allocator = reserved([3] * 5, trees, random.Random(0))  # it was made for two
    kernel = Recording()
    backend = PagedBackend([LayerShape(1, 4, 4)], torch.float32, CPU, kernel, allocator)
    spans = make_spans([3] * 5, trees)
    backend.begin(make_spans([3] * 2, trees[:2]))
    for i in range(5, 9):
        allocator.reserve(f"r{i}", 4)
    assert allocator.table_shape[0] == 16
    backend.begin(spans)
    expected = [slot for span in spans for slot in allocator.slots(span.request_id)[:4]]
    assert kernel.planned[-1].kv_indices.tolist() == expected


def test_attending_before_a_step_has_begun_is_an_error() -> None:
    backend = PagedBackend([LayerShape(1, 4, 4)], torch.float32, CPU, TorchKernel(), SlotAllocator(9, 1, 9, 1))
    with pytest.raises(RuntimeError, match="before begin"):
        backend.attend(0, *[torch.ones(1, 1, 1, 4)] * 3, AttentionParams(1.0))


def test_rows_are_written_in_the_dtype_of_the_cache() -> None:
    """Some models rotate in float32."""
    spans, allocator, trees = random_step(3)
    backend = PagedBackend([LayerShape(1, 4, 4)], torch.bfloat16, CPU, TorchKernel(), allocator)
    backend.begin(spans)
    states = torch.ones(1, 1, sum(map(len, trees)), 4)
    assert backend.attend(0, states.bfloat16(), states, states, AttentionParams(1.0)).dtype == torch.bfloat16


def some_arrays(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    sizes: dict[str, tuple[int, ...]] = {"a": (3,), "none": (0,), "matrix": (5, 2), "wide": (7,)}
    dtypes = {"a": np.int32, "none": np.int64, "matrix": np.int32, "wide": np.int64}
    return {name: rng.integers(-(2**31), 2**31, shape).astype(dtypes[name]) for name, shape in sizes.items()}


def test_all_arrays_arrive_in_one_aligned_buffer() -> None:
    arrays = some_arrays(np.random.default_rng(0))
    tensors = upload(arrays, CPU)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    for name, array in arrays.items():
        np.testing.assert_array_equal(tensors[name].numpy(), array)
        assert tensors[name].storage_offset() * tensors[name].itemsize % ALIGNMENT == 0


def test_a_layout_of_the_largest_step_takes_smaller_ones_at_the_same_places() -> None:
    layout = StepLayout({"a": (np.dtype(np.int32), (8,)), "b": (np.dtype(np.int64), (4,))})
    host = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = layout.views(host)
    for count in (1, 4, 2):
        arrays = {"a": np.arange(count, dtype=np.int32), "b": np.arange(count, dtype=np.int64)}
        layout.pack(arrays, host)
        assert views["a"][:count].tolist() == views["b"][:count].tolist() == list(range(count))
    with pytest.raises(ValueError, match="b: 40 bytes of int64, the buffer has 32"):
        layout.pack({"b": np.zeros(5, np.int64)}, host)
    with pytest.raises(ValueError, match="a: 8 bytes of int64"):
        layout.pack({"a": np.zeros(1, np.int64)}, host)
