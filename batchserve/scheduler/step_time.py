"""How long a step takes: t(rows, context tokens, requests), measured for the model and machine in hand.

The price list that the adaptive decoding length buys rows from. Pure NumPy; engine/measure_steps.py measures it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    FloatArray = np.ndarray[Any, np.dtype[np.float64]]

FACTOR_RATE = 0.2  # of the fast factor: a noisy neighbour is followed within some five steps
SHAPE_RATE = 0.02  # of the slow shape
OUTLIER = math.log(1.3)  # a step further off than this says something of the machine's moment, nothing of the shape
MOST_CORRECTION = math.log(4.0)
CRITICAL_RATIO = 1.25  # up to here rows count as free (Lookahead, KDD'24, definition 2 and its figure 1)


@dataclass(frozen=True, slots=True)
class StepLoad:
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
        if list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1:
            raise ValueError(f"numbers of rows must rise from 1: got {self.rows}")
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or self.seconds[0] <= 0:
            raise ValueError(f"step times must be finite and positive: got {numbers}")


class StepTimeModel:
    """Predicts a step's seconds from a measured table, corrected by what steps really take.

    The correction is a fast global factor (the machine's moment) times a slow shape over the number of rows; a step
    far from its prediction moves only the factor.
    """

    def __init__(self, table: StepTimeTable) -> None:
        self.table = table
        self.log_factor = 0.0
        self._rows = np.array(table.rows, np.float64)
        # More rows never take less: what a noisy measurement says otherwise would be bought as a bargain.
        self._seconds = np.maximum.accumulate(np.array(table.seconds, np.float64))
        self._shape = np.zeros(len(table.rows))  # log corrections at the table's numbers of rows

    @property
    def factor(self) -> float:
        """How much slower than at warm-up the machine is at the moment."""
        return math.exp(self.log_factor)

    def predict(self, load: StepLoad) -> float:
        """Seconds of such a step."""
        return float(self.predict_many(load, np.zeros(1), np.zeros(1))[0])

    def predict_many(
        self, load: StepLoad, more_rows: FloatArray, more_attended: FloatArray, *, is_sampled: bool = True
    ) -> FloatArray:
        """Seconds of steps that have so many more rows and attended pairs than `load` each; all [n].

        is_sampled: the head runs on the rows that are added: drafts, not prompts.
        """
        rows = load.num_rows + more_rows
        table = self.table
        fixed = table.per_request * max(0, load.num_requests - 1) + table.per_context_token * load.context_tokens
        headless = table.per_logit_row * (load.num_rows - load.num_logit_rows + (0.0 if is_sampled else more_rows))
        base = np.maximum(self._at(rows) - headless, self._seconds[0])
        seconds = base + fixed + table.per_attended_token * (load.attended_tokens + more_attended)
        result: FloatArray = seconds * np.exp(self.log_factor + np.interp(rows, self._rows, self._shape))
        return result

    def row_cost(self, load: StepLoad, span: int = 16) -> float:
        """Seconds of one more draft row with an empty context: the mean slope over the next `span` rows."""
        ends = self.predict_many(load, np.array([0.0, span]), np.zeros(2))
        return float(ends[1] - ends[0]) / span

    def attended_cost(self) -> float:
        """Seconds for one more pair of a row and a K/V entry."""
        return self.table.per_attended_token * self.factor

    def critical_length(self, ratio: float = CRITICAL_RATIO) -> int:
        """The most rows that one step runs in `ratio` times the time of the fewest.

        The critical decoding length of Lookahead (KDD'24), definition 2, for one request with an empty context.
        """
        most = self.table.rows[-1]
        seconds = self.predict_many(StepLoad(0, 0, 1), np.arange(1.0, most + 1), np.zeros(most))
        return int(np.searchsorted(seconds, ratio * seconds[0], side="right"))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step that took so long."""
        if not 0 < seconds < math.inf:
            return
        error = math.log(seconds / self.predict(load))
        self.log_factor += FACTOR_RATE * max(-1.0, min(1.0, error))
        if abs(error) > OUTLIER:
            return
        high = int(np.searchsorted(self._rows, load.num_rows))
        high = min(max(high, 1), len(self._rows) - 1) if len(self._rows) > 1 else 0
        low = max(0, high - 1)
        span = self._rows[high] - self._rows[low]
        share = min(1.0, max(0.0, (load.num_rows - self._rows[low]) / span)) if span else 1.0
        for knot, weight in ((low, 1.0 - share), (high, share)):
            moved = self._shape[knot] + SHAPE_RATE * weight * error
            self._shape[knot] = max(-MOST_CORRECTION, min(MOST_CORRECTION, moved))

    def _at(self, rows: FloatArray) -> FloatArray:
        seconds: FloatArray = np.interp(rows, self._rows, self._seconds)
        slope = self._seconds[-1] / self._rows[-1]
        if len(self._rows) > 1:
            slope = (self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2])
        seconds += slope * np.maximum(0.0, rows - self._rows[-1])
        return seconds


def grid(most_rows: int) -> list[int]:
    """The numbers of rows to measure: dense where drafts are decided, sparse where prefill chunks are."""
    numbers: Sequence[int] = (4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    inside = [n for n in numbers if n < most_rows]
    return [*inside, most_rows] if most_rows >= 4 else [max(1, most_rows)]
