"""Generic modules swapped for faster ones of the same function: prepacked linears and fused norms. CPU only.

Nothing here knows a model: a module is swapped by what it is (a Linear, a Conv1D) or by what it measurably does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import torch
from transformers.pytorch_utils import Conv1D

from batchserve.runner.norm_kernel import rms_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Norm = TypeVar("Norm", bound=torch.nn.Module)

ROWS_HINT = 16  # rows that the packed layout is chosen for; any number works afterwards


SAME_ORDER_ROWS = 32  # up to so many rows oneDNN sums every element in the same order, beside AMX too


class PackedLinear(torch.nn.Module):
    """A linear layer over weights in oneDNN's blocked layout: bit-identical rows for any number of rows >= 2.

    Not so in bfloat16 beside AMX: beyond SAME_ORDER_ROWS the order in which an element is summed depends on the number
    of rows, and a few are rounded otherwise. Where is_split is set, they are multiplied in pieces of at
    most so many rows: the bits are the same then, and weights are read once a piece.
    """

    is_split = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_HINT)
        self.bias = None if bias is None else bias.detach()
        self._apply_packed = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_split and x.shape[-2] > SAME_ORDER_ROWS:
            return torch.cat([self._multiply(piece) for piece in x.split(piece_sizes(x.shape[-2]), dim=-2)], dim=-2)
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._apply_packed(x, self.packed, self.bias, "none", [], "")
        return out


def piece_sizes(num_rows: int) -> list[int]:
    """Rows of each piece, of more than SAME_ORDER_ROWS in all: none has a single row, which takes another kernel."""
    full, rest = divmod(num_rows, SAME_ORDER_ROWS)
    if rest == 1:
        return [SAME_ORDER_ROWS] * (full - 1) + [SAME_ORDER_ROWS - 1, 2]
    return [SAME_ORDER_ROWS] * full + [rest] * (rest > 0)


def split_linears(model: torch.nn.Module) -> None:
    """From now on no packed linear's bits depend on the number of rows; the model is changed in place."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.is_split = True


@torch.inference_mode()
def compile_for(model: torch.nn.Module, counts: Iterable[int], most_seconds: float) -> int:
    """Multiply so many rows by every shape of packed linear once; the last count that there was time for, or 0.

    oneDNN compiles code for each number of rows when it first sees it, which makes that step longer, and keeps it for
    all linears of the same shape.
    """
    linears = {
        (each.out_features, each.in_features, each.bias is None): each
        for each in model.modules()
        if isinstance(each, PackedLinear)
    }
    until, done = time.monotonic() + most_seconds, 0
    for count in counts:
        if not linears or time.monotonic() >= until:
            break
        for each in linears.values():
            each(torch.zeros(count, each.in_features, dtype=each.packed.dtype))
        done = count
    return done


class FusedRMSNorm(torch.nn.Module):
    """x / rms(x) * weight in one kernel."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight.detach().float().contiguous()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packing works here for this dtype."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        PackedLinear(torch.ones(16, 16, dtype=dtype), None)(torch.ones(4, 16, dtype=dtype))
    except RuntimeError:
        return False
    return True


@torch.inference_mode()
def pack_modules(model: torch.nn.Module) -> tuple[int, int]:
    """Swap every linear and every norm that can be; returns (linears, norms) swapped. The model is changed in place."""
    linears = norms = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            swapped = _swapped(child)
            if swapped is not None:
                setattr(parent, name, swapped)
                linears += isinstance(swapped, PackedLinear)
                norms += isinstance(swapped, FusedRMSNorm)
    return linears, norms


def _swapped(module: torch.nn.Module) -> torch.nn.Module | None:
    if type(module) is torch.nn.Linear:
        return PackedLinear(module.weight, module.bias)
    if type(module) is Conv1D:
        return PackedLinear(module.weight.t(), module.bias)
    if type(module).__name__.endswith("RMSNorm"):
        return norm_scale(module, FusedRMSNorm)
    return None


def norm_scale(module: torch.nn.Module, norm: Callable[[torch.Tensor, float], Norm]) -> Norm | None:
    """norm(scale, eps) if it gives the same values (scaled by the weight, or 1 + weight); decided by trying."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, weight.shape[0], generator=generator).to(weight.device, weight.dtype)
    expected = module(x).float()
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    for scale in (weight, 1.0 + weight.float()):
        fused = norm(scale, eps)
        if torch.allclose(fused(x).float(), expected, rtol=tolerance, atol=tolerance):
            return fused
    return None
