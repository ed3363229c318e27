"""Ctrl-C where being cut short would leave something half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[Callable[[], bool]]:
    """A Ctrl-C that comes inside takes effect at the end; what is yielded says whether one has come.

    Only the main thread is interrupted, so there is nothing to hold in others, nor where nobody is to be interrupted or
    the handler is not Python's.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield lambda: False
        return
    came = threading.Event()
    signal.signal(signal.SIGINT, lambda number, frame: came.set())
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, before)
        if came.is_set():
            signal.raise_signal(signal.SIGINT)
