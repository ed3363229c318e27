"""Activations that give an element the same bits wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers.activations import ACT2FN

from batchserve.runner.invariant import InvariantActivation, fix_activations

NAMES = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu")


@pytest.fixture(params=[1, 3, 4])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def fixed(activation: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Sequential(activation)
    assert fix_activations(model) == 1
    return model


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_same_bits_in_any_number_of_rows(name: str, dtype: torch.dtype, num_threads: int) -> None:
    activation = fixed(ACT2FN[name])
    for width in (100, 1001):  # with one thread, and large enough for several
        x = (4 * torch.randn(199, width, generator=torch.Generator().manual_seed(1))).to(dtype)
        whole = activation(x)
        for start, count in ((0, 4), (3, 7), (40, 8), (1, 65), (100, 97), (2, 131)):
            assert torch.equal(whole[start : start + count], activation(x[start : start + count]))


@torch.inference_mode()
@pytest.mark.parametrize("name", NAMES)
def test_the_function_is_the_same(name: str) -> None:
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])])
    torch.testing.assert_close(fixed(ACT2FN[name])(x), ACT2FN[name](x), rtol=1e-5, atol=1e-5)
    assert fixed(ACT2FN[name])(torch.tensor([float("nan")])).isnan().all()


@torch.inference_mode()
def test_other_modules_stay_what_they_are() -> None:
    class ScaledSiLU(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.5 * torch.nn.functional.silu(x)

    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 4), ScaledSiLU())
    assert fix_activations(model) == 0
    assert not any(isinstance(module, InvariantActivation) for module in model.modules())
