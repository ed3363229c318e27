"""Wherever a model leaves q, k and v, compiled attention finds them, stores K and V and answers with the same bits."""

from __future__ import annotations

import random

import pytest
import torch

from batchserve.attention import cpu
from batchserve.attention.base import AttentionParams, LayerShape, Spans
from batchserve.attention.cpu import CpuBackend
from batchserve.kv.slab import SlabAllocator
from tests.attention.test_backends import DTYPES, make_spans
from tests.attention.test_mask import random_parents
from tests.factories import dtype_name, tensor_planes

HEADS, KV_HEADS, DIM = 6, 2, 32
CONTEXTS = [20, 0, 7]
States = tuple[torch.Tensor, ...]


def attend(states: States, dtype: torch.dtype, rows: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output of one step, and what the slabs then hold of its rows."""
    allocator = SlabAllocator([LayerShape(KV_HEADS, DIM, DIM)], dtype_name(dtype), 2048)
    backend = CpuBackend(allocator, HEADS, has_sinks=True)  # so that compiled code takes all spans
    trees = [random_parents(random.Random(i), count) for i, count in enumerate(rows)]
    spans = make_spans(random.Random(0), CONTEXTS[: len(rows)], trees)
    for span in spans:
        allocator.reserve(span.request_id, span.context_len + span.num_rows)
        allocator.touch(span.request_id)
        allocator.commit(span.request_id, range(span.context_len))
    backend.begin(Spans.of(spans))
    out = backend.attend(0, *states, AttentionParams(DIM**-0.5))
    ends = [slice(span.context_len, span.context_len + span.num_rows) for span in spans]
    planes = [tensor_planes(allocator, span.request_id, 0) for span in spans]
    return out, [plane[:, end] for both, end in zip(planes, ends, strict=True) for plane in both]


def separate(dtype: torch.dtype, num_rows: int) -> States:
    """q, k and v [1, heads, num_rows, dim], each by itself."""
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    return tuple(torch.randn(1, heads, num_rows, DIM, generator=generator).to(dtype) for heads in sizes)


def as_slices_of_one_product(states: States) -> States:
    rows = torch.cat([each.transpose(1, 2).flatten(2) for each in states], -1)
    parts = rows.split([each.shape[1] * DIM for each in states], -1)
    return tuple(part.view(1, part.shape[1], -1, DIM).transpose(1, 2) for part in parts)


def as_dims_apart(states: States) -> States:
    return tuple(each.transpose(2, 3).contiguous().transpose(2, 3) for each in states)


# A thread takes all rows of a span and stores them itself, or some of them, and they were stored before.
@pytest.mark.parametrize("rows", [[1, 5, 2], [3, 200, 1]])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_where_states_lie(rows: list[int], dtype: torch.dtype) -> None:
    states = separate(dtype, sum(rows) + 2)  # two rows of padding
    expected, stored = attend(states, dtype, rows)
    assert not expected[0, -2:].any()
    for i, (key, value) in enumerate(zip(stored[::2], stored[1::2], strict=True)):
        own = slice(sum(rows[:i]), sum(rows[: i + 1]))
        assert torch.equal(key, states[1][0, :, own])
        assert torch.equal(value, states[2][0, :, own])
    for lie in (as_slices_of_one_product, as_dims_apart):
        moved = lie(states)
        assert not any(each.is_contiguous() for each in moved)
        found, found_stored = attend(moved, dtype, rows)
        assert torch.equal(found, expected)
        assert all(torch.equal(a, b) for a, b in zip(found_stored, stored, strict=True))


def test_keys_that_all_heads_share_are_stored_for_each() -> None:
    query, key, value = separate(torch.float32, 8)
    shared = key[:, :1].expand(-1, KV_HEADS, -1, -1)
    found, stored = attend((query, shared, value), torch.float32, [1, 5, 2])
    expected, _ = attend((query, shared.contiguous(), value), torch.float32, [1, 5, 2])
    assert torch.equal(found, expected)
    assert torch.equal(stored[0], shared[0, :, :1])


def test_the_answer_has_the_querys_dtype_where_slabs_have_another() -> None:
    states = separate(torch.bfloat16, 8)
    expected, _ = attend(states, torch.bfloat16, [1, 5, 2])
    found, _ = attend((states[0].float(), *states[1:]), torch.bfloat16, [1, 5, 2])
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_sinks_every_span_is_attended_for_by_compiled_code(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "attend_alone", None)  # nobody calls it
    sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(1))
    states = separate(dtype, 700)
    allocator = SlabAllocator([LayerShape(KV_HEADS, DIM, DIM)], dtype_name(dtype), 2048)
    backend = CpuBackend(allocator, HEADS, has_sinks=True)
    (span,) = make_spans(random.Random(0), [0], [list(range(-1, 699))])
    allocator.reserve(span.request_id, 700)
    backend.begin(Spans.of([span]))
    assert backend.attend(0, *states, AttentionParams(DIM**-0.5, sinks=sinks)).isfinite().all()


def test_a_step_of_no_spans_is_all_padding() -> None:
    backend = CpuBackend(SlabAllocator([LayerShape(KV_HEADS, DIM, DIM)], "float32", 64), HEADS)
    backend.begin(Spans.of([]))
    query, key, value = separate(torch.float32, 4)
    assert torch.equal(backend.attend(0, query, key, value, AttentionParams(1.0)), torch.zeros(1, 4, HEADS, DIM))
