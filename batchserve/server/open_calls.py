"""The calls in progress over all protocols, and the engine that they are for."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from batchserve.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchserve.engine.async_engine import AsyncEngine
    from batchserve.engine.backpressure import BackpressureLimits

# A cancellation may reach the server slightly later than the client's next call with the same request id. It passes
# through several threads, which takes longer on a busy machine, so the server counts turns, not seconds.
CANCEL_TURNS, CANCEL_TURN_S = 6, 0.002


class OpenCalls:
    """What all protocols of one server share: its engine, or why there is none; counts of calls; unread answers."""

    def __init__(self, unread: BackpressureLimits) -> None:
        self.unread = unread
        self.num_calls = 0  # received, answered or not
        self.failed_calls = Counter[str]()  # by reason
        self._engine: AsyncEngine | None = None
        self._refusal = "the server is warming up"
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def engine(self) -> AsyncEngine:
        """The engine that takes requests. Raises UnavailableError before `open` and from `close` on."""
        if self._engine is None:
            raise UnavailableError(self._refusal)
        return self._engine

    def open(self, engine: AsyncEngine) -> None:
        """Sends requests to this engine from now on."""
        self._engine = engine

    def close(self, reason: str) -> None:
        """Refuses requests from now on. Those in flight continue."""
        self._engine = None
        self._refusal = reason

    async def wait_idle(self) -> None:
        """Waits until no call is in progress. The engine may finish before a slow client has read its answer."""
        await self._is_idle.wait()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a call as in progress."""
        self._num_open += 1
        self.num_calls += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._is_idle.set()

    async def wait_cancelled(self, request_id: str) -> None:
        """Waits briefly for a cancelled call to release a request id."""
        for _ in range(CANCEL_TURNS):
            if not self.engine.has_request(request_id):
                break
            await asyncio.sleep(CANCEL_TURN_S)
