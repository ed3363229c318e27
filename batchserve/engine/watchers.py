"""Those who look at steps (step_watch.py), on the front's event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from batchserve.engine.messages import Seen, Watch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from batchserve.engine.messages import Message
    from batchserve.engine.step_watch import SeenStep

MAX_WATCHERS = 16


class StepWatchers:
    """The engine takes pictures while there is anybody here."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._queues: list[asyncio.Queue[SeenStep]] = []

    @property
    def is_full(self) -> bool:
        return len(self._queues) >= MAX_WATCHERS

    async def steps(self, timeout_s: float) -> AsyncGenerator[SeenStep | None, None]:
        """Yields steps as they come, None where there was none for so long. Who is late misses some."""
        queue: asyncio.Queue[SeenStep] = asyncio.Queue(1)
        self._queues.append(queue)
        if len(self._queues) == 1:
            self._send(Watch(True))
        try:
            while True:
                step = None
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        step = await queue.get()
                yield step
        finally:
            self._queues.remove(queue)
            if not self._queues:
                self._send(Watch(False))

    def take(self, seen: Seen) -> None:
        """Hands a step to all who look."""
        for queue in self._queues:
            with suppress(asyncio.QueueEmpty):
                queue.get_nowait()  # nobody has taken the one before
            queue.put_nowait(seen.step)
