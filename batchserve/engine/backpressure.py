"""Counts and bounds deltas that clients have not read, so that a client that does not read cannot fill the memory."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable

STREAMS_PER_BOUND = 64  # bound on all streams together, in multiples of the bound on one
MAX_WRITING = 1024  # writes that may wait at once; each holds some 100 KB whatever its answer is
MIN_WAIT_S = 5.0  # before a client may be given up in favour of others


class BackpressureLimits:
    """The bounds on unread deltas of one server's streams. All methods are called on its asyncio loop."""

    def __init__(self, max_deltas: int, timeout_s: float) -> None:
        """max_deltas: per stream. timeout_s: the longest that a message may wait for its client."""
        self.max_deltas, self.timeout_s = max_deltas, timeout_s
        self.num_deltas = 0  # of all streams
        self.writing: dict[Backlog, float] = {}  # start times of the waiting writes, oldest first


@dataclass(slots=True, eq=False)
class Backlog:
    """The unread deltas of one stream. A context manager for the stream's lifetime."""

    bounds: BackpressureLimits
    num_deltas: int = 0
    _limit: asyncio.Timeout | None = field(default=None, init=False)  # of the current write

    def __enter__(self) -> Backlog:
        return self

    def __exit__(self, *_: object) -> None:
        self.bounds.num_deltas -= self.num_deltas
        self.num_deltas = 0

    def grow(self) -> None:
        """Counts a new delta. Beyond a bound, the write of this stream, or of the one with most deltas, times out."""
        bounds = self.bounds
        self.num_deltas += 1
        bounds.num_deltas += 1
        if self._limit is None:  # no write is waiting: the server itself is late
            return
        if self.num_deltas > bounds.max_deltas:
            self._give_up()
        elif bounds.num_deltas > STREAMS_PER_BOUND * bounds.max_deltas:
            max(bounds.writing, key=lambda backlog: backlog.num_deltas)._give_up()

    def shrink(self) -> None:
        """Counts a delta as taken."""
        self.num_deltas -= 1
        self.bounds.num_deltas -= 1

    async def write(self, send: Awaitable[None]) -> None:
        """Awaits `send`, the write of a message to the client. Raises TimeoutError if the write is given up."""
        writing, now_s = self.bounds.writing, time.monotonic()
        if len(writing) >= MAX_WRITING:
            longest = next(iter(writing))
            if now_s - writing[longest] > MIN_WAIT_S:
                longest._give_up()
        writing[self] = now_s
        try:
            async with asyncio.timeout(self.bounds.timeout_s) as self._limit:
                await send
        finally:
            self._limit = None
            del writing[self]

    def _give_up(self) -> None:
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(0.0)
        self._limit = None
