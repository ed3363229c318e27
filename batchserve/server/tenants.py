"""What the callers of each tenant use, and the limits on it. All on the server's event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchserve.errors import BatchserveError, DeadlineExceededError, InvalidRequestError, QuotaExceededError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchserve.server.keys import Caller

QUEUE_RETRY_S = 1.0
MAX_QUEUED = 256  # of a key that does not say how many may wait


@dataclass(slots=True)
class TenantCounts:
    """Totals of one tenant since the server's start."""

    requests: int = 0
    refused: int = 0  # by its limits
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True, eq=False)
class Tenant:
    """num_in_flight: requests in the engine, each sample of a prompt counted. tokens: that may be used now; below 0,
    so many were used too many: what an answer takes is known at its end.
    """

    counts: TenantCounts = field(default_factory=TenantCounts)
    num_in_flight: int = 0
    waiting: deque[tuple[asyncio.Future[None], int, int]] = field(default_factory=deque)  # with number and limit
    tokens: float | None = None
    _filled_s: float = 0.0

    def refill(self, tokens_per_minute: int, now_s: float) -> float:
        """Returns the tokens that may be used now. They grow steadily, up to those of a minute."""
        grown = (now_s - self._filled_s) * tokens_per_minute / 60
        self.tokens = tokens_per_minute if self.tokens is None else min(tokens_per_minute, self.tokens + grown)
        self._filled_s = now_s
        return self.tokens

    def use(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Counts tokens of a request."""
        self.counts.prompt_tokens += prompt_tokens
        self.counts.completion_tokens += completion_tokens
        if self.tokens is not None:
            self.tokens -= prompt_tokens + completion_tokens

    def leave(self, num_requests: int) -> None:
        """Requests have ended. Those that wait come in, in their order."""
        self.num_in_flight -= num_requests
        while self.waiting:
            future, count, most = self.waiting[0]
            if future.done():  # cancelled, and the call that waited for it has not run yet
                self.waiting.popleft()
                continue
            if self.num_in_flight + count > most:
                return
            self.waiting.popleft()
            self.num_in_flight += count
            future.set_result(None)


class Tenants:
    """All tenants that have called. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.by_name: dict[str, Tenant] = {}
        self._clock = clock

    def refuse_waiting(self, error: BatchserveError) -> None:
        """Ends those who wait for their turn with this error."""
        for tenant in self.by_name.values():
            while tenant.waiting:
                future, _, _ = tenant.waiting.popleft()
                if not future.done():
                    future.set_exception(error)

    @asynccontextmanager
    async def admitted(self, caller: Caller, num_requests: int, timeout_s: float | None) -> AsyncIterator[Tenant]:
        """Lets a call's requests in, after waiting for those of the same tenant before it if its limits ask for that.

        Raises QuotaExceededError, InvalidRequestError, DeadlineExceededError.
        """
        tenant = self.by_name.setdefault(caller.tenant, Tenant())
        try:
            self._check_tokens(caller, tenant)
            await self._enter(caller, tenant, num_requests, timeout_s)
            try:
                self._check_tokens(caller, tenant)  # others may have used them up meanwhile
            except QuotaExceededError:
                tenant.leave(num_requests)
                raise
        except QuotaExceededError:
            tenant.counts.refused += 1
            raise
        tenant.counts.requests += num_requests
        try:
            yield tenant
        finally:
            tenant.leave(num_requests)

    def _check_tokens(self, caller: Caller, tenant: Tenant) -> None:
        if caller.tokens_per_minute is None:
            return
        left = tenant.refill(caller.tokens_per_minute, self._clock())
        if left <= 0:
            message = f"tokens_per_minute = {caller.tokens_per_minute}: used up by tenant {caller.tenant!r}"
            raise QuotaExceededError(message, (1 - left) * 60 / caller.tokens_per_minute)

    async def _enter(self, caller: Caller, tenant: Tenant, count: int, timeout_s: float | None) -> None:
        most = caller.max_in_flight
        if most is None or (not tenant.waiting and tenant.num_in_flight + count <= most):
            tenant.num_in_flight += count
            return
        if count > most:
            bound = f"at most {most}, the max_in_flight of the key"
            raise InvalidRequestError("INVALID_N", "n", count, bound)
        most_waiting = MAX_QUEUED if caller.max_queued is None else caller.max_queued
        if len(tenant.waiting) >= most_waiting:
            message = f"max_in_flight = {most}, max_queued = {most_waiting}: both used up by {caller.tenant!r}"
            raise QuotaExceededError(message, QUEUE_RETRY_S)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = turn, count, most
        tenant.waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            if entry in tenant.waiting:
                tenant.waiting.remove(entry)
                tenant.leave(0)  # the next one may fit
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                tenant.leave(count)  # it had been let in at the same moment
            if isinstance(error, TimeoutError):
                raise DeadlineExceededError(
                    "deadline passed while the request waited for its tenant's others"
                ) from None
            raise
