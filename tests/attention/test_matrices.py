"""The matrices' arithmetic against numpy, and the same bits for a query whatever else is in its tiles."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from numba import njit

from batchserve.attention import matrix_code
from batchserve.attention.base import LayerShape
from batchserve.attention.compiled import supports_amx
from batchserve.attention.matrix_code import AT_ONCE, PAIRS, TILE
from batchserve.kv.slab import EXTENT

needs_matrices = pytest.mark.skipif(not matrix_code.can_use_amx(), reason="this processor multiplies no matrices")
COUNT = 112  # keys: whole tiles, some of them AT_ONCE


@njit
def run(queries, first, count, keys, values, scores, weights, sums, out):  # type: ignore[no-untyped-def]
    spare, more = np.zeros((AT_ONCE * TILE, TILE), np.float32), np.zeros((TILE, sums.shape[1]), np.float32)
    matrix_code.begin_tiles()
    matrix_code.score(queries, first, count, keys, 0, len(keys), scores, 0, spare, np.float32(0.5))
    for lane in range(first, first + count):
        matrix_code.to_weights(scores, lane, len(keys) - 3, len(keys), weights[0], weights[1])
    matrix_code.weighted_sum(weights, first, values, 0, TILE, values[TILE:], TILE, sums)
    matrix_code.accumulate_weighted_sum(
        weights, first, count, 2 * TILE, values[2 * TILE :], len(values) - 2 * TILE, sums, more
    )
    for lane in range(first, first + count):
        matrix_code.store_output(sums, lane, np.float32(2), out, lane)
    matrix_code.end_tiles()


def bfloat16(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers as kernels have them, and as float64."""
    exact = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).bfloat16()
    return exact.view(torch.uint16).numpy(), exact.double().numpy()


def computed(dim: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores [count, COUNT] and outputs [count, dim] of these of TILE queries, in lanes from `first` on."""
    (lanes, _), (keys, _), (values, _) = bfloat16(TILE, dim), bfloat16(COUNT, dim), bfloat16(COUNT, dim, 1)
    queries = np.full((dim // 2, 2 * TILE), 0x7FC17FC1, np.uint32)  # what nobody asked for is not a number
    queries[:, first : first + count] = np.ascontiguousarray(lanes[:count]).view(np.uint32).T
    scores, out = np.full((2 * TILE, COUNT), np.nan, np.float32), np.zeros((2 * TILE, dim), np.uint16)
    weights = np.full((2, 2 * TILE, COUNT), 0x7FC17FC1, np.uint32)
    sums = np.full((2 * TILE, -(-dim // (AT_ONCE * TILE)) * AT_ONCE * TILE), np.nan, np.float32)
    run(queries, first, count, keys, values[..., 0], scores, weights, sums, out)
    return scores[first : first + count], out[first : first + count]


@needs_matrices
@pytest.mark.parametrize("dim", [PAIRS, 64, 96, 128, 256])
def test_scores_and_sums_are_numpys_and_bitwise_equal_in_any_lane(dim: int) -> None:
    (_, lanes), (_, keys), (_, values) = bfloat16(TILE, dim), bfloat16(COUNT, dim), bfloat16(COUNT, dim, 1)
    scores, out = computed(dim, 0, TILE)
    np.testing.assert_allclose(scores, 0.5 * lanes @ keys.T, rtol=1e-5, atol=1e-5 * dim)
    weights = torch.from_numpy(scores[:, :-3].copy()).bfloat16().double().numpy()
    numbers = torch.from_numpy(out).view(torch.bfloat16).double().numpy()
    np.testing.assert_allclose(numbers, 2 * weights @ values[:-3, :, 0], rtol=2**-8, atol=1e-4 * dim)
    for first, count in ((0, 1), (0, 3), (5, 4), (9, 11), (15, 2)):
        few_scores, few_out = computed(dim, first, count)
        assert (few_scores == scores[:count]).all()
        assert (few_out == out[:count]).all()


@njit
def give_all(sums, out):  # type: ignore[no-untyped-def]
    for lane in range(len(out)):
        matrix_code.store_output(sums, lane, np.float32(1), out, lane)


@pytest.mark.skipif(matrix_code.code.WIDTH != TILE, reason="vectors are shorter than a tile's rows")
def test_outputs_are_rounded_as_torch_rounds() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, (64, PAIRS), dtype=np.uint64).astype(np.uint32)
    words[:32] = words[:32] & np.uint32(0xFFFF0000) | np.uint32(0x8000)  # in the middle of two neighbours
    sums, out = words.view(np.float32), np.zeros((64, PAIRS), np.uint16)
    sums[0, :6] = [0.0, -0.0, np.inf, -np.inf, 3.4028235e38, 1e-45]
    give_all(sums, out)
    in_order = np.stack([sums[:, :TILE], sums[:, TILE:]], -1).reshape(64, PAIRS)  # even columns come first
    expected = torch.from_numpy(in_order).bfloat16()
    found = torch.from_numpy(out).view(torch.bfloat16)
    is_nan = expected.isnan()
    assert found[is_nan].isnan().all()
    assert torch.equal(found.view(torch.int16)[~is_nan], expected.view(torch.int16)[~is_nan])


@njit
def turn(lanes, queries, target):  # type: ignore[no-untyped-def]
    matrix_code.transpose_queries(lanes, queries)
    matrix_code.copy_row(lanes, 3, target, 1)
    matrix_code.clear_row(target, 0)


@pytest.mark.skipif(matrix_code.code.WIDTH != TILE, reason="vectors are shorter than a tile's rows")
def test_lanes_stand_as_queries_and_rows_are_copied_and_cleared() -> None:
    lanes, _ = bfloat16(TILE, 96)
    queries, target = np.zeros((48, 2 * TILE), np.uint32), np.ones((3, 96), np.uint16)
    turn(lanes, queries, target)
    assert (queries[:, :TILE] == lanes.view(np.uint32).T).all()
    assert (queries[:, TILE:] == 0).all()
    assert (target == np.stack([np.zeros(96), lanes[3], np.ones(96)])).all()


def test_they_are_taken_for_whole_rows_of_bfloat16_only() -> None:
    fit, odd = LayerShape(2, 96, 96), LayerShape(2, 80, 80)
    with mock.patch.object(matrix_code, "can_use_amx", return_value=True):
        assert supports_amx([fit, fit], "bfloat16")
        assert not supports_amx([fit, odd], "bfloat16")
        assert not supports_amx([fit], "float32")
    with mock.patch.object(matrix_code, "can_use_amx", return_value=False):
        assert not supports_amx([fit], "bfloat16")


def test_a_slab_ends_with_a_whole_tile() -> None:
    assert EXTENT % TILE == 0
