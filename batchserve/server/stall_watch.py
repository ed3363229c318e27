"""Detects a stalled engine. A step that never ends raises no error, and the server would stay SERVING forever."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchserve.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)
LOOKS = 10  # pings within the time that an answer may take


async def watch_for_stalls(engine: AsyncEngine, timeout_s: float, tell: Callable[[bool], Awaitable[None]]) -> None:
    """Calls tell(False) when the engine has not answered for timeout_s, and tell(True) when it does. Never returns.

    The engine answers between two steps, and at once when it is idle. A failed engine answers with an error, which is
    ignored here because failures are reported elsewhere.
    """
    is_stalled = False
    while True:
        answer = asyncio.ensure_future(engine.ping())
        try:
            await asyncio.wait([answer], timeout=timeout_s)
            if not answer.done():
                is_stalled = True
                logger.error("the engine has not answered for %g s: a step does not end", timeout_s)
                await tell(False)
                await asyncio.wait([answer])
            if answer.exception() is None and is_stalled:
                is_stalled = False
                logger.warning("the engine answers again")
                await tell(True)
        finally:
            answer.cancel()
        await asyncio.sleep(timeout_s / LOOKS)
