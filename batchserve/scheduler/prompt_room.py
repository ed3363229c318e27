"""How much of prompts a step may carry beside those who are already answering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.decoding_length.step_time import StepLoad
from batchserve.decoding_length.time_kernels import fitting_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchserve.decoding_length.step_time import StepTimeModel
    from batchserve.request import Request

MIN_CHUNK = 4  # rows: prompts go on, whatever the bound
CHUNK_STEP = 4


@dataclass(slots=True)
class StepBound:
    """What a step with prompts may take: its decoding requests and the draft rows to be expected with them.

    decoding: the load of their plain rows. The step may become max_inflation times as long as with these and drafts,
    and may take max_step_s without drafts, which come after prompts.
    """

    step_time: StepTimeModel
    decoding: StepLoad
    num_draft_rows: int
    max_inflation: float
    max_step_s: float

    @classmethod
    def beside(
        cls,
        step_time: StepTimeModel,
        decoding: Iterable[Request],
        num_draft_rows: int,
        max_inflation: float,
        max_step_s: float,
    ) -> StepBound:
        contexts = [request.num_computed_tokens for request in decoding]
        count, context = len(contexts), sum(contexts)
        load = StepLoad(count, count, count, context, context)
        return cls(step_time, load, num_draft_rows, max_inflation, max_step_s)


class PromptRoom:
    """The rows of one step that prompts may take, handed out one prompt after the other.

    Rows behind a long context take longer, be it cached or computed: so each prompt is given what fits beside those
    before it. Never less than MIN_CHUNK in all, and never more than max_rows.
    """

    def __init__(self, max_rows: int, bound: StepBound | None = None) -> None:
        self._max_rows = max_rows
        self._bound = bound  # None: nobody answers, or nothing is known of times
        self._taken = StepLoad(0, 0, 0)

    def rows_for(self, num_tokens: int, context_len: int) -> int:
        """How many of a prompt's next tokens a step takes; context_len of it are computed or cached."""
        most, least = self._max_rows - self._taken.num_rows, max(0, MIN_CHUNK - self._taken.num_rows)
        bound, wanted = self._bound, min(num_tokens, most)
        if bound is None or wanted <= least:
            return wanted
        what = tuple(bound.decoding), tuple(self._taken), bound.num_draft_rows, context_len
        sizes, limits = (least, CHUNK_STEP, most), (bound.max_inflation, bound.max_step_s)
        fitting: int = fitting_rows(bound.step_time.arrays, what, sizes, limits)
        return min(wanted, fitting)

    def take(self, num_rows: int, context_len: int) -> None:
        """A prompt with so many tokens behind it gets these rows."""
        taken = self._taken
        self._taken = StepLoad(
            taken.num_rows + num_rows,
            0,  # the head runs on the last of a prompt's rows at most
            taken.num_requests + 1,
            taken.context_tokens + context_len,
            taken.attended_tokens + num_rows * context_len,
        )
