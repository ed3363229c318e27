"""Says which of two measured settings is better, or that they cannot be told apart."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.tune.sweep import Repeated

MIN_ROUNDS = 3
MIN_DIFFERENCE = 0.01  # less is of no use to anybody
# Student's t that 1 % of equal settings exceed, for 3 rounds, 4, 5 and so on; more rounds than here take the last.
T_QUANTILES = (6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a setting compares with another, round by round.

    ratios: its figure over the other's, of each round that has both. Rounds are compared with themselves, so that what
    slows a whole round down does not count.
    """

    ratios: tuple[float, ...]

    @classmethod
    def of(cls, one: Repeated, other: Repeated, figure: str) -> Comparison:
        values, others = ({run.turn: getattr(run, figure) for run in each.runs} for each in (one, other))
        ratios = (values[turn] / others[turn] for turn in sorted(values.keys() & others.keys()))
        return cls(tuple(ratio for ratio in ratios if not math.isnan(ratio)))

    @property
    def is_told_apart(self) -> bool:
        """Whether the ratio is so far from 1 that 1 % of equal settings come as far, and by 1 % at least.

        A t-test of the logarithms of the ratios. Fewer than 3 rounds tell nothing apart.
        """
        if len(self.ratios) < MIN_ROUNDS:
            return False
        logarithms = [math.log(ratio) for ratio in self.ratios]
        error = statistics.stdev(logarithms) / math.sqrt(len(logarithms))
        quantile = T_QUANTILES[min(len(logarithms) - MIN_ROUNDS, len(T_QUANTILES) - 1)]
        return abs(statistics.fmean(logarithms)) > max(quantile * error, math.log1p(MIN_DIFFERENCE))


def equals_of(best: Repeated, settings: Sequence[Repeated], figure: str) -> list[Repeated]:
    """Returns the settings that cannot be told apart from the best one, with itself."""
    return [each for each in settings if each is best or not Comparison.of(each, best, figure).is_told_apart]
