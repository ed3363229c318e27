"""How long a step takes: t(rows, context tokens, requests), measured for the model and machine in hand.

The price list that the adaptive decoding length buys rows from; engine/measure_steps.py measures it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from batchserve.scheduler.budget_kernels import seconds_at

if TYPE_CHECKING:
    from collections.abc import Sequence

FACTOR_RATE = 0.2  # of the fast factor: a noisy neighbour is followed within some five steps
SHAPE_RATE = 0.02  # of the slow shape
OUTLIER = math.log(1.3)  # a step further off than this says something of the machine's moment, nothing of the shape
MOST_CORRECTION = math.log(4.0)
MOST_KNOWN = 64  # predictions
MOST_ROWS = 1 << 31  # of a table
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

    def floats(self) -> tuple[float, ...]:
        return tuple(map(float, self))


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
        if list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1 or self.rows[-1] > MOST_ROWS:
            raise ValueError(f"numbers of rows must rise from 1 to {MOST_ROWS} at most: got {self.rows}")
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or min(self.seconds) <= 0:
            raise ValueError(f"step times must be finite and positive: got {numbers}")


class StepTimeModel:
    """Predicts a step's seconds from a measured table, corrected by what steps really take.

    The correction is a fast global factor (the machine's moment) times a slow shape over the number of rows; a step
    far from its prediction moves only the factor.
    """

    def __init__(self, table: StepTimeTable) -> None:
        self.table = table
        self.log_factor = 0.0
        self._rows = [float(rows) for rows in table.rows]
        # More rows never take less, and noise only ever adds: what is not below all that follows was disturbed.
        lowest = itertools.accumulate(reversed(table.seconds), min)
        self._seconds = list(lowest)[::-1]
        self._shape = [0.0] * len(table.rows)  # log corrections at the table's numbers of rows
        self._arrays = np.array(self._rows), np.array(self._seconds)
        self._known: dict[StepLoad, float] = {}  # predicted since something was learned: a step asks again and again

    @property
    def factor(self) -> float:
        """How much slower than at warm-up the machine is at the moment."""
        return math.exp(self.log_factor)

    def predict(self, load: StepLoad) -> float:
        """Seconds of such a step."""
        seconds = self._known.get(load)
        if seconds is None:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            seconds = seconds_at.py_func((self._rows, self._seconds, self._shape, *self._slopes), load, 0.0, 0.0)
            self._known[load] = seconds
        return seconds

    def arrays(self) -> tuple[Any, ...]:
        """What `seconds_at` needs in compiled code."""
        return (*self._arrays, np.array(self._shape), *self._slopes)

    @property
    def _slopes(self) -> tuple[float, ...]:
        table = self.table
        return (
            table.per_request,
            table.per_logit_row,
            table.per_context_token,
            table.per_attended_token,
            self.log_factor,
        )

    def row_cost(self, load: StepLoad, span: int = 16) -> float:
        """Seconds of one more draft row with an empty context: the mean slope over the next `span` rows."""
        more = load._replace(num_rows=load.num_rows + span, num_logit_rows=load.num_logit_rows + span)
        return (self.predict(more) - self.predict(load)) / span

    def attended_cost(self) -> float:
        """Seconds for one more pair of a row and a K/V entry."""
        return self.table.per_attended_token * self.factor

    def critical_length(self, ratio: float = CRITICAL_RATIO) -> int:
        """The most rows that one step runs in `ratio` times the time of the fewest.

        The critical decoding length of Lookahead (KDD'24), definition 2, for one request with an empty context.
        """
        bound_s = ratio * self.predict(StepLoad(1, 1, 1))
        most = self.table.rows[-1]
        return next((rows - 1 for rows in range(2, most + 1) if self.predict(StepLoad(rows, rows, 1)) > bound_s), most)

    def observe(self, load: StepLoad, seconds: float, num_steps: int = 1) -> None:
        """Learn from a step that took so long, or from one that stands for several."""
        if not 0 < seconds < math.inf:
            return
        error = math.log(seconds / self.predict(load))
        self._known.clear()
        self.log_factor += (1.0 - (1.0 - FACTOR_RATE) ** num_steps) * max(-1.0, min(1.0, error))
        if abs(error) > OUTLIER:
            return
        high = min(max(bisect.bisect_left(self._rows, load.num_rows), 1), len(self._rows) - 1)
        low = max(0, high - 1)
        span = self._rows[high] - self._rows[low]
        share = min(1.0, max(0.0, (load.num_rows - self._rows[low]) / span)) if span else 1.0
        for knot, weight in ((low, 1.0 - share), (high, share)):
            moved = self._shape[knot] + min(1.0, SHAPE_RATE * num_steps) * weight * error
            self._shape[knot] = max(-MOST_CORRECTION, min(MOST_CORRECTION, moved))


def grid(most_rows: int) -> list[int]:
    """The numbers of rows to measure: dense where drafts are decided, sparse where prefill chunks are."""
    numbers: Sequence[int] = (4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    inside = [n for n in numbers if n < most_rows]
    return [*inside, most_rows] if most_rows >= 4 else [max(1, most_rows)]
