"""When requests are sent: in an open loop at random times by a rate, in a closed loop one after the other."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

SLEEP_ROUNDING_S = 0.0015  # asyncio wakes up to a millisecond late

Send = Callable[[int, float], Awaitable[None]]  # gets a request's number and when it is due


class Clock(Protocol):
    """Seconds since a measurement began."""

    def now(self) -> float: ...
    async def sleep_until(self, when_s: float) -> None: ...


class WallClock:
    """The real time."""

    def __init__(self) -> None:
        self._origin_s = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._origin_s

    async def sleep_until(self, when_s: float) -> None:
        """Returns at a time, late by less than 0.1 ms if the event loop is idle: it stays awake at the end."""
        while (left_s := when_s - self.now()) > 0:  # noqa: ASYNC110 - time has no event
            await asyncio.sleep(max(0.0, left_s - SLEEP_ROUNDING_S))


@dataclass(frozen=True, slots=True)
class Extent:
    """How long a measurement sends: so many requests, or so many seconds."""

    num_requests: int | None = None
    duration_s: float | None = None

    def is_over(self, number: int, at_s: float) -> bool:
        """True if the request with this number, from 0 on, is not sent any more at this time."""
        if self.num_requests is not None and number >= self.num_requests:
            return True
        return self.duration_s is not None and at_s >= self.duration_s


def arrival_times_s(rate: float, burstiness: float = 1.0, seed: int = 0) -> Iterator[float]:
    """Yields when requests are due, from 0 on, without end.

    The gaps have the mean 1 / rate. They follow a gamma distribution whose shape is the burstiness: 1 is a Poisson
    process, less is burstier, more is more even. With an infinite rate all requests are due at once.
    """
    source, at_s = random.Random(f"arrivals {seed}"), 0.0
    while True:
        yield at_s
        if rate < math.inf:
            at_s += source.gammavariate(burstiness, 1 / (rate * burstiness))


async def run_open_loop(times_s: Iterable[float], extent: Extent, clock: Clock, send: Send) -> None:
    """Sends every request when it is due, however many are in flight. Returns when all have ended."""
    async with asyncio.TaskGroup() as group:
        for number, due_s in enumerate(times_s):
            if extent.is_over(number, due_s):
                break
            await clock.sleep_until(due_s)
            group.create_task(_awaited(send(number, due_s)))


async def run_closed_loop(concurrency: int, extent: Extent, clock: Clock, send: Send) -> None:
    """Keeps so many requests in flight: each is sent when one before it has ended. Returns when all have ended."""
    numbers = count()

    async def one_after_the_other() -> None:
        while not extent.is_over(number := next(numbers), clock.now()):
            await send(number, clock.now())

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_the_other())


async def _awaited(sending: Awaitable[None]) -> None:
    await sending
