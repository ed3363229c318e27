"""What the price of time, lambda, goes by: how much faster tokens come than without drafts."""

from __future__ import annotations

import math

KEPT = math.exp(-1.0 / 200.0)  # of what is known, in a step: some 200 are remembered
PRIOR = 4.0  # steps that a new size of batch is believed to gain nothing
MAX_SURPRISE = 2.0  # a step further off its prediction counts as if it were so far off


class SpeedUp:
    """How much faster than plain decoding the engine emits tokens, by size of batch (in powers of two).

    Kept as a ratio so that a batch whose size or context changes has a price at once (draft_budget.Market).
    """

    def __init__(self) -> None:
        self._tokens: dict[int, float] = {}
        self._time: dict[int, float] = {}

    def ratio(self, num_requests: int) -> float:
        """Tokens a second over those without drafts; at least 1, as nobody has to draft."""
        size = num_requests.bit_length()
        return max(1.0, (self._tokens.get(size, 0.0) + PRIOR) / (self._time.get(size, 0.0) + PRIOR))

    def observe(self, num_requests: int, num_tokens: int, decode_s: float, without_s: float) -> None:
        """A step of so many decoding requests gave so many tokens, in so many seconds of decode time."""
        size = num_requests.bit_length()
        self._tokens[size] = KEPT * self._tokens.get(size, 0.0) + num_tokens / num_requests
        self._time[size] = KEPT * self._time.get(size, 0.0) + decode_s / without_s
