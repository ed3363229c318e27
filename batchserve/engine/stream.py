"""A request in flight, as the asyncio side of the engine sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchserve.engine.unread import Backlog
    from batchserve.errors import BatchserveError
    from batchserve.types import Delta


@dataclass(slots=True, eq=False)
class Stream:
    """The queue is bounded by the context: one event a step."""

    request_id: str
    ticket: int
    is_handed_over: bool = False
    events: asyncio.Queue[Delta | BatchserveError] = field(default_factory=asyncio.Queue)
    backlog: Backlog | None = None
