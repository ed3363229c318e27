"""Pictures of steps: the requests in the batch, the draft tree of each, and what was accepted of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.engine.messages import Seen

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.draft.forest import DraftForest
    from batchserve.engine.messages import Reply
    from batchserve.runner.ragged_batch import RaggedBatch
    from batchserve.sampling.verify import StepTokens
    from batchserve.scheduler.plan import SchedulerOutput

MIN_INTERVAL_S = 0.05  # between two steps that are shown


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One request in a step. request_id: with its tenant's name and a slash before it, if it has one.

    token_ids, parents: the draft tree, parents before their children, -1 under the last token. accepted: the nodes that
    were right, root to leaf. new_token_ids: what the step added to the answer. num_rows: of prompt and answer computed.
    """

    request_id: str
    drafter: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_rows: int
    token_ids: list[int]
    parents: list[int]
    accepted: list[int]
    new_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class SeenStep:
    """One step. step_s: how long it took."""

    step_s: float
    requests: list[RequestStep]


class StepWatch:
    """Takes pictures of steps, MIN_INTERVAL_S apart at least. There is none while nobody looks, and then no cost."""

    def __init__(self, send: Callable[[Reply], None]) -> None:
        self._send = send
        self._next_s = 0.0

    def look(
        self,
        plan: SchedulerOutput,
        drafts: DraftForest,
        batch: RaggedBatch,
        verified: StepTokens,
        began_s: float,
        now_s: float,
    ) -> None:
        """Sends a step that has been committed."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + MIN_INTERVAL_S
        seen = []
        for place, request in enumerate(plan.requests):
            nodes = slice(int(drafts.starts[place]), int(drafts.starts[place + 1]))
            num_pending, start = int(batch.num_pending[place]), int(verified.starts[place])
            num_accepted = max(0, int(verified.num_accepted[place]))
            accepted = [int(row) - num_pending for row in verified.rows[start : start + num_accepted]]
            is_sampled = int(verified.num_accepted[place]) >= 0
            new = verified.token_ids[start : start + num_accepted + 1].tolist() if is_sampled else []
            seen.append(
                RequestStep(
                    request.request_id,
                    request.speculation.drafter,
                    request.num_prompt_tokens,
                    request.num_output_tokens,
                    num_pending,
                    drafts.token_ids[nodes].tolist(),
                    drafts.parents[nodes].tolist(),
                    accepted,
                    new,
                )
            )
        self._send(Seen(SeenStep(now_s - began_s, seen)))
