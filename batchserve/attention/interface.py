"""Connects unmodified modelling code to our attention: one function in transformers' AttentionInterface.

The step's backend is passed as a keyword argument of the forward. No mask function is registered under our name, so the
models skip building their own masks.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from batchserve.attention.base import AttentionBackend, AttentionParams, LayerShape
from batchserve.attention.custom_op import LAYER, LayerAttention
from batchserve.errors import UnsupportedModelError

ATTENTION_NAME = "batchserve"
STEP_ARGUMENT = "batchserve_step"

# Arguments of modelling code that do not change the result of inference attention over our own K/V.
IRRELEVANT_ARGUMENTS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "is_causal",
        "layer_idx",
        "logits_to_keep",
        "return_dict",
    }
)


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | torch.Tensor | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Calls the step's backend; see AttentionBackend.attend. Raises UnsupportedModelError for unsupported arguments."""
    backend: AttentionBackend | None = kwargs.pop(STEP_ARGUMENT, None)
    if backend is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not hand keyword arguments down to its attention")
    unknown = sorted(n for n, v in kwargs.items() if v is not None and n not in IRRELEVANT_ARGUMENTS)
    if unknown:
        raise UnsupportedModelError(f"{type(module).__name__} passes {', '.join(unknown)}: not known to this attention")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} builds a mask of its own")
    if dropout:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks for dropout = {dropout}: the model is in training mode"
        )
    layer: Any = getattr(module, LAYER) if isinstance(backend, LayerAttention) else module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(scale, torch.Tensor):  # its value may change between calls
        scale = scale.item()
    # All heads may share one sink, but compiled kernels read one per head from contiguous memory.
    sinks = None if s_aux is None else s_aux.reshape(-1).expand(query.shape[1]).contiguous()
    params = AttentionParams(scale, sliding_window, softcap, sinks)
    return backend.attend(layer, query, key, value, params), None


def register() -> None:
    """Registers ATTENTION_NAME with transformers; may be called repeatedly."""
    AttentionInterface.register(ATTENTION_NAME, ragged_attention)


class ShapeProbe:
    """A stand-in backend that attends causally over one sequence and records what every layer asks for.

    is_own: bool [num_tokens], the sequence's rows (None: all rows); every other row is a sequence of its own.
    """

    def __init__(self, is_own: torch.Tensor | None = None) -> None:
        self.is_own = is_own
        self.calls: list[int] = []
        self.shapes: dict[int, LayerShape] = {}
        self.num_heads = 0  # query heads, the most of any layer
        self.has_sinks = False

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Rounds like transformers' eager attention, so that 16-bit outputs can be compared closely."""
        self.calls.append(layer)
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        self.num_heads = max(self.num_heads, query.shape[1])
        self.has_sinks |= params.sinks is not None
        group = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ keys.transpose(2, 3) * params.scaling
        if params.softcap is not None:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        every = torch.ones(key.shape[2], dtype=torch.bool, device=key.device)
        is_own = every if self.is_own is None else self.is_own
        where = is_own.cumsum(0)
        mask = (where[None, :] <= where[:, None]) & is_own[None, :] & is_own[:, None]
        if params.sliding_window is not None:
            mask &= where[None, :] > where[:, None] - params.sliding_window
        mask |= torch.eye(len(where), dtype=torch.bool, device=key.device)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if params.sinks is not None:
            sinks = params.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
            probs = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        else:
            probs = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        return (probs @ values).transpose(1, 2).contiguous()  # as in eager attention: models may call view() on it
