"""The asyncio side of a request in flight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchserve.engine.backpressure import Backlog
    from batchserve.errors import BatchserveError
    from batchserve.types import Delta


@dataclass(slots=True, eq=False)
class Stream:
    """A request's event queue. It holds one event per step, so the context length bounds it. The samples of one prompt
    share a queue; index: which of them it is.
    """

    request_id: str
    ticket: int
    is_handed_over: bool = False
    events: asyncio.Queue[Delta | BatchserveError] = field(default_factory=asyncio.Queue)
    backlog: Backlog | None = None
    index: int = 0
