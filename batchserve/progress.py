"""What a command says while it runs."""

from __future__ import annotations

import sys


def progress(message: str) -> None:
    """One line to standard error, at once: standard output is for answers."""
    print(message, file=sys.stderr, flush=True)
