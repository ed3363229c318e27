"""The layout of one step: where every request's rows, positions and logits are."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.runner import row_layout
from batchserve.runner.ragged_batch import MIN_ROWS, RequestRows, build_batch
from batchserve.runner.step_handle import verify_batch
from batchserve.sampling import device_columns, draw_kernel, sampled_walk, walk_kernel
from batchserve.sampling.device import DeviceSampler
from batchserve.sampling.recordings import Recordings
from batchserve.sampling.sampler import sample_row
from tests.factories import examples, make_sampling, random_tree


def random_rows(rng: random.Random, request_id: str) -> RequestRows:
    """A prefill chunk (sampled or not), a plain decode row, or a row with a draft tree."""
    num_pending = rng.choice([1, 1, 1, rng.randint(1, 30)])
    tree = random_tree(rng, rng.choice([0, rng.randint(1, 12)]), 5) if num_pending == 1 else random_tree(rng, 0, 5)
    token_ids = [rng.randrange(100) for _ in range(num_pending)] + tree.token_ids
    parents = list(range(-1, num_pending - 1)) + [num_pending - 1 if p < 0 else num_pending + p for p in tree.parents]
    is_sampled = bool(tree.token_ids) or rng.random() < 0.7
    sampling = make_sampling() if is_sampled else None
    return RequestRows(request_id, rng.randint(0, 300), token_ids, parents, num_pending, sampling)


@examples(150)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_every_row_is_where_verification_and_attention_look_for_it(seed: int, count: int) -> None:
    rng = random.Random(seed)
    requests = [random_rows(rng, f"r{i}") for i in range(count)]
    batch = build_batch(requests)
    assert batch.num_rows == sum(len(rows.token_ids) for rows in requests)
    assert len(batch.input_ids) == len(batch.position_ids) == max(batch.num_rows, MIN_ROWS)
    assert batch.input_ids.dtype == batch.position_ids.dtype == batch.logit_rows.dtype == np.int64
    place = 0
    for rows, span, first in zip(requests, batch.spans, batch.first_logit, strict=True):
        assert (span.request_id, span.row_start, span.context_len) == (rows.request_id, place, rows.context_len)
        assert span.parents.tolist() == rows.parents
        assert span.is_chain == (rows.parents == list(range(-1, len(rows.parents) - 1))) or rows.num_draft_tokens > 0
        for row, (token, parent) in enumerate(zip(rows.token_ids, rows.parents, strict=True)):
            position = rows.context_len if parent < 0 else span.positions[parent] + 1
            assert batch.input_ids[place + row] == token
            assert batch.position_ids[place + row] == span.positions[row] == position
        if rows.sampling is None:
            assert first == -1
        else:  # the row of the last known token and all tree rows, one behind the other
            needed = range(place + rows.root, place + len(rows.token_ids))
            assert batch.logit_rows[first : first + len(needed)].tolist() == list(needed)
        place += len(rows.token_ids)


@examples(50)
@given(st.integers(0, 2**32))
def test_logits_are_asked_for_only_where_something_is_sampled(seed: int) -> None:
    """And then for no fewer than MIN_ROWS rows."""
    rng = random.Random(seed)
    requests = [random_rows(rng, f"r{i}") for i in range(rng.randint(1, 4))]
    batch = build_batch(requests)
    needed = sum(len(rows.token_ids) - rows.root for rows in requests if rows.sampling is not None)
    assert len(batch.logit_rows) == (max(needed, MIN_ROWS) if needed else 0)
    assert len(np.unique(batch.logit_rows)) == needed


def test_padding_belongs_to_nobody() -> None:
    batch = build_batch([RequestRows("a", 7, [5], [-1], 1, make_sampling())])
    assert (batch.num_rows, len(batch.input_ids)) == (1, MIN_ROWS)
    assert sum(span.num_rows for span in batch.spans) == 1
    assert batch.logit_rows.tolist() == [0] * MIN_ROWS


@pytest.mark.parametrize("parents", [[-1, 2, 0], [-1, 1, 0], [-1, -1, 0], [-1, 9, 0]])
def test_a_parent_has_to_come_before_its_child(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parent does not come before"):
        build_batch([RequestRows("a", 5, [1, 2, 3], parents, 1, make_sampling())])


def test_kernels_are_compiled_before_the_first_step() -> None:
    """For one request and for several: compiling takes long, and somebody would wait for it."""
    for module in (row_layout, walk_kernel, device_columns, draw_kernel, sampled_walk):
        module.compile_kernels()
    kernels = (row_layout.lay_out, walk_kernel.walk_greedy, device_columns.describe_rows, draw_kernel.draw_allowed)
    before = [len(kernel.signatures) for kernel in kernels]
    for count in (1, 2, 5):
        rng = random.Random(count)
        batch = build_batch([random_rows(rng, f"r{i}") for i in range(count)])
        verify_batch(batch, np.zeros((len(batch.logit_rows), 9), np.float32), Recordings({"r0": [1] * 400}))
        DeviceSampler(8).build_metadata(batch, 256, Recordings())
        sample_row(np.zeros(9, np.float32), count, make_sampling(temperature=1.0, top_k=3, top_p=0.9))
    assert [len(kernel.signatures) for kernel in kernels] == before
