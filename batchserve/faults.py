"""Contains faults in the dispensable parts of a step where they happen, counts them, and logs each once."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Faults:
    """Counts faults by location. One thread writes; any thread may read `counts`."""

    counts: Counter[str] = field(default_factory=Counter)
    _logged: set[tuple[str, str, int | None]] = field(default_factory=set)

    def note(self, where: str, error: Exception, outcome: str) -> None:
        """Counts a fault. The first one raised at a line of code is logged with its traceback."""
        self.counts[where] += 1
        last = traceback.extract_tb(error.__traceback__)[-1:]
        line = (where, last[0].filename, last[0].lineno) if last else (where, type(error).__name__, None)
        if line not in self._logged:
            self._logged.add(line)
            logger.error("fault in %s: %s; the next ones like it are only counted", where, outcome, exc_info=error)

    def contained(self, where: str, outcome: str) -> Contained:
        """Returns a context manager that notes an exception raised inside, and goes on after the block."""
        return Contained(self, where, outcome)


@dataclass(frozen=True, slots=True)
class Contained:
    """A context manager without state: it may be entered any number of times. BaseExceptions such as Ctrl-C pass."""

    faults: Faults
    where: str
    outcome: str

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.faults.note(self.where, error, self.outcome)
        return True
