"""What draft rows are bought at: the price of time decides, for all requests of a step at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from batchserve.decoding_length.budget_kernels import price_step

if TYPE_CHECKING:
    from batchserve.decoding_length.step_time import StepLoad, StepTimeModel

    FloatArray = np.ndarray[Any, np.dtype[np.float64]]
    IntArray = np.ndarray[Any, np.dtype[np.int64]]


class DraftOffer(NamedTuple):
    """What may be bought in one step: single nodes, and bundles of rows that are only worth something together.

    All arrays [num_items]: the request that owns it (its place), the tokens that it is expected to give, and its rows.
    An item may not be worth more than the one that it hangs from, and comes behind it.
    """

    owners: IntArray
    gains: FloatArray
    rows: IntArray


class Market(NamedTuple):
    """What rows of one step are bought at.

    load: the step without drafts, which takes without_s, and alone_s without prompts, too. price: lambda, what a second
    brings otherwise, in tokens.
    row_s: what one more row costs, its context apart, and min_row_s what it costs at least: its sampling, its mask,
    its K/V. Beside what prompts take the step may become longest_s long, more where nobody falls behind by it
    (more than EVEN_STEPS); never longer than never_longer_s, prompts included.
    """

    load: StepLoad
    without_s: float
    alone_s: float
    price: float
    row_s: float
    min_row_s: float
    longest_s: float
    never_longer_s: float = math.inf

    @classmethod
    def open(
        cls,
        step_time: StepTimeModel,
        load: StepLoad,
        alone: StepLoad,
        speed_up: float,
        max_inflation: float,
        never_longer_s: float = math.inf,
    ) -> Market:
        """`alone` are the step's decoding rows: a prompt beside them makes no draft dearer, and time no cheaper.

        speed_up: how much faster than without drafts tokens come (price.py); max_inflation: longest_s over alone_s.
        """
        without_s, alone_s, row_s, min_row_s = price_step(step_time.arrays, tuple(load), tuple(alone))
        price, longest_s = speed_up * alone.num_requests / alone_s, max_inflation * alone_s
        return cls(load, without_s, alone_s, price, row_s, min_row_s, longest_s, never_longer_s)

    def terms(self, max_rows: int) -> tuple[float, ...]:
        """What budget_kernels.buy takes of it, in a step that has room for so many draft rows."""
        prompts_s = self.without_s - self.alone_s
        costs = self.price, self.row_s, self.min_row_s, max_rows
        return *costs, prompts_s, self.longest_s, self.never_longer_s
