"""Engines belong to the process that made them: a fork has none of their threads, and would wait for them for ever."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field

from batchserve.errors import ForkedProcessError


@functools.cache
def _first_maker() -> int:
    """The process that this was first called in; its forks inherit the answer."""
    return os.getpid()


def check_no_fork_of_a_maker() -> None:
    """Called where an engine is made. Raises ForkedProcessError in a fork of a process that made one before.

    Of that one's compute threads (OpenMP's) the fork has the books without the threads.
    """
    Maker("engine", _first_maker()).check()


@dataclass(frozen=True, slots=True)
class Maker:
    """The process in which something was made."""

    what: str
    pid: int = field(default_factory=os.getpid)

    def check(self) -> None:
        """Raises ForkedProcessError in any other process."""
        if os.getpid() != self.pid:
            raise ForkedProcessError(self.what, self.pid, os.getpid())
