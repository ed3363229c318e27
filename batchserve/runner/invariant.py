"""Activations whose every element comes out with the same bits, wherever it stands and however many threads there are.

ATen computes SiLU and GELU with vector instructions, and what is left over at the end of each thread's part with others
that round differently: so a row's bits depend on how many rows there are. Exponential, error function and hyperbolic
tangent have no such ends, nor have the four basic operations; the same functions are put together from these.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

TOLERANCE = 1e-5  # of float32, on inputs of some units


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / torch.exp(-x).add_(1.0)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.erf(x * math.sqrt(0.5)).add_(1.0).mul_(x).mul_(0.5)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    inner = (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x / torch.exp(-1.702 * x).add_(1.0)


class InvariantActivation(torch.nn.Module):
    """An activation in float32, put together from operations that are the same for every element."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x.float()).to(x.dtype)


@torch.inference_mode()
def fix_activations(model: torch.nn.Module) -> int:
    """Swap every module that measurably is such an activation; returns how many. The model is changed in place."""
    swapped = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            function = _function_of(child)
            if function is not None:
                setattr(parent, name, InvariantActivation(function))
                swapped += 1
    return swapped


def _function_of(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What an activation module computes, decided by trying; a module with state of its own is none."""
    if not any(word in type(module).__name__.lower() for word in ("silu", "swish", "gelu")):
        return None
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return None
    x = torch.linspace(-12.0, 12.0, 997)
    expected = module(x)
    for function in (_silu, _gelu, _gelu_tanh, _quick_gelu):
        if torch.allclose(function(x), expected, rtol=TOLERANCE, atol=TOLERANCE):
            return function
    return None
