"""Child processes that run this package, whatever the current folder holds."""

from __future__ import annotations

import os
import sys


def python(code: str, *arguments: str) -> list[str]:
    """The command line of an interpreter that runs `code` and finds modules where this one does.

    By itself one would first look for them in the current folder.
    """
    path = [folder or os.getcwd() for folder in sys.path]
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {path!r}; {code}", *arguments]
