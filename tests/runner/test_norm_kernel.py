"""The compiled RMS norm against its definition, and bit by bit against itself among other rows."""

from __future__ import annotations

import pytest
import torch

from batchserve.runner.norm_kernel import rms_norm

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16]


def some_rows(num_rows: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows * dim)
    return torch.randn(1, num_rows, dim, generator=generator).to(dtype) * 3, torch.rand(dim, generator=generator) + 0.5


def literal(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 7, 32, 100, 768])
def test_rows_are_normalised_and_rounded_once(dim: int, dtype: torch.dtype) -> None:
    x, weight = some_rows(9, dim, dtype)
    found, expected = rms_norm(x, weight, EPS), literal(x, weight)
    assert (found.shape, found.dtype) == (x.shape, dtype)
    # Half a unit in the last place, and a little for what float32 is off before it is rounded.
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps * 0.51 + 1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_bits_do_not_depend_on_the_others_nor_on_strides(dtype: torch.dtype) -> None:
    x, weight = some_rows(70, 48, dtype)
    found = rms_norm(x, weight, EPS)
    for start, end in ((0, 1), (3, 5), (7, 40), (69, 70)):
        assert torch.equal(rms_norm(x[:, start:end], weight, EPS), found[:, start:end])
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert not transposed.is_contiguous()
    assert torch.equal(rms_norm(transposed, weight, EPS), found)
    heads = x.view(1, 70, 4, 12)  # norms of heads have one more dimension
    assert torch.equal(
        rms_norm(heads, weight[:12], EPS), rms_norm(heads.reshape(1, 280, 12), weight[:12], EPS).view(1, 70, 4, 12)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float, dtype: torch.dtype) -> None:
    x, weight = some_rows(5, 64, dtype)
    clean = rms_norm(x, weight, EPS)
    x[0, 2, 17] = bad
    found = rms_norm(x, weight, EPS)
    assert found[0, 2, 17].isnan()
    others = [0, 1, 3, 4]
    assert torch.equal(found[0, others], clean[0, others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    assert rms_norm(torch.empty(1, 0, 16, dtype=dtype), torch.ones(16), EPS).shape == (1, 0, 16)
