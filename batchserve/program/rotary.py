"""Records rotary modules whose factors depend on the longest context (LongRoPE) as one call each.

Their own code writes to constants while it runs, but each module as a whole is a function of positions.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from batchserve.program.tape import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROTARY = "rotary"  # arguments: positions


def length_dependent(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the rotary modules that choose their factors by the longest position they are given."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if "longrope" in (kinds.values() if isinstance(kinds, dict) else (kinds,)):
            found.append(module)
    return found


@contextmanager
def record_rotary(model: torch.nn.Module, note: Callable[[Call], None]) -> Iterator[None]:
    """Records the calls of such modules, but not the operators that they call."""
    modules = length_dependent(model)
    before = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = _noted(module.forward, note)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _noted(forward: Callable[..., Any], note: Callable[[Call], None]) -> Callable[..., Any]:
    def noted(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        like = torch.empty(1, dtype=x.dtype)  # only the type of x is used

        def compute(positions: torch.Tensor) -> Any:
            return forward(like, positions, *args, **options)

        with torch._C._DisableTorchDispatch():
            results = compute(position_ids)
        tensors = (results,) if isinstance(results, torch.Tensor) else tuple(results)
        note(Call(ROTARY, compute, (position_ids,), {}, tensors))
        return results

    return noted
