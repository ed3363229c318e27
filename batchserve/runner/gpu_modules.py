"""Swaps a model's linears and norms for our own kernels, on a GPU.

Nothing here depends on the model: a module is swapped by its type, or by what it measurably computes.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch

from batchserve.gpu.linears import DTYPES, RowLinear, Shape
from batchserve.gpu.norms import RowNorm
from batchserve.runner.fused_linears import has_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.gpu.linears import Choices

Norm = TypeVar("Norm", bound=torch.nn.Module)


class SwappedModules:
    """The swapped modules of a model and their originals. The model is changed in place.

    Every linear and every norm of whole rows is swapped if possible. Norms of heads are kept, as a compiler fuses them
    with the operations around them.
    """

    def __init__(self, model: torch.nn.Module, choices: Choices) -> None:
        self.choices = choices
        self._model = model
        self._were: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []  # parent, name, child

    def __len__(self) -> int:
        return len(self._were)

    @torch.inference_mode()
    def swap(self, hidden_size: int) -> dict[Shape, list[torch.Tensor]]:
        """Swaps the modules. Returns the weights of the swapped linears, by shape."""
        found: dict[Shape, list[torch.Tensor]] = {}
        if importlib.util.find_spec("triton") is None:
            return found
        for parent in list(self._model.modules()):
            for name, child in list(parent.named_children()):
                if _is_linear(child):
                    self._put(parent, name, RowLinear(child, self.choices))
                    found.setdefault(Shape.of(child.weight), []).append(child.weight)
                elif norm := _row_norm(child, hidden_size, self.choices.overlaps):
                    self._put(parent, name, norm)
        return found

    def undo(self) -> None:
        """Restores all modules."""
        for parent, name, child in self._were:
            setattr(parent, name, child)
        self._were.clear()

    def _put(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        self._were.append((parent, name, getattr(parent, name)))
        setattr(parent, name, module)


def _is_linear(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    return (
        type(module) is torch.nn.Linear
        and module.weight.dtype in DTYPES
        and module.weight.is_contiguous()
        and not _is_changed(module)
    )


def _row_norm(module: torch.nn.Module, hidden_size: int, overlaps: bool) -> RowNorm | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.nn.Parameter) or weight.shape != (hidden_size,) or weight.dtype not in DTYPES:
        return None
    if not type(module).__name__.endswith("RMSNorm") or _is_changed(module):
        return None

    def norm(scale: torch.Tensor, eps: float) -> RowNorm:
        return RowNorm(weight, scale, eps, overlaps=False)  # no overlap: the kernel before it has just made its scale

    found = norm_scale(module, norm)
    if found is not None:
        found.overlaps = overlaps
    return found


def _is_changed(module: torch.nn.Module) -> bool:
    """True if hooks or a replaced forward change what the module does. A swap would lose them."""
    return has_hooks(module) or "forward" in vars(module)


def norm_scale(module: torch.nn.Module, norm: Callable[[torch.Tensor, float], Norm]) -> Norm | None:
    """Returns norm(scale, eps) if it gives the module's values, scaled by weight or 1 + weight. Decided by trial."""
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
