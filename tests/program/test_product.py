"""Products of rows with packed weights: right in every shape, and a row's bits do not depend on the others."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from batchserve.native.vector_code import WIDTH
from batchserve.program import instructions as at
from batchserve.program.instructions import Function, Kernel, Op, assemble, two_floats
from batchserve.program.operations import operation
from batchserve.program.packing import pack
from batchserve.program.product import (
    BF16_KERNEL,
    SCRATCH_BYTES,
    columns_at_once,
)

KERNELS = [
    pytest.param(
        kernel,
        marks=pytest.mark.skipif(
            kernel not in (Kernel.FLOATS, BF16_KERNEL), reason=f"this processor does not multiply in {kernel.name}"
        ),
        id=kernel.name,
    )
    for kernel in Kernel
]
TAKES_HALVES = (Kernel.PAIRS, Kernel.TILES)


def dtype_of(kernel: Kernel) -> torch.dtype:
    return torch.float32 if kernel == Kernel.FLOATS else torch.bfloat16


def rows_for(kernel: Kernel, x: np.ndarray) -> np.ndarray:
    """Rows as a kernel reads them: with zeros after the last element, and for tiles with rows after the last one."""
    num_rows, inputs = x.shape
    padded = np.zeros((-(-num_rows // 32) * 32, -(-inputs // 32) * 32), np.float32)
    padded[:num_rows, :inputs] = x
    if kernel not in TAKES_HALVES:
        return padded
    padded[num_rows:] = np.nan
    return torch.from_numpy(padded).bfloat16().view(torch.uint16).numpy()


def multiply(
    x: np.ndarray,
    weights: list[torch.Tensor],
    kernel: Kernel = Kernel.FLOATS,
    *,
    biases: tuple[torch.Tensor | None, ...] = (None, None),
    function: Function = Function.NONE,
    factor: float = 1.0,
    cap: float = 0.0,
    base: np.ndarray | None = None,
    greatest: np.ndarray | None = None,
) -> np.ndarray:
    """One instruction by one thread; base: what the result is added to; greatest: what BEST fills."""
    packed = [pack(weight) for weight in weights]
    columns = len(weights[0])
    rows = rows_for(kernel, x)
    out = np.full((len(x), columns), np.nan, np.float32) if base is None else base.copy()
    scratch = np.zeros(SCRATCH_BYTES, np.uint8)
    held = [None if bias is None else bias.float().numpy().copy() for bias in biases]
    fields = {
        at.X: rows.ctypes.data, at.BY_X: rows.strides[0],
        at.OUT: out.ctypes.data, at.BY_OUT: out.strides[0], at.ADDS: int(base is not None),
        at.COLUMNS: columns, at.KERNEL: kernel,
        at.NUM_WORDS: packed[0].num_words,
        at.WEIGHT: packed[0].words.ctypes.data, at.BY_BLOCK: packed[0].block_bytes,
        at.WEIGHT_2: packed[1].words.ctypes.data if len(packed) > 1 else 0,
        at.BIAS: 0 if held[0] is None else held[0].ctypes.data,
        at.BIAS_2: 0 if held[1] is None else held[1].ctypes.data,
        at.BEST: 0 if greatest is None else greatest.ctypes.data,
        at.BY_BEST: 0 if greatest is None else greatest.strides[0],
        at.FUNCTION: function, at.FACTORS: two_floats(factor, cap),
    }  # fmt: skip
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(operation(Op.PRODUCT, kernel))
    function(assemble([fields]).ctypes.data, 0, len(x), 0, scratch.ctypes.data)
    return out


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("columns", "inputs"), [(48, 64), (16, 2), (1, 1), (50, 37), (257, 96), (131, 2500)])
@pytest.mark.parametrize("num_rows", [13, 45])
def test_odd_shapes(num_rows: int, columns: int, inputs: int, kernel: Kernel) -> None:
    """No multiples of blocks, words or pieces of k."""
    weight, x = random(columns, inputs, dtype=dtype_of(kernel)), random(num_rows, inputs, seed=1)
    if kernel in TAKES_HALVES:
        x = x.bfloat16().float()
    expected = x.double() @ weight.double().T
    assert np.abs(multiply(x.numpy(), [weight], kernel) - expected.numpy()).max() < 1e-6 * inputs


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_greatest_of_each_part_is_noted(kernel: Kernel) -> None:
    """By their values: of numbers of all kinds, the zeros of both signs and what is no number among them."""
    values = np.random.default_rng(0).choice([0.0, -0.0, 1.5, -2.0, -np.inf, 3e38, -3e38], 1000).astype(np.float32)
    values[:150] = -np.abs(values[:150]) - 1.0
    values[400], values[600], values[700:800] = np.nan, np.inf, -np.inf
    width = columns_at_once(kernel)
    weight, x = torch.from_numpy(values)[:, None].to(dtype_of(kernel)), np.array([[1.0], [0.5], [1.0]], np.float32)
    greatest = np.empty((-(-1000 // width), len(x)), np.float32)
    found = multiply(x, [weight], kernel, greatest=greatest)
    for part, noted in enumerate(greatest):
        assert np.array_equal(noted, found[:, part * width : (part + 1) * width].max(axis=1), equal_nan=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_has_the_same_bits_among_any_others(kernel: Kernel) -> None:
    weight, x = random(100, 2300, dtype=dtype_of(kernel)), random(150, 2300, seed=1).numpy()
    every = multiply(x, [weight], kernel)
    for first, count in ((0, 1), (3, 2), (5, 4), (0, 7), (9, 8), (20, 16), (1, 63), (0, 64), (10, 65), (17, 133)):
        assert np.array_equal(multiply(x[first : first + count], [weight], kernel), every[first : first + count])


def test_what_follows_a_product() -> None:
    gate, up, x = random(70, 40), random(70, 40, seed=1), random(9, 40, seed=2)
    one, other, base = random(70, seed=3), random(70, seed=4), random(9, 70, seed=5)
    found = multiply(x.numpy(), [gate, up], biases=(one, other), function=Function.SILU, factor=0.5)
    expected = torch.nn.functional.silu(x @ gate.T + one) * (x @ up.T + other) * 0.5
    assert np.abs(found - expected.numpy()).max() < 1e-4
    found = multiply(x.numpy(), [gate], biases=(one, None), base=base.numpy(), factor=3.0)
    assert np.abs(found - (base + 3.0 * (x @ gate.T + one)).numpy()).max() < 1e-4
    found = multiply(x.numpy(), [gate], cap=2.0)
    assert np.abs(found - (2.0 * torch.tanh(x @ gate.T / 2.0)).numpy()).max() < 1e-5


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Function.SILU, torch.nn.functional.silu),
        (Function.GELU, torch.nn.functional.gelu),
        (Function.GELU_TANH, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        (Function.RELU, torch.relu),
        (Function.SIGMOID, torch.sigmoid),
        (Function.TANH, torch.tanh),
        (Function.QUICK_GELU, lambda x: x * torch.sigmoid(1.702 * x)),
    ],
)
def test_functions(function: Function, expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.linspace(-0.2, 0.2, 999)])[:, None]
    found = torch.from_numpy(multiply(x.numpy(), [torch.ones(1, 1)], function=function))
    assert (found - expected(x)).abs().max() < 1e-6
    assert np.isnan(multiply(np.full((1, 1), np.nan, np.float32), [torch.ones(1, 1)], function=function)).all()


def test_a_number_that_is_not_finite_stays_in_its_row() -> None:
    weight, x = random(64, 48), random(16, 48, seed=1).numpy()
    clean = multiply(x, [weight])
    x[5, 7], x[9, 3] = np.nan, np.inf
    found = multiply(x, [weight])
    assert np.isnan(found[5]).all()
    assert not np.isfinite(found[9]).any()
    others = [row for row in range(16) if row not in (5, 9)]
    assert np.array_equal(found[others], clean[others])


@pytest.mark.skipif(WIDTH < 16, reason="such instructions come with vectors of 16")
@pytest.mark.parametrize("kernel", [pytest.param(Kernel.PAIRS, marks=pytest.mark.extended), Kernel.TILES])
def test_products_by_instructions_that_this_processor_may_lack(kernel: Kernel, tmp_path: Path) -> None:
    """Tiles: the above once more, where these instructions are emulated, which they are on one thread only. Pairs: a
    whole model on two threads, whose norms then give bfloat16.
    """
    environment = {**os.environ, "EMULATED_KERNEL": kernel.name, "NUMBA_CACHE_DIR": str(tmp_path)}
    if kernel == BF16_KERNEL:
        pytest.skip("it has them")
    tests = ["tests/program/test_product.py", "-k", f"{kernel.name} and (shapes or bits)"]
    if kernel == Kernel.PAIRS:
        tests = ["tests/program/test_model.py", "-k", "two_threads and qwen3"]
    options = ["-q", "-p", "tests.program.emulated_matrices", "-p", "no:cacheprovider", "--override-ini", "addopts="]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests, *options], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
