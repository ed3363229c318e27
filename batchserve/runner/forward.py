"""The model call that every way of running the model shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchserve.attention.interface import STEP_ARGUMENT

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def logits_of(
    model: PreTrainedModel, attention: Any, input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor
) -> torch.Tensor:
    """Returns the logits [len(keep), vocab_size] of the rows `keep`. Ids and positions are [num_rows]; all are int64.

    attention: passed to the registered attention function; a backend that has begun the step.
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
