"""What a Jacobi window is worth: its rows are verified by nobody, and pay later, by the n-grams that they find."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchserve.decoding_length.probing import Probe

WINDOW_PRIOR, WINDOW_MEMORY = 2.0, 64.0  # windows that are believed to earn a token each; that are remembered
LONGEST_WINDOW_WAIT = 4096  # a window earns nothing unless its rows are computed: looking at it costs them


@dataclass(slots=True)
class JacobiWindow:
    """What a Jacobi window has earned: draft tokens that were accepted in the steps in which it was run, and that were
    known from it alone, over the number of these steps.
    """

    tokens: float = WINDOW_PRIOR
    windows: float = WINDOW_PRIOR
    is_run: bool = False  # in the step under way
    probe: Probe = field(default_factory=Probe)

    @property
    def value(self) -> float:
        """In tokens; what has waited to be tried again is believed to be worth what a new one is."""
        known = self.tokens / self.windows
        return max(known, 1.0) if self.probe.is_trying_again else known

    def missed(self) -> None:
        """It was offered, and nobody wanted it: so it is not offered in every step for nothing, nor never again."""
        self.probe.note(False, (), LONGEST_WINDOW_WAIT)

    def note(self, num_earned: int) -> None:
        """It was run, and earned so many tokens in that step."""
        self.is_run = False
        self.tokens += num_earned
        self.windows += 1.0
        self.probe.note(num_earned > 0, (), LONGEST_WINDOW_WAIT)
        if self.windows > WINDOW_MEMORY:
            self.tokens, self.windows = self.tokens / 2, self.windows / 2
