"""Who decides what is drafted in a step: a decoding length of a fixed number, or an adaptive one (adaptive.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from batchserve.decoding_length.acceptance import AcceptanceModel, Given

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchserve.decoding_length.acceptance import FloatArray, IntArray
    from batchserve.decoding_length.step_time import StepLoad, StepTimeModel
    from batchserve.draft.forest import DraftForest
    from batchserve.request import Request

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(slots=True)
class StepOutcome:
    """What a step was and took: its load without drafts, that of its decoding rows alone, and what was run.

    step_s: from its beginning to its commit; forward_s: the part of it from launch to tokens; draft_s: that in which
    the drafters of num_asked requests were told and asked, and drafts chosen.
    """

    without: StepLoad
    decoding: StepLoad
    load: StepLoad
    step_s: float = 0.0
    forward_s: float = 0.0
    draft_s: float = 0.0
    num_asked: int = 0

    @property
    def host_s(self) -> float:
        """What is on no drafter's account, and on no row's."""
        return self.step_s - self.draft_s - self.forward_s


class DraftPolicy(Protocol):
    """Decides for one engine. Keyed by request id; not thread-safe.

    A step calls `are_asked` of its decoding requests; if any is to be asked, `begin_step`, their `bound` and `choose`;
    and `step_done` when it is over. What most policies have no use for does nothing here.
    """

    acceptance: AcceptanceModel  # what came of the drafts until now

    def start(self, request_id: str, drafter: str, tpot_target_s: float | None = None) -> None:
        """A request has draft state from now on, of this drafter."""

    def end(self, request_id: str) -> None:
        """Forget a request. Harmless where it is not known."""

    def skip(self, request_id: str) -> None:
        """The request's text goes on, but not with what is reported next: it was preempted."""

    def are_asked(self, request_ids: Sequence[str]) -> list[bool]:
        """Whose drafter is to be called in this step; once a step and request."""
        return [True] * len(request_ids)

    def windows_run(self, request_ids: Sequence[str]) -> list[str]:
        """Whose Jacobi window was run, of those of whom the policy wants to know what that earned."""
        return []

    def window_earned(self, request_id: str, num_tokens: int) -> None:
        """So many accepted tokens were known from its window alone, in the step in which that was run last."""
        return

    def begin_step(self, load: StepLoad, alone: StepLoad, num_asked: int) -> bool:
        """A step is to be drafted that is `load` without any drafts; `alone` are its decoding rows only.

        Whether anybody is to be asked.
        """
        return True

    def bound(self, request_ids: Sequence[str], bounds: IntArray, max_rows: int) -> FloatArray:
        """What to ask of each drafter: may lower the most nodes, bounds[:, 0] (forest.py: DraftQueries), and returns
        the path probability, as it claims it, of the least likely. max_rows: as in `choose`.
        """
        return np.zeros(len(request_ids))

    def choose(
        self, forest: DraftForest, request_ids: Sequence[str], decoding: Sequence[Request], max_rows: int
    ) -> BoolArray:
        """Which nodes are run: bool [num_nodes].

        The forest's trees are those of request_ids, of all that were asked; `decoding` are all the requests that decode
        in the step, and max_rows the most drafts that the step can take.
        """
        ...

    def refused(self, request_id: str) -> None:
        """What was chosen for the request in this step is not run: there is no memory for it."""
        return

    def step_done(self, outcome: StepOutcome, token_ids: Mapping[str, Sequence[int]]) -> None:
        """A step gave each decoding request these tokens."""

    def gauges(self) -> dict[str, float]:
        """Of the last step that was learned from, by the names of metrics.GAUGES. Any thread may ask."""
        return {}


def step_time_gauges(step_time: StepTimeModel, predicted_s: float, step_s: float) -> dict[str, float]:
    """What was predicted of a step that took step_s, and what predictions go by."""
    return {
        "predicted_step_seconds": predicted_s,
        "actual_step_seconds": step_s,
        "step_time_factor": step_time.factor,
        "host_seconds": step_time.host_s,
    }


class FixedDrafting(DraftPolicy):
    """Every node that a drafter proposes is run. Drafts are counted, and so are step times, which prompts go by."""

    def __init__(self, step_time: StepTimeModel | None = None) -> None:
        self.acceptance = AcceptanceModel()
        self._step_time = step_time
        self._slots: dict[str, int] = {}  # of `acceptance`, by request id
        self._last_s: tuple[float, float] | None = None  # of the last step: predicted, and taken

    def start(self, request_id: str, drafter: str, tpot_target_s: float | None = None) -> None:
        self._slots[request_id] = self.acceptance.start(drafter)

    def end(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self.acceptance.end(slot)

    def skip(self, request_id: str) -> None:
        slot = self._slots.get(request_id)
        if slot is not None:
            self.acceptance.close(slot)

    def choose(
        self, forest: DraftForest, request_ids: Sequence[str], decoding: Sequence[Request], max_rows: int
    ) -> BoolArray:
        slots = np.array([self._slots[each] for each in request_ids], np.int64)
        self.acceptance.remember(self.acceptance.calibrate(forest.verified(), slots, np.arange(len(slots))))
        return np.ones(len(forest.token_ids), np.bool_)

    def step_done(self, outcome: StepOutcome, token_ids: Mapping[str, Sequence[int]]) -> None:
        if self.acceptance.is_any_open:
            self.acceptance.arrive(Given.of(self._slots, token_ids))
        if self._step_time is not None:
            predicted_s, _, _ = self._step_time.observe(outcome.load, outcome.forward_s, outcome.host_s)
            self._last_s = predicted_s + outcome.draft_s, outcome.step_s

    def gauges(self) -> dict[str, float]:
        step_time, last_s = self._step_time, self._last_s
        return {} if step_time is None or last_s is None else step_time_gauges(step_time, *last_s)
