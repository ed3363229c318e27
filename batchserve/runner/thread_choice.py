"""Chooses how many threads compute each step, by what steps of about as many rows have taken on that many threads.

A native program's bits do not depend on the number, so it may change from step to step. Small steps do not repay the
meetings of threads, and beside a busy process a thread that waits for its core holds up all others.
"""

from __future__ import annotations

import math
from collections import deque

# Steps from one trial to the next: at first, where the machine has changed, and at most where more threads are tried,
# which is cheap, or fewer.
FIRST, SOON, MORE_AT_MOST, FEWER_AT_MOST = 16, 8, 24, 128
NUM_TRIALS = 5  # whose mean decides: of logarithms, since steps that were held up count, but no single one decides
MIN_RECENT, NUM_RECENT = 4, 16  # steps that a trial is compared with
AWAKENING = math.log(4.0)  # waking threads makes a small step so much longer at most
MOST = math.log(3.0)  # that a trial may differ by
SLOW = 1.7  # times what was usual: recent steps so slow make trials frequent again
SLACK = 0.08  # in logarithms, against changing to and fro
USUAL_RATE = 0.02  # at which what is usual follows


class _Size:
    """The steps of one size: the number of threads in use, and the trials of others."""

    def __init__(self, place: int) -> None:
        self.place = place  # of the number of threads in use
        self.is_awake = False  # the last step was on more threads than usual, which are awake now
        self.trial = 0  # 1 and -1: the present step runs on the next larger or smaller number
        self.every, self.until_trial = {1: FIRST, -1: FIRST}, {1: FIRST, -1: FIRST}  # steps, by kind of trial
        self.recent: deque[float] = deque(maxlen=NUM_RECENT)  # logarithms of seconds
        self.trials: dict[int, deque[float]] = {1: deque(maxlen=NUM_TRIALS), -1: deque(maxlen=NUM_TRIALS)}
        self.usual = math.inf


class ThreadChoice:
    """Call pick before each step, and note after it.

    most: the largest number of threads. min_gain: how many times as fast steps must be on twice as many threads to be
    worth these. is_fixed: every step runs on `most`.
    """

    def __init__(self, most: int, min_gain: float, *, is_fixed: bool = False) -> None:
        halvings = range(1 if is_fixed else most.bit_length())
        self._counts = sorted({max(1, most >> number) for number in halvings})
        self._limit = math.log(min_gain)
        self._sizes: dict[int, _Size] = {}

    def pick(self, num_rows: int) -> int:
        """Returns the number of threads for a step."""
        if len(self._counts) == 1:
            return self._counts[0]
        size = self._size(num_rows)
        size.trial = 0
        for direction in (-1, 1):
            size.until_trial[direction] -= 1
            can_be = 0 <= size.place + direction < len(self._counts) and len(size.recent) >= MIN_RECENT
            if can_be and size.until_trial[direction] <= 0:
                size.trial = direction
        return self._counts[size.place + size.trial]

    def note(self, num_rows: int, seconds: float) -> bool:
        """Takes in what the step for which a number was picked has taken. Returns whether it was a trial."""
        if len(self._counts) == 1 or seconds <= 0.0:
            return False
        size, taken = self._size(num_rows), math.log(seconds)
        if size.trial == 0:
            size.recent.append(taken)
            self._note_usual(size, taken)
            return False
        direction = size.trial
        gained = taken - _mean(size.recent)
        # The first step wakes threads and the next one is the trial, unless the first one was slow enough to know.
        if direction > 0 and not size.is_awake and gained < AWAKENING:
            size.is_awake = True
            return True
        size.is_awake = False
        size.trials[direction].append(max(-MOST, min(MOST, gained)))
        if len(size.trials[direction]) == NUM_TRIALS:
            if self._is_better(size, direction):
                size.place += direction
                self._start_again(size)
            else:
                at_most = MORE_AT_MOST if direction > 0 else FEWER_AT_MOST
                size.every[direction] = min(2 * size.every[direction], at_most)
        size.until_trial[direction] = size.every[direction]
        return True

    def _size(self, num_rows: int) -> _Size:
        key = ((num_rows - 1).bit_length() + 1) // 2  # 1, to 4, to 16, to 64 rows, and so on
        if key not in self._sizes:
            self._sizes[key] = _Size(len(self._counts) - 1)
        return self._sizes[key]

    def _is_better(self, size: _Size, direction: int) -> bool:
        gained = _mean(size.trials[direction])  # negative: faster
        return gained < (-self._limit if direction > 0 else self._limit) - SLACK

    def _start_again(self, size: _Size) -> None:
        for each in (*size.trials.values(), size.recent):
            each.clear()
        size.every, size.until_trial = {1: FIRST, -1: FIRST}, {1: FIRST, -1: FIRST}
        size.usual = math.inf

    def _note_usual(self, size: _Size, taken: float) -> None:
        """Makes trials frequent again if steps have become slow."""
        typical = _mean(size.recent)
        if typical > size.usual + math.log(SLOW):
            for each in size.trials.values():
                each.clear()
            size.every, size.until_trial = {1: SOON, -1: SOON}, {1: SOON, -1: 0}
            size.usual = typical
        elif size.usual == math.inf:
            size.usual = taken
        size.usual += USUAL_RATE * (typical - size.usual)


def _mean(values: deque[float]) -> float:
    return sum(values) / len(values)
