"""The price of time, lambda: how many tokens a second of decoding brings."""

from __future__ import annotations

import math

MEMORY = 200.0  # steps
PRIOR = 4.0  # steps that a new size of batch is believed to gain nothing
MOST_SURPRISE = 2.0  # a step further off its prediction counts as if it were so far off


class SpeedUp:
    """How much faster than plain decoding the engine emits tokens, by size of batch (in powers of two).

    Kept as a ratio so that a batch whose size or context changes has a price at once.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, float] = {}
        self._time: dict[int, float] = {}

    def ratio(self, num_requests: int) -> float:
        """Tokens a second over those without drafts; at least 1, as nobody has to draft."""
        size = num_requests.bit_length()
        return max(1.0, (self._tokens.get(size, 0.0) + PRIOR) / (self._time.get(size, 0.0) + PRIOR))

    def price(self, num_requests: int, without_s: float) -> float:
        """Tokens a second that such a batch brings, whose step without drafts takes `without_s`."""
        return self.ratio(num_requests) * num_requests / without_s

    def observe(self, num_requests: int, num_tokens: int, decode_s: float, without_s: float) -> None:
        """A step of so many decoding requests gave so many tokens, in so many seconds of decode time."""
        size = num_requests.bit_length()
        keep = math.exp(-1.0 / MEMORY)
        self._tokens[size] = keep * self._tokens.get(size, 0.0) + num_tokens / num_requests
        self._time[size] = keep * self._time.get(size, 0.0) + decode_s / without_s
