"""Starts interpreters that run this package, and counts the cores that this process may use."""

from __future__ import annotations

import os
import sys


def python(code: str, *arguments: str) -> list[str]:
    """Returns the command line of an interpreter that runs `code` and finds modules where this one does.

    By default, an interpreter would first look for them in the current folder.
    """
    path = [folder or os.getcwd() for folder in sys.path]
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {path!r}; {code}", *arguments]


def available_cores() -> int:
    """Returns the number of cores that this process may use, which may be a part of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
