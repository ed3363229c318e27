"""Rotary position embeddings: the longest context that they allow, and factors that depend on its length."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import CONFIG_NAME

from batchserve.errors import ConfigError
from batchserve.program.rotary import length_dependent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

FALLBACK_MAX_MODEL_LEN = 2048
LONGEST_MODEL_LEN = 1 << 31


def context_limit(text_config: Any) -> int:
    """Returns the longest context in tokens. YaRN and linear scaling extend the original one by their factor.

    The result may be outside of 2..LONGEST_MODEL_LEN, as a config may say anything.
    """
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    values = (getattr(text_config, name, None) for name in names)
    limit = next((value for value in values if isinstance(value, int) and value > 0), FALLBACK_MAX_MODEL_LEN)
    extended = [_extended(each, default) for each, default in _rope_parameters(text_config, limit)]
    return max(limit, *extended) if extended else limit


def _rope_parameters(text_config: Any, limit: int) -> list[tuple[Mapping[str, Any], int]]:
    """Returns (parameters, default original length) of all layers, or of each type of layer.

    Configs with parameters for each type of layer (gemma3) name the extended length, so their default is 0.
    """
    found = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    nested = [each for each in found.values() if isinstance(each, dict)]
    return [(each, 0) for each in nested] or [(found, limit)]


def _extended(rope: Mapping[str, Any], default: int) -> int:
    original, factor = rope.get("original_max_position_embeddings") or default, rope.get("factor")
    is_extending = rope.get("rope_type") in ("yarn", "linear")
    if not is_extending or not isinstance(factor, int | float) or not isinstance(original, int | float):
        return 0
    return int(original * factor) if original * factor <= LONGEST_MODEL_LEN else LONGEST_MODEL_LEN + 1


def check_rope_config(folder: Path) -> None:
    """Raises ConfigError if the rotary base of a config.json would be lost.

    transformers prefers `rope_scaling` to `rope_parameters`. A base that is only in the latter becomes a default.
    """
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # transformers reports the error
    whole = config if isinstance(config, dict) else {}
    for each in (whole, whole.get("text_config")):
        if not isinstance(each, dict):
            continue
        legacy, parameters = each.get("rope_scaling"), each.get("rope_parameters")
        if legacy and parameters and "rope_theta" in parameters and "rope_theta" not in {*legacy, *each}:
            raise ConfigError(
                f"{folder / CONFIG_NAME}: rope_scaling beside rope_parameters, whose rope_theta would be ignored; move "
                "the fields of rope_scaling into rope_parameters"
            )


@dataclass(slots=True)
class ServedLength:
    """The longest length that is served, in tokens, for rotary modules whose factors depend on the longest position of
    a batch (LongRoPE). They always see this length, so that no request changes the factors of another one.

    Dynamic NTK does not need this: its factors are constant up to max_position_embeddings, the longest that is served.
    """

    longest: int
    is_needed: bool = False  # whether the model has such modules

    def watch(self, model: torch.nn.Module) -> None:
        """Wraps the model's rotary modules to pass them `longest`, which may still be changed."""
        for module in length_dependent(model):
            self.is_needed = True
            module.forward = partial(self._forward, module.forward)

    def _forward(
        self, forward: Callable[..., Any], x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        """Returns cosines and sines [..., num_tokens, dim], or both in one tensor, without those of the added row."""
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self.longest - 1)
        output = forward(x, torch.cat([position_ids, last], dim=-1), *args, **options)
        if isinstance(output, torch.Tensor):
            return output[..., :-1, :]
        return tuple(each[..., :-1, :] for each in output)
