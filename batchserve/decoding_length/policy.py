"""The policies that decide what is drafted in a step: a fixed decoding length, or an adaptive one (adaptive.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from batchserve.decoding_length.acceptance import AcceptanceModel, Given

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.decoding_length.acceptance import FloatArray, IntArray
    from batchserve.decoding_length.step_time import StepLoad, StepTimeModel
    from batchserve.draft.forest import DraftForest
    from batchserve.request import Request

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


class Drafted(NamedTuple):
    """The requests of a step: those with a tree, and all that decode.

    requests, slots [num_trees]: the owners of the forest's trees. places int64 [num_trees]: their places among the
    decoding requests, whose slots and numbers of K/V entries are all_slots and contexts int64 [num_decoding].
    """

    requests: Sequence[Request]
    slots: IntArray
    places: IntArray
    all_slots: IntArray
    contexts: IntArray


@dataclass(slots=True)
class StepOutcome:
    """One step's loads and times: its load without drafts, that of its decoding rows alone, and the load that was run.

    step_s: from its beginning to its commit; forward_s: the part of it from launch to tokens; draft_s: that in which
    the drafters of num_asked requests were told and asked, and drafts chosen. num_forced: draft rows of tokens that
    grammars forced. is_trial: see StepHandle.
    """

    without: StepLoad
    decoding: StepLoad
    load: StepLoad
    step_s: float = 0.0
    forward_s: float = 0.0
    draft_s: float = 0.0
    num_asked: int = 0
    num_forced: int = 0
    is_trial: bool = False

    @property
    def host_s(self) -> float:
        """The host's time without drafting and without the forward."""
        return self.step_s - self.draft_s - self.forward_s


class DraftPolicy(Protocol):
    """Decides what is drafted in the steps of one engine. Keyed by the requests' slots; not thread-safe.

    In a step the engine calls `are_asked` for its decoding requests. If any is to be asked it calls `begin_step`,
    `bound` and `choose`. It calls `step_done` when the step is over. The methods that most policies do not need have
    defaults.
    """

    acceptance: AcceptanceModel  # scores the drafts

    def start(self, slot: int, drafter: str, tpot_target_s: float | None = None) -> None:
        """The request in this slot has draft state from now on, of this drafter."""

    def end(self, slot: int) -> None:
        """Forget a request. Does nothing if it is not known."""

    def skip(self, slot: int) -> None:
        """The request was preempted: the tokens that are reported next do not follow what was drafted."""

    def are_asked(self, slots: IntArray) -> BoolArray:
        """Returns whose drafter is to be called in this step. Called once a step and request."""
        return np.ones(len(slots), np.bool_)

    def windows_run(self, slots: IntArray) -> list[int]:
        """Returns the places of requests whose Jacobi window was run, if the policy wants to know what it earned."""
        return []

    def window_earned(self, slot: int, num_tokens: int) -> None:
        """So many accepted tokens were known from the window alone, in the last step in which it was run."""
        return

    def begin_step(self, load: StepLoad, alone: StepLoad, num_asked: int) -> bool:
        """Returns whether to draft in a step with this load without drafts; `alone`: that of its decoding rows."""
        return True

    def bound(self, slots: IntArray, bounds: IntArray, max_rows: int) -> FloatArray:
        """Bounds what each drafter is asked for. May lower the most nodes, bounds[:, 0] (forest.py: DraftQueries).

        Returns the least path probability that is of use, as the drafter claims it. max_rows: see `choose`.
        """
        return np.zeros(len(slots))

    def choose(self, forest: DraftForest, drafted: Drafted, max_rows: int) -> BoolArray:
        """Returns which nodes are run: bool [num_nodes]. max_rows: the most draft rows that the step can take."""
        ...

    def refused(self, slot: int) -> None:
        """The nodes chosen for the request are not run in this step: there is no memory for them."""
        return

    def step_done(self, outcome: StepOutcome, given: Given) -> None:
        """A step gave these tokens to the decoding requests."""

    def gauges(self) -> dict[str, float]:
        """The figures of metrics.GAUGES for the last step that was learned from. Any thread may ask."""
        return {}


def step_time_gauges(step_time: StepTimeModel, predicted_s: float, step_s: float) -> dict[str, float]:
    """The gauges of a step that took step_s: its predicted time, and the factors that predictions use."""
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
        self._last_s: tuple[float, float] | None = None  # of the last step: predicted, and taken

    def start(self, slot: int, drafter: str, tpot_target_s: float | None = None) -> None:
        self.acceptance.start(slot, drafter)

    def end(self, slot: int) -> None:
        self.acceptance.close(slot)

    def skip(self, slot: int) -> None:
        self.acceptance.close(slot)

    def choose(self, forest: DraftForest, drafted: Drafted, max_rows: int) -> BoolArray:
        places = np.arange(len(drafted.slots))
        self.acceptance.remember(self.acceptance.calibrate(forest.verified(), drafted.slots, places))
        return np.ones(len(forest.token_ids), np.bool_)

    def step_done(self, outcome: StepOutcome, given: Given) -> None:
        self.acceptance.arrive(given)
        if self._step_time is not None and not outcome.is_trial:
            predicted_s, _, _ = self._step_time.observe(outcome.load, outcome.forward_s, outcome.host_s)
            self._last_s = predicted_s + outcome.draft_s, outcome.step_s

    def gauges(self) -> dict[str, float]:
        step_time, last_s = self._step_time, self._last_s
        return {} if step_time is None or last_s is None else step_time_gauges(step_time, *last_s)
