"""The model as one compiled graph around opaque attention: for CUDA graphs, whose shapes are few."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchserve.attention.custom_op import OpaqueAttention
from batchserve.runner.forward import logits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from batchserve.attention.paged import PagedBackend

MOST_SHAPES = 128  # torch's own bound is 8 and is there to find programs that never stop compiling


class CompiledModel:
    """ModelRunner.run_model, compiled anew for every number of rows.

    compiler: a backend of torch.compile. A model that cannot be compiled whole raises torch's error, a RuntimeError.
    """

    def __init__(self, model: PreTrainedModel, backend: PagedBackend, compiler: str = "inductor") -> None:
        attention = OpaqueAttention(backend)

        def forward(input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return logits_of(model, attention, input_ids, positions, keep)

        self._forward = torch.compile(forward, fullgraph=True, dynamic=False, backend=compiler)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        with torch._dynamo.config.patch(recompile_limit=MOST_SHAPES):
            return self._forward(input_ids, positions, keep)
