"""Steps without drafts among those with them: what drafts cost the others is measured against these."""

from __future__ import annotations

import math
from dataclasses import dataclass

FEWEST, MOST = 8, 256  # steps with drafts before it is asked whether one without is due
MOVED = 0.04  # by more than that the machine seems to have become faster or slower


@dataclass(slots=True)
class _Size:
    """Batches of one size: since the last step without drafts, the logarithm of the factor then, when to ask."""

    num_drafted: int = 0
    log_factor: float = 0.0
    asked_at: int = FEWEST
    wait: int = FEWEST


class PlainSteps:
    """When a step without drafts is due, by number of decoding requests (in powers of two).

    Where every step has drafts nobody sees what one takes without them: drafts that are dearer than believed look like
    a machine that is slower, and requests that gain nothing pay without anybody's knowing. So where the factor of all
    step times has moved meanwhile, one step tells which it was; if it goes on moving, others do, ever more rarely.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def is_due(self, num_requests: int, factor: float) -> bool:
        """Of a step that is to be drafted, with the factor as it is; to be asked once a step."""
        size = self._sizes.get(num_requests.bit_length())
        if size is None or size.num_drafted < size.asked_at:
            return False
        if abs(math.log(factor) - size.log_factor) > MOVED or size.num_drafted >= MOST:
            size.wait = min(MOST, 2 * size.wait)
            return True
        size.wait = max(FEWEST, size.wait // 2)
        size.asked_at = size.num_drafted + size.wait
        return False

    def note(self, num_requests: int, factor: float, *, is_drafted: bool) -> bool:
        """A step had drafts, or had neither drafts nor prompts; whether it is the first of these behind many of those.

        factor: as it was before.
        """
        size = self._sizes.setdefault(num_requests.bit_length(), _Size())
        if is_drafted:
            size.num_drafted += 1
            return False
        is_apart = size.num_drafted >= FEWEST
        size.num_drafted, size.log_factor, size.asked_at = 0, math.log(factor), size.wait
        return is_apart
