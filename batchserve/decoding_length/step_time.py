"""How long a step takes: t(rows, context tokens, requests), measured for the model and machine in hand.

The price list that the adaptive decoding length buys rows from; startup/measure_steps.py measures it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from batchserve.decoding_length.time_kernels import (
    HOST,
    LOG_FACTOR,
    NUM_SLOPES,
    first_covariance,
    learn_step,
    seconds_at,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ROWS = 1 << 31  # of a table
CRITICAL_RATIO = 1.25  # up to here rows count as free (Lookahead, KDD'24, definition 2 and its figure 1)


class StepLoad(NamedTuple):
    """What a step's time depends on.

    num_rows: all rows, drafts and prefill included; num_logit_rows: those that the head runs on; context_tokens: K/V
    entries that are read, each request's counted once; attended_tokens: pairs of a row and a K/V entry that it sees.
    """

    num_rows: int
    num_logit_rows: int
    num_requests: int
    context_tokens: int = 0
    attended_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepTimeTable:
    """Measured seconds. Between two numbers of rows it is linear; beyond the last one its slope goes on.

    rows, seconds: steps of one request with an empty context, all rows through the head. The rest is seconds for one
    more request, one more row through the head, one more K/V entry read, and one more pair of row and entry.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    per_request: float = 0.0
    per_logit_row: float = 0.0
    per_context_token: float = 0.0
    per_attended_token: float = 0.0

    def __post_init__(self) -> None:
        numbers = (*self.seconds, self.per_request, self.per_logit_row, self.per_context_token, self.per_attended_token)
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ValueError(f"a step time for each number of rows: got {len(self.rows)} and {len(self.seconds)}")
        if any(type(rows) is not int for rows in self.rows):
            raise ValueError(f"numbers of rows must be integers: got {self.rows}")
        if list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1 or self.rows[-1] > MAX_ROWS:
            raise ValueError(f"numbers of rows must rise from 1 to {MAX_ROWS} at most: got {self.rows}")
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or min(self.seconds) <= 0:
            raise ValueError(f"step times must be finite and positive: got {numbers}")


class StepTimeModel:
    """Predicts a step's seconds from a measured table, corrected by what steps really take.

    The correction of a forward is a fast global factor (the machine's moment) times a slow shape over the number of
    rows; a forward far from its prediction moves only the factor. What the host takes beside it is added: it makes no
    row dearer.
    """

    def __init__(self, table: StepTimeTable) -> None:
        self.table = table
        # More rows never take less, and noise only ever adds: what is not below all that follows was disturbed.
        lowest = list(itertools.accumulate(reversed(table.seconds), min))[::-1]
        knots = [float(rows) for rows in table.rows]
        slopes = table.per_request, table.per_logit_row, table.per_context_token, table.per_attended_token
        self._slopes = np.zeros(NUM_SLOPES)
        self._slopes[: len(slopes)] = slopes
        # What `seconds_at` takes; `learn_step` changes the shape and the factor in place.
        self.arrays = np.array(knots), np.array(lowest), np.zeros(len(knots)), self._slopes
        self._covariance = first_covariance(self.arrays[0])

    @property
    def factor(self) -> float:
        """How many times as long as at warm-up forwards take at the moment."""
        return math.exp(self._slopes[LOG_FACTOR])

    @property
    def host_s(self) -> float:
        """What the host takes of a step at the moment, beside the forward."""
        return float(self._slopes[HOST])

    def rescale(self, ratio: float) -> None:
        """From now on forwards take `ratio` times as long: on another number of threads."""
        self._slopes[LOG_FACTOR] += math.log(ratio)

    def predict(self, load: StepLoad) -> float:
        """Seconds of such a step."""
        return seconds_at(self.arrays, tuple(load), 0.0, 0.0)  # type: ignore[no-any-return]

    def critical_length(self) -> int:
        """The most rows that one step runs in CRITICAL_RATIO times the time of the fewest.

        The critical decoding length of Lookahead (KDD'24), definition 2, for one request with an empty context.
        """
        bound_s = CRITICAL_RATIO * self.predict(StepLoad(1, 1, 1))
        most = self.table.rows[-1]
        return next((rows - 1 for rows in range(2, most + 1) if self.predict(StepLoad(rows, rows, 1)) > bound_s), most)

    def observe(
        self,
        load: StepLoad,
        forward_s: float,
        host_s: float = 0.0,
        *,
        num_steps: int = 1,
        without: StepLoad | None = None,
        decoding: StepLoad | None = None,
        is_apart: bool = False,
    ) -> tuple[float, float, float]:
        """Learn from a step whose forward and host took so long, or from one that stands for several.

        is_apart: it is of another kind than those before, and may be far off its prediction for good.
        Returns what it, and the others that are given, were predicted to take before.
        """
        loads = tuple(load), tuple(without or load), tuple(decoding or load)
        what = self._covariance, *loads, forward_s, host_s, (num_steps, is_apart)
        return learn_step(self.arrays, *what)  # type: ignore[no-any-return]


def grid(most_rows: int) -> list[int]:
    """The numbers of rows to measure: dense where drafts are decided, sparse where prefill chunks are."""
    numbers: Sequence[int] = (4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    inside = [n for n in numbers if n < most_rows]
    return [*inside, most_rows] if most_rows >= 4 else [max(1, most_rows)]
