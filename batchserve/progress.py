"""Prints the progress of a command."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REFRESH_PER_S = 2  # low, because a bar may share the CPU with a measurement


def progress(message: str) -> None:
    """Prints one line to standard error at once. Standard output is for answers."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[], None]]:
    """Shows a progress bar, if standard error is a terminal. Yields a function that counts one more as done.

    total: None if it is not known.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        console=console,
        refresh_per_second=REFRESH_PER_S,
        transient=True,
        disable=not console.is_terminal,
    ) as shown:
        task = shown.add_task("", total=total)
        yield lambda: shown.advance(task)
