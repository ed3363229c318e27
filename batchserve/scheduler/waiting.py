"""Who waits to be let in: sorted, as there may be tens of thousands (offline, all prompts are there at once)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchserve.request import Request


class WaitingQueue:
    """Requests in the order of policy.rank: higher priority first, then earlier arrival; but whoever came max_wait_s
    ago before all others. Of equals the one that was added first, but for those that were put back.
    """

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._numbers: dict[Request, int] = {}  # no two are equal; the rest is sorted
        self._by_priority: list[tuple[int, float, int, Request]] = []
        self._by_arrival: list[tuple[float, int, Request]] = []
        self._by_deadline: list[tuple[float, int, Request]] = []  # of those that have one
        self._next, self._before = 0, -1

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._numbers)

    def add(self, request: Request) -> None:
        self._insert(request, self._next)
        self._next += 1

    def put_back(self, request: Request) -> None:
        """Before all that came at the same time."""
        self._insert(request, self._before)
        self._before -= 1

    def _insert(self, request: Request, number: int) -> None:
        self._numbers[request] = number
        insort(self._by_priority, (-request.priority, request.arrival_s, number, request))
        insort(self._by_arrival, (request.arrival_s, number, request))
        if request.deadline_s is not None:
            insort(self._by_deadline, (request.deadline_s, number, request))

    def remove(self, request: Request) -> None:
        """Raises KeyError where the request does not wait."""
        number = self._numbers.pop(request)
        del self._by_priority[bisect_left(self._by_priority, (-request.priority, request.arrival_s, number))]
        del self._by_arrival[bisect_left(self._by_arrival, (request.arrival_s, number))]
        if request.deadline_s is not None:
            del self._by_deadline[bisect_left(self._by_deadline, (request.deadline_s, number))]

    def first(self, now_s: float) -> Request:
        """Who comes first at this moment; IndexError where nobody waits."""
        oldest = self._by_arrival[0][-1]
        return oldest if now_s - oldest.arrival_s > self._max_wait_s else self._by_priority[0][-1]

    def foremost(self, now_s: float, most: int) -> list[Request]:
        """At most so many, who comes first before all others; him alone once he has waited max_wait_s."""
        if not self._by_arrival or now_s - self._by_arrival[0][-1].arrival_s > self._max_wait_s:
            return [entry[-1] for entry in self._by_arrival[:1]]
        return [entry[-1] for entry in self._by_priority[:most]]

    def expired(self, now_s: float) -> list[Request]:
        """Those whose deadline has passed."""
        return [late[-1] for late in self._by_deadline[: bisect_right(self._by_deadline, (now_s, math.inf))]]
