"""When to ask a drafter again that has not paid: with exponential back-off, and at once when the text has changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE = 4  # proposals in a row that were worth nothing before one is left out
LONG_WAIT, LONGEST_WAIT = 8, 32  # steps
WATCHED = 2  # waits from which on the text is looked at: before, it is asked again soon anyway
RECENT = 2048  # tokens that a repetition is looked for in
REPEAT_RATE = 0.1
CHANGE = 0.4  # of the share of repeated token pairs, within about ten tokens


@dataclass(slots=True)
class Probe:
    """One request's turn-taking with its drafter."""

    num_failures: int = 0
    wait: int = 0  # steps until it is asked again
    _is_read: bool = False  # the text, since it is looked at
    _pairs: set[int] = field(default_factory=set)  # of neighbours, as one number each: tuples take longer
    _last: int = -1
    _repeats: float = 0.0
    _repeats_then: float = 0.0

    def is_due(self) -> bool:
        """Whether to ask in this step; call it once a step."""
        if self.wait == 0:
            return True
        self.wait -= 1
        return False

    @property
    def is_trying_again(self) -> bool:
        """Whether what is asked now is asked again, after a wait."""
        return self.num_failures > PATIENCE

    def note(self, is_paying: bool, text: Sequence[int], longest_wait: int = LONGEST_WAIT, step: int = 0) -> None:
        """The outcome of asking in this step; `text` is the request's so far, read only when waiting begins.

        Whoever waits long is asked in the same steps as all others who do: most of what asking costs is the same for
        one request as for all.
        """
        if is_paying:
            self.num_failures, self.wait = 0, 0
            return
        self.num_failures += 1
        if self.num_failures <= PATIENCE:
            return
        self.wait = min(longest_wait, 1 << min(30, self.num_failures - PATIENCE))
        if self.wait >= LONG_WAIT:
            self.wait -= step % self.wait
        if self.is_watching and not self._is_read:
            self._is_read = True
            recent = text[-RECENT:]
            tokens = np.array(recent, np.int64)
            self._pairs = set((tokens[:-1] << 32 | tokens[1:]).tolist())
            self._last = recent[-1] if recent else -1
            self._repeats = 0.0
        self._repeats_then = self._repeats

    @property
    def is_watching(self) -> bool:
        """Whether the text is looked at."""
        return self.num_failures >= PATIENCE + WATCHED

    def arrive(self, token_ids: Sequence[int]) -> None:
        """New tokens: text that begins or ceases to repeat itself is worth a look now."""
        if not self.is_watching or not self._is_read:
            return
        for token_id in token_ids:
            pair = self._last << 32 | token_id
            self._repeats += REPEAT_RATE * ((pair in self._pairs) - self._repeats)
            self._pairs.add(pair)
            self._last = token_id
        if abs(self._repeats - self._repeats_then) > CHANGE:
            self.num_failures, self.wait, self._is_read = PATIENCE, 0, False
            self._repeats_then = self._repeats
