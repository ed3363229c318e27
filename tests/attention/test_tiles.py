"""The tiles' arithmetic against numpy, in as many lanes as there can be, on this machine and as compiled for others."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from batchserve.attention import tiles
from batchserve.native.vector_code import WIDTH

DIMS = (2, 8, 24, 64, 80, 128, 256)
OTHERS = {"nehalem": (4, "+sse4.2"), "haswell": (8, "+avx,+avx2,+fma")}
DTYPES = ("torch.float32", "torch.bfloat16")
TOLD_WIDTH = "TILES_WIDTH"


def elements(dim: int, dtype: type, count: int) -> tuple[np.ndarray, np.ndarray]:
    """[count, dim] as kernels have it, and as float32."""
    exact = np.random.default_rng(dim).standard_normal((count, dim)).astype(np.float32)
    if dtype is np.float32:
        return exact, exact
    bits = (exact.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


@njit
def run_tiles(queries, count, start, stop, keys, scale, scores, out):  # type: ignore[no-untyped-def]
    """scores [4, n], weighted sums of the same keys as values in out [4, dim], `count` lanes at a time."""
    parts = 4 // keys.itemsize
    size = tiles.padded(keys.shape[1], parts)
    for first in range(0, 4, count):
        lanes, sums = np.zeros((count, size), np.float32), np.zeros((count, size), np.float32)
        for lane in range(count):
            tiles.spread(queries[first + lane], scale, parts, lanes[lane])
        tiles.score(lanes, count, keys, start, stop, scores[first : first + count])
        tiles.add_weighted(sums, count, keys, start, stop, scores[first : first + count])
        for lane in range(count):
            tiles.deinterleave_output(sums[lane], np.float32(2), parts, out[first + lane])


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("dim", DIMS)
def test_scores_and_sums_are_numpys_and_bitwise_equal_in_any_number_of_lanes(dim: int, dtype: type) -> None:
    keys, exact = elements(dim, dtype, 21)
    queries = np.random.default_rng(1).standard_normal((4, dim)).astype(np.float32)
    found = []
    for count in (1, 2, 4):
        scores, out = np.zeros((4, 16), np.float32), np.zeros((4, dim), np.float32)
        run_tiles(queries, count, 3, 19, keys, np.float32(0.5), scores, out)
        found.append((scores, out))
    expected = 0.5 * queries.astype(np.float64) @ exact[3:19].T.astype(np.float64)
    np.testing.assert_allclose(found[0][0], expected, rtol=1e-5, atol=1e-5 * dim)
    np.testing.assert_allclose(
        found[0][1], 2 * found[0][0].astype(np.float64) @ exact[3:19], rtol=1e-4, atol=1e-4 * dim
    )
    for scores, out in found[1:]:
        assert (scores == found[0][0]).all()
        assert (out == found[0][1]).all()


@njit
def run_three(queries, keys, scores):  # type: ignore[no-untyped-def]
    tiles.score(queries, 3, keys, 0, 4, scores)
    tiles.score_one(queries, 3, keys, (2, 0, 2, 3), scores, 0)


def test_three_lanes_and_one_with_keys_from_anywhere() -> None:
    keys, exact = elements(64, np.float32, 4)
    queries = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    scores = np.zeros((4, 4), np.float32)
    run_three(queries, keys, scores)
    expected = queries @ exact.T
    expected[3] = expected[3, [2, 0, 2, 3]]
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-4)


@njit
def run_exp(rows, row, count):  # type: ignore[no-untyped-def]
    return tiles.exp_in_place(rows, row, count)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 15, 16, 17, 100])
def test_exp_in_place_is_softmaxs_and_leaves_zeros_for_the_rest_of_the_last_four(count: int) -> None:
    rows = np.full((2, count + WIDTH), 7, np.float32)
    rows[1, :count] = np.random.default_rng(count).standard_normal(count) * 20
    expected = np.exp((rows[1, :count] - rows[1, :count].max()).astype(np.float64))
    total = run_exp(rows, 1, count)
    np.testing.assert_allclose(rows[1, :count], expected, rtol=1e-6, atol=1e-38)
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-6)
    assert (rows[1, count : -(-count // 4) * 4] == 0).all()
    assert (rows[0] == 7).all()


@njit
def run_cap(rows, row, count, most):  # type: ignore[no-untyped-def]
    tiles.cap_in_place(rows, row, count, most)


@pytest.mark.parametrize("cap", [5.0, 30.0, 1e4, 1e8])
def test_scores_are_capped_by_tanh(cap: float) -> None:
    rows = np.zeros((2, 100 + WIDTH), np.float32)
    rows[1, :100] = np.random.default_rng(1).standard_normal(100) * np.geomspace(1e-6, 1e4, 100)
    rows[1, 99] = np.nan
    expected = cap * np.tanh(rows[1, :100].astype(np.float64) / cap)
    run_cap(rows, 1, 100, np.float32(cap))
    np.testing.assert_allclose(rows[1, :100], expected, rtol=1e-6)
    assert (rows[0] == 0).all()


def test_what_is_too_small_is_nothing_and_what_is_not_a_number_is_not_lost() -> None:
    rows = np.zeros((1, 3 + WIDTH), np.float32)
    rows[0, :3] = [0, -100, -1]
    run_exp(rows, 0, 3)
    assert rows[0, 1] == 0
    rows[0, :3] = [0, -100, np.nan]
    assert np.isnan(run_exp(rows, 0, 3))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for older processors of this kind")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if (name, dtype) == ("haswell", "torch.bfloat16") else pytest.mark.slow)
        for name in OTHERS
        for dtype in DTYPES
    ],
)
def test_the_same_holds_where_vectors_are_shorter(name: str, dtype: str, tmp_path: Path) -> None:
    """Of the tiles for all dtypes; of the whole kernel, which takes long to compile, for one on each processor."""
    width, features = OTHERS[name]
    told = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    backends = str(Path(__file__).with_name("test_backends.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, backends]
    whole = f"{dtype} and (native-{dtype} or same_bits or not_a_number)"
    command += ["-k", f"not shorter and (tiles or {whole})"]
    done = subprocess.run(command, env={**os.environ, **told, TOLD_WIDTH: str(width)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_vectors_are_as_long_as_told() -> None:
    assert int(os.environ.get(TOLD_WIDTH, WIDTH)) == WIDTH
