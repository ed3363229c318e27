"""The one call of the model, as every way of running it makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchserve.attention.interface import STEP_ARGUMENT

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def logits_of(
    model: PreTrainedModel, attention: Any, input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor
) -> torch.Tensor:
    """Logits [len(keep), vocab_size] of the rows `keep`; ids and positions [num_rows], all int64.

    attention is what the registered attention function is handed: a backend that has begun the step.
    """
    arguments: dict[str, Any] = {STEP_ARGUMENT: attention}
    output = model(
        input_ids=input_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=keep,
        **arguments,
    )
    logits: torch.Tensor = output.logits[0]
    return logits
