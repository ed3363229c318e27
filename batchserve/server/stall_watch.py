"""Whether the engine gets on: a step that never ends fails nothing, and the server would stay SERVING for good."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchserve.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)
LOOKS = 10  # in the time from which on no step counts as a stall


async def watch_for_stalls(engine: AsyncEngine, timeout_s: float, tell: Callable[[bool], Awaitable[None]]) -> None:
    """Tells False when requests have been in flight for timeout_s and no step has ended, True when one has. Never
    returns.
    """
    clock, num_steps, is_stalled = asyncio.get_running_loop().time, -1.0, False
    moved_s = clock()
    while True:
        await asyncio.sleep(timeout_s / LOOKS)
        # In a thread, as an engine that stands still may not answer that, either; then the last answer comes again.
        reading = await asyncio.to_thread(engine.metrics.reading)
        steps = reading.values.get("steps_total", num_steps)
        if steps != num_steps or engine.num_in_flight == 0:
            num_steps, moved_s = steps, clock()
            if is_stalled:
                is_stalled = False
                logger.warning("the engine goes on")
                await tell(True)
        elif not is_stalled and clock() - moved_s >= timeout_s:
            is_stalled = True
            logger.error("the engine has not ended a step for %g s, with %d requests", timeout_s, engine.num_in_flight)
            await tell(False)
