"""Handles Ctrl-C where an interruption would leave something half done."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """Lets Ctrl-C end the process. Inside a compiler, Python would lose it, or go on with something half done."""
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
def delay_interrupts() -> Iterator[Callable[[], None]]:
    """Delays Ctrl-C to the end of the block, or until the block calls the yielded function.

    Only the main thread is interrupted. Nothing is delayed in other threads, if Ctrl-C is ignored, or if the handler is
    not Python's.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield lambda: None
        return
    has_come, where = False, None

    def note(number: int, frame: FrameType | None) -> None:
        # This must not take a lock: another Ctrl-C may interrupt it.
        nonlocal has_come, where
        has_come, where = True, frame

    def let_in() -> None:
        nonlocal has_come, where
        if not has_come:
            return
        frame, has_come, where = where, False, None
        if callable(before):
            before(signal.SIGINT, frame)
        else:  # the system's default, which ends the process
            signal.signal(signal.SIGINT, before)
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, note)
    try:
        yield let_in
    finally:
        signal.signal(signal.SIGINT, before)
        let_in()


async def run_until_interrupted(running: Coroutine[Any, Any, None]) -> bool:
    """Runs to the end, or until Ctrl-C, which cancels it. Returns whether there was one; a second one does nothing.

    Outside the main thread, and where Ctrl-C is ignored, there is none.
    """
    loop, before, is_interrupted = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT), False
    task = loop.create_task(running)

    def interrupt() -> None:
        nonlocal is_interrupted
        if not is_interrupted:
            is_interrupted = True
            task.cancel()

    is_heard = threading.current_thread() is threading.main_thread() and before not in (None, signal.SIG_IGN)
    if is_heard:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await asyncio.wait((task,))
    finally:
        task.cancel()
        if is_heard:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)
    if not task.cancelled():
        task.result()
    return is_interrupted
