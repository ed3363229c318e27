"""Records experts on a tape: transformers calls a registered function for them, as it does for attention.

Each experts module becomes two calls, with the model's own gate operators between them. These operators run on one row
for each row of the forward, which stands for that row's pairs with experts.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from batchserve.program.tape import Call, UnsuitableModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UP, DOWN = "experts_up", "experts_down"  # arguments: x, index [rows, k], weight, bias; of DOWN also weights [rows, k]
IMPLEMENTATION = "batchserve_program"


@contextmanager
def record_experts(model: torch.nn.Module, note: Callable[[Call], None]) -> Iterator[None]:
    """Records the calls of the model's experts instead of computing them."""
    modules = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    if not modules:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def forward(
        module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return _forward(note, module, hidden_states, top_k_index, top_k_weights)

    configs: dict[int, Any] = {id(module.config): module.config for module in modules}
    before = {key: config._experts_implementation for key, config in configs.items()}
    ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = forward
    try:
        for config in configs.values():
            config._experts_implementation = IMPLEMENTATION
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = before[key]
        del ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION]


def _forward(
    note: Callable[[Call], None], module: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    if module.has_post_expert_norm or module._is_expert_parallel:
        raise UnsuitableModelError("experts with a norm of their own, or of several processes")
    up, up_bias = _parameters(module, "gate_up_proj" if module.has_gate else "up_proj")
    down, down_bias = _parameters(module, "down_proj")
    first = _empty(x, up.shape[1])
    note(Call(UP, None, (x, index, up, up_bias), {}, (first,)))
    gated = module._apply_gate(first) if module.has_gate else module.act_fn(first)
    out = _empty(x, down.shape[1])
    note(Call(DOWN, None, (gated, index, down, down_bias, weights), {}, (out,)))
    return out


def _parameters(module: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (weights [num_experts, outputs, inputs], biases [num_experts, outputs] or None)."""
    weight: torch.Tensor = getattr(module, name).detach()
    with torch._C._DisableTorchDispatch():
        weight = weight.transpose(1, 2) if module.is_transposed else weight
    return weight, getattr(module, f"{name}_bias").detach() if module.has_bias else None


def _empty(x: torch.Tensor, width: int) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return torch.zeros(len(x), width, dtype=x.dtype)
