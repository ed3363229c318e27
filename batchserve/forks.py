"""Refuses engines in forked processes. A fork has none of the engine's threads, and would wait for them for ever."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field

from batchserve.errors import ForkedProcessError


@functools.cache
def _first_maker() -> int:
    """Returns the process in which this was first called. Its forks inherit the answer."""
    return os.getpid()


def check_not_forked() -> None:
    """Raises ForkedProcessError in a fork of a process that has made an engine. Called before an engine is made.

    The fork has the records of that process's compute threads (OpenMP's) without the threads.
    """
    OwnerProcess("engine", _first_maker()).check()


@dataclass(frozen=True, slots=True)
class OwnerProcess:
    """The process in which something was made."""

    what: str
    pid: int = field(default_factory=os.getpid)

    def check(self) -> None:
        """Raises ForkedProcessError in any other process."""
        if os.getpid() != self.pid:
            raise ForkedProcessError(self.what, self.pid, os.getpid())
