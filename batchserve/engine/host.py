"""The interface between AsyncEngine and the thread or process that runs the engine loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.engine.input_processor import InputProcessor
    from batchserve.engine.messages import Message, Reply
    from batchserve.metrics import MetricsSource
    from batchserve.types import ModelInfo


class EngineHost(Protocol):
    """A thread or a process that runs the engine loop."""

    @property
    def processor(self) -> InputProcessor: ...
    @property
    def info(self) -> ModelInfo: ...
    @property
    def metrics(self) -> MetricsSource: ...

    def start(self, on_reply: Callable[[Reply], None]) -> None:
        """Starts to pass replies to on_reply, in a separate thread."""

    def send(self, message: Message) -> None:
        """Sends a message. Messages are handled in order."""

    def join(self) -> None:
        """Waits until the engine has ended. End must have been sent."""

    def kill(self) -> None:
        """Ends the engine now, whatever it is doing, if possible."""
