"""The facts about a model that an engine needs, whatever computes its steps."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchserve.attention.base import LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Plain data. max_model_len: the model's own limit. defaults: of requests' sampling parameters, by
    name, from generation_config.json.

    configuration: the model's config.json as transformers has read it.
    """

    name: str
    architecture: str
    dtype: str
    layers: list[LayerShape]
    num_heads: int  # query heads, the most of any layer
    has_sinks: bool  # some layer has attention sinks
    vocab_size: int
    max_model_len: int
    num_parameters: int
    eos_token_ids: tuple[int, ...]
    defaults: Mapping[str, float]
    configuration: str

    def plain(self) -> ServedModel:
        """Returns a copy of only these fields."""
        return ServedModel(**{each.name: getattr(self, each.name) for each in fields(ServedModel)})
