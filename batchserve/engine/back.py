"""The contract between the asyncio side of an engine and what runs its loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.engine.input_processor import InputProcessor
    from batchserve.engine.messages import Message, Reply
    from batchserve.metrics import MetricsSource
    from batchserve.types import ModelInfo


class Back(Protocol):
    """A thread or a process that runs the engine loop."""

    @property
    def processor(self) -> InputProcessor: ...
    @property
    def info(self) -> ModelInfo: ...
    @property
    def metrics(self) -> MetricsSource: ...

    def start(self, on_reply: Callable[[Reply], None]) -> None:
        """From now on replies come, in a thread of its own."""

    def send(self, message: Message) -> None:
        """Messages are taken in their order."""

    def join(self) -> None:
        """Wait until it has ended; it has been sent End."""

    def kill(self) -> None:
        """End it now, whatever it is doing, if that can be done."""
