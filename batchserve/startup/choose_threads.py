"""Chooses the number of compute threads that steps run on, by timing trial steps."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from batchserve.errors import is_out_of_memory
from batchserve.startup.measure_steps import time_decoding

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.engine.executor import Executor

logger = logging.getLogger(__name__)
TRIALS = 9
SLOW_FORWARD_S, LARGE_FORWARD_S = 0.5, 2.0  # seconds; a pause does not make two steps in a row exceed the latter
# Later trials: first interval, longest interval (it doubles), and extra wait between steps if there was no lull.
LOOK_AGAIN_S, SELDOM_S, PATIENCE_S = 30.0, 300.0, 30.0
LOOKS = 5
MIN_GAIN_OF_FEWER = 1.1


def choose_threads(runner: Executor, max_num_seqs: int, max_model_len: int, min_gain: float) -> int:
    """Returns the fastest number of compute threads for a decoding step, at most the runner's present number. Twice as
    many must be min_gain times faster.

    Small layers do not repay the barrier between threads, and a busy neighbour makes it a hundred times more expensive.
    A core left free serves the event loop. The candidates take turns, so that a pause of the machine does not decide,
    and their lower quartiles are compared. A candidate with slow steps in two turns is dropped.
    """
    most = runner.num_threads
    counts = [most >> halvings for halvings in range(most.bit_length())]
    seconds: dict[int, list[float]] = {count: [] for count in counts}

    def trial(count: int) -> float:
        runner.num_threads = count
        runner.bind_thread()
        taken_s = time_decoding(runner, max_num_seqs, max_model_len)
        if taken_s > SLOW_FORWARD_S:  # may have been a pause
            taken_s = min(taken_s, time_decoding(runner, max_num_seqs, max_model_len))
        return taken_s

    for _ in range(TRIALS):
        for place, count in enumerate(counts):
            seconds[count].append(trial(count))
            if seconds[count][-1] > (SLOW_FORWARD_S if place > 0 else LARGE_FORWARD_S):
                break  # fewer threads would take even longer
        latest = {count: seconds[count][-1] for count in counts[:2] if seconds[count]}
        if min(latest.values()) > SLOW_FORWARD_S:  # large layers gain from every core, and more trials would take long
            return min(latest, key=lambda count: latest[count])
        counts = [count for count in counts if sum(each > SLOW_FORWARD_S for each in seconds[count]) < 2]
        if len(counts) == 1:
            return counts[0]
    best, best_s = most, math.inf
    for count in filter(seconds.get, counts):
        typical_s = sorted(seconds[count])[len(seconds[count]) // 4]
        if typical_s < best_s * min_gain:
            best, best_s = count, min(typical_s, best_s)
    return best


class ThreadWatch:
    """Checks from time to time whether steps are faster on twice or half as many compute threads, as the machine may
    have been busy at start, or become busy. The thread that runs the steps makes all calls.

    time_step: returns the seconds of a trial step on the runner's threads. changed: called with the new step time,
    relative to the old one, after the number of threads has changed. min_gain: as in choose_threads.
    """

    def __init__(
        self,
        runner: Executor,
        most: int,
        min_gain: float,
        time_step: Callable[[], float],
        changed: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._most, self._min_gain = runner, most, min_gain
        self._time_step, self._changed, self._clock = time_step, changed, clock
        self._every_s, self._is_up_next = LOOK_AGAIN_S, True
        self._due_s = clock() + self._every_s

    def idle_s(self) -> float:
        """Returns the seconds until the next trial is due if there is no work."""
        return max(0.0, self._due_s - self._clock())

    def look(self, *, is_idle: bool) -> None:
        """Runs trial steps if they are due. Between the steps of requests they are due later than while idle."""
        if self._clock() < self._due_s + (0.0 if is_idle else PATIENCE_S):
            return
        before = self._runner.num_threads
        up, down = before * 2, before // 2
        is_up = down < 1 or (up <= self._most and self._is_up_next)
        self._is_up_next = not is_up
        other, gain = (up, self._min_gain) if is_up else (down, MIN_GAIN_OF_FEWER)
        self._every_s = min(2 * self._every_s, SELDOM_S)
        ratio = 1.0
        try:
            ratio = self._ratio(before, other, gain) if 1 <= other <= self._most else 1.0
        except (MemoryError, RuntimeError) as error:  # requests hold all K/V memory, or all memory
            if not is_out_of_memory(error):
                raise
        finally:
            is_better = ratio * gain < 1.0
            self._use(other if is_better else before)
            self._every_s = LOOK_AGAIN_S if is_better else self._every_s
            self._due_s = self._clock() + self._every_s
        if is_better:
            logger.info("%d compute threads instead of %d: steps take %.2f of the time", other, before, ratio)
            self._changed(ratio)

    def _ratio(self, before: int, other: int, gain: float) -> float:
        """Returns the step time on `other` threads relative to `before`, or 1.0 if a pair shows too little gain."""
        self._use(other)
        self._time_step()  # the first step pays for setting up the threads
        seconds: dict[int, list[float]] = {before: [], other: []}
        for _ in range(LOOKS):
            for count, taken in seconds.items():
                self._use(count)
                taken.append(self._time_step())
            if seconds[other][-1] * gain > seconds[before][-1]:
                return 1.0
            if seconds[before][-1] > SLOW_FORWARD_S:
                break
        typical = {count: sorted(taken)[len(taken) // 4] for count, taken in seconds.items()}
        return typical[other] / typical[before]

    def _use(self, count: int) -> None:
        self._runner.num_threads = count
        self._runner.bind_thread()
