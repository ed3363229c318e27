"""The registered attention function refuses whatever would make answers silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchserve.attention.base import AttentionParams
from batchserve.attention.interface import STEP_ARGUMENT, ShapeProbe, ragged_attention
from batchserve.errors import UnsupportedModelError


class Layer(torch.nn.Module):
    layer_idx = 0


def call(mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    out, weights = ragged_attention(Layer(), query, key, key, mask, **{STEP_ARGUMENT: ShapeProbe(), **kwargs})
    assert weights is None
    return out


def test_a_plain_call_gives_tokens_by_heads() -> None:
    assert call(scaling=0.3, position_ids=None, use_cache=False).shape == (1, 5, 4, 8)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"alibi": torch.ones(4)}, "alibi"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"mask": torch.zeros(1, 1, 5, 5)}, "mask"),
        ({STEP_ARGUMENT: None}, "keyword arguments"),
    ],
)
def test_surprises_are_refused_by_name(kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        call(**kwargs)


def test_an_unknown_argument_that_is_none_says_nothing() -> None:
    assert call(alibi=None).shape == (1, 5, 4, 8)


class Recording:
    """A backend that keeps the parameters it is given."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        self.params = params
        return torch.zeros(1, query.shape[2], query.shape[1], value.shape[3])


def test_backends_get_a_number_as_scale_and_a_sink_for_each_head() -> None:
    backend, learned = Recording(), torch.nn.Parameter(torch.tensor(0.5))
    call(scaling=learned, s_aux=torch.tensor([3.0]), **{STEP_ARGUMENT: backend})
    assert type(backend.params.scaling) is float
    assert backend.params.scaling == 0.5
    assert backend.params.sinks is not None
    assert backend.params.sinks.tolist() == [3.0] * 4
    assert backend.params.sinks.is_contiguous()
    with pytest.raises(RuntimeError, match="must match"):
        call(s_aux=torch.zeros(3), **{STEP_ARGUMENT: backend})
