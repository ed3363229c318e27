"""Ctrl-C where being cut short would leave something half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """A Ctrl-C that comes inside is the system's: within a compiler Python would lose it, or go on half done."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
    has_come, where = False, None

    def note(number: int, frame: FrameType | None) -> None:
        # Nothing that takes a lock: another Ctrl-C may come in here.
        nonlocal has_come, where
        has_come, where = True, frame

    def let_in() -> None:
        nonlocal has_come, where
        if not has_come:
            return
        frame, has_come, where = where, False, None
        if callable(before):
            before(signal.SIGINT, frame)
        else:  # the system's own way, which ends the process
            signal.signal(signal.SIGINT, before)
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, note)
    try:
        yield let_in
    finally:
        signal.signal(signal.SIGINT, before)
        let_in()
