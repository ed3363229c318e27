"""Ctrl-C where being cut short would leave something half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """A Ctrl-C that comes inside takes effect at the end, or where the block calls what is yielded.

    Only the main thread is interrupted, so there is nothing to hold in others, nor where nobody is to be interrupted or
    the handler is not Python's.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield lambda: None
        return
    came = threading.Event()

    def let_in() -> None:
        if not came.is_set():
            return
        came.clear()
        if callable(before):
            before(signal.SIGINT, None)
        else:  # the system's own way, which ends the process
            signal.signal(signal.SIGINT, before)
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, lambda number, frame: came.set())
    try:
        yield let_in
    finally:
        signal.signal(signal.SIGINT, before)
        let_in()
