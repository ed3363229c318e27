"""A model's linears and norms swapped for kernels of our own, on a GPU.

Nothing here knows a model: a module is swapped by what it is, or by what it measurably does.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, TypeGuard

import torch

from batchserve.gpu.linears import DTYPES, RowLinear, Shape
from batchserve.gpu.norms import RowNorm
from batchserve.runner.packed import norm_scale

if TYPE_CHECKING:
    from batchserve.gpu.linears import Choices


@torch.inference_mode()
def swap_for_gpu(model: torch.nn.Module, hidden_size: int, choices: Choices) -> dict[Shape, list[torch.Tensor]]:
    """Swap every linear, and every norm of whole rows, that can be; the linears' weights by shape.

    The model is changed in place. Norms of heads stay: a compiler makes one kernel of them and of what is around them.
    """
    found: dict[Shape, list[torch.Tensor]] = {}
    if importlib.util.find_spec("triton") is None:
        return found
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_linear(child):
                setattr(parent, name, RowLinear(child, choices))
                found.setdefault(Shape.of(child.weight), []).append(child.weight)
            elif norm := _row_norm(child, hidden_size, choices.overlaps):
                setattr(parent, name, norm)
    return found


def _is_linear(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    return (
        type(module) is torch.nn.Linear
        and module.weight.dtype in DTYPES
        and module.weight.is_contiguous()
        and not _has_hooks(module)
    )


def _row_norm(module: torch.nn.Module, hidden_size: int, overlaps: bool) -> RowNorm | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.shape != (hidden_size,) or weight.dtype not in DTYPES:
        return None
    if not type(module).__name__.endswith("RMSNorm") or _has_hooks(module):
        return None

    def norm(scale: torch.Tensor, eps: float) -> RowNorm:
        return RowNorm(scale, eps, overlaps=overlaps)

    return norm_scale(module, norm)


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
