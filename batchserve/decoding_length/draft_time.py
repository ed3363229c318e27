"""How long drafting takes of a step, by how many requests are drafted."""

from __future__ import annotations

from batchserve.decoding_length.price import MAX_SURPRISE

RATE = 0.1
FIRST_SHARE = 0.125  # of a step; the first time may be a pause, too, and is believed up to that
LONGEST_WAIT = 128  # steps


class DraftTime:
    """Seconds that the drafters and the choice take together, smoothed by number of requests (in powers of two).

    Of the whole step, not of one request: most of what asking takes is the same for one as for all.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        # Of what seems too long: steps until it is tried, and those until it is tried once more.
        self._waits: dict[int, tuple[int, int]] = {}

    def predict(self, num_asked: int) -> float:
        """For so many requests; of a number that was never asked for what the nearest one takes, at first nothing."""
        size = num_asked.bit_length()
        if size in self._seconds or not self._seconds:
            return self._seconds.get(size, 0.0)
        return self._seconds[min(self._seconds, key=lambda known: abs(known - size))]

    def observe(self, num_asked: int, seconds: float, step_s: float) -> float:
        """Asking so many took so long, beside a step of step_s; returns what counts of it: a pause not whole."""
        size = num_asked.bit_length()
        usual_s, count = self._seconds.get(size, 0.0), self._counts.get(size, 0) + 1
        seconds = min(seconds, MAX_SURPRISE * usual_s if usual_s else FIRST_SHARE * step_s)
        self._seconds[size] = usual_s + max(RATE, 1.0 / count) * (seconds - usual_s)
        self._counts[size] = count
        return seconds

    def is_tried(self, num_asked: int, *, is_too_long: bool) -> bool:
        """Whether so many are asked in this step; what seems too long is measured again after 2, 4, ... steps."""
        size = num_asked.bit_length()
        if not is_too_long:
            self._waits.pop(size, None)
            return True
        left, wait = self._waits.get(size, (2, 2))
        if left > 0:
            self._waits[size] = left - 1, wait
            return False
        wait = min(LONGEST_WAIT, 2 * wait)
        self._waits[size] = wait, wait
        return True
