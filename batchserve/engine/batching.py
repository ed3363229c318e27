"""Makes the ragged batch of a step from its plan and its drafts."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from batchserve.runner.ragged_batch import RaggedBatch, flatten
from batchserve.runner.row_layout import ALL
from batchserve.scheduler.plan import COMPUTED, IS_SAMPLED, PENDING

if TYPE_CHECKING:
    import numpy as np

    from batchserve.draft.forest import DraftForest
    from batchserve.request import ResolvedSampling
    from batchserve.scheduler.plan import SchedulerOutput


def batch_of(plan: SchedulerOutput, drafts: DraftForest, last_tokens: np.ndarray, *, has_unusual: bool) -> RaggedBatch:
    """Returns the rows of a step. drafts: a tree for every scheduled request, empty ones included.

    last_tokens: by slot. has_unusual: some request changes logits, or asks for the log probabilities of its prompt.
    """
    heads = plan.columns[:, : IS_SAMPLED + 1]
    if plan.is_all_decoding:
        pending: Any = last_tokens[plan.slots]
        samplings: list[ResolvedSampling | None] = [request.sampling for request in plan.requests]
    else:
        parts = zip(plan.requests, heads.tolist(), strict=True)
        pending = [*chain.from_iterable(r.token_ids[start : start + count] for r, (start, count, _) in parts)]
        is_sampled = plan.columns[:, IS_SAMPLED].tolist()
        samplings = [r.sampling if sampled else None for r, sampled in zip(plan.requests, is_sampled, strict=True)]
    if not has_unusual:
        return flatten(plan.request_ids, samplings, heads, pending, drafts)
    prompts = _wanted_prompts(plan)
    heads = heads.copy()
    heads[[*prompts], IS_SAMPLED] |= ALL
    batch = flatten(plan.request_ids, samplings, heads, pending, drafts)
    each = enumerate(request.adjustments for request in plan.requests)
    batch.adjustments = {place: adjustments for place, adjustments in each if adjustments is not None}
    batch.prompts = prompts
    return batch


def _wanted_prompts(plan: SchedulerOutput) -> dict[int, tuple[list[int], int]]:
    """Returns RaggedBatch.prompts."""
    found = {}
    for place, request in enumerate(plan.requests):
        num_tops = request.sampling.prompt_logprobs
        if num_tops is not None:
            start, count = plan.columns[place, [COMPUTED, PENDING]].tolist()
            if tokens := request.wanted_tokens(start, count):
                found[place] = tokens, num_tops
    return found
