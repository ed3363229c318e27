"""Prints the progress of a command."""

from __future__ import annotations

import sys


def progress(message: str) -> None:
    """Prints one line to standard error at once. Standard output is for answers."""
    print(message, file=sys.stderr, flush=True)
