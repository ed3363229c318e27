"""Runs the engine loop in a thread of this process."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import TYPE_CHECKING

from batchserve.engine.engine_loop import EngineLoop
from batchserve.engine.messages import End
from batchserve.logs import adopt_library_loggers

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.config import EngineConfig
    from batchserve.engine.messages import Message, Reply
    from batchserve.startup.build import BuiltEngine

EXIT_TIMEOUT_S = 30.0  # must cover a last step and saving a draft cache
logger = logging.getLogger(__name__)


class EngineThread:
    """An EngineHost in a thread next to the asyncio loop."""

    def __init__(self, built: BuiltEngine, draft_cache: str | None) -> None:
        self.processor, self.info, self.metrics = built.processor, built.info, built.core.metrics
        self._loop = EngineLoop(built, draft_cache, self._reply)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run, name="batchserve-engine", daemon=True)

    def start(self, on_reply: Callable[[Reply], None]) -> None:
        self._on_reply = on_reply
        atexit.register(self._end_at_exit)
        self._thread.start()

    def _reply(self, reply: Reply) -> None:
        try:
            self._on_reply(reply)
        except RuntimeError:  # the asyncio loop was closed without shutdown()
            logger.warning("event loop closed; dropped: %s", type(reply).__name__)

    def send(self, message: Message) -> None:
        self._loop.inbox.put(message)

    def join(self) -> None:
        self._thread.join()
        atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        """Ends the engine of a program that exits without shutdown(), so that the draft cache is saved."""
        if os.getpid() == self._pid:
            self.send(End())
            self._thread.join(EXIT_TIMEOUT_S)

    def kill(self) -> None:
        """Does nothing: a thread cannot be killed."""


def build_here(config: EngineConfig, on_progress: Callable[[str], None] | None) -> BuiltEngine:
    """Builds an engine. Imports it late, in a thread: it takes seconds, and an EngineProcess does not need it here."""
    from batchserve.startup.build import build_engine

    adopt_library_loggers()
    return build_engine(config, on_progress, is_serving=True)
