"""Linears of native products compute what the originals do, and give a row the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

from batchserve.runner.native_linear import DTYPES, NativeLinear, Workspace, swap_linears

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def rows(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (64, 96), (257, 33), (1, 7)])
def test_a_native_linear_is_the_linear(out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight = rows(out_features, in_features, dtype) / in_features**0.5
    bias = rows(1, out_features, dtype, 1)[0] if has_bias else None
    linear = NativeLinear(Workspace(), weight, bias)
    for count in (1, 2, 5, 40):
        x = rows(count, in_features, dtype, 2)
        torch.testing.assert_close(linear(x), F.linear(x, weight, bias), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert torch.equal(linear(x[None])[0], linear(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_a_row_has_the_same_bits_among_any_rows_and_on_any_number_of_threads(
    num_threads: int, dtype: torch.dtype
) -> None:
    linear, x = NativeLinear(Workspace(), rows(512, 2048, dtype), None), rows(130, 2048, dtype, 3)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = linear(x)
    torch.set_num_threads(num_threads)
    try:
        for start, count in ((0, 1), (0, 2), (1, 3), (5, 4), (60, 16), (3, 33), (64, 64), (0, 130)):
            assert torch.equal(linear(x[start : start + count]), whole[start : start + count]), (start, count)
    finally:
        torch.set_num_threads(before)


def test_linears_of_one_workspace_leave_each_others_rows_alone() -> None:
    workspace = Workspace()
    wide, narrow = (NativeLinear(workspace, rows(24, width, torch.float32), None) for width in (70, 67))
    for count in (3, 40, 2):
        for linear, width in ((wide, 70), (narrow, 67)):
            x = rows(count, width, torch.float32, count)
            expected = F.linear(x, rows(24, width, torch.float32))
            torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=1e-4)


def test_what_is_not_finite_stays_in_its_row() -> None:
    for dtype in DTYPES:
        linear, x = NativeLinear(Workspace(), rows(24, 37, dtype), None), rows(8, 37, dtype, 1)
        expected = linear(x)
        linear(torch.full((8, 37), torch.nan, dtype=dtype))
        x[3, 36] = torch.nan
        found = linear(x)
        assert found[3].isnan().all()
        others = [0, 1, 2, 4, 5, 6, 7]
        assert torch.equal(found[others], expected[others])


def test_linears_and_conv1d_are_swapped_and_subclasses_are_not() -> None:
    class Special(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = torch.nn.Sequential(torch.nn.Linear(16, 24), Conv1D(8, 24), Special(8, 8)).eval()
    x = rows(6, 16, torch.float32)
    with torch.inference_mode():
        expected = model(x)
        assert swap_linears(model, Workspace()) == 2
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert type(model[2]) is Special
