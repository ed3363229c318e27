"""The asyncio side of the engine. (Interface; the body follows.)"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

from batchserve.config import EngineConfig
from batchserve.types import Delta, ModelInfo, RequestOutput, SamplingParams, SpeculationParams, Started


class AsyncEngine:
    """One engine thread beside the running asyncio loop."""

    @classmethod
    async def start(cls, config: EngineConfig, on_progress: Callable[[str], None] | None = None) -> AsyncEngine:
        """Load and warm the model in a thread; raises ConfigError, UnsupportedModelError."""
        ...

    @property
    def info(self) -> ModelInfo: ...

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        model: str = "",
        speculation: SpeculationParams | None = None,
        deadline_s: float | None = None,  # seconds from now
    ) -> AsyncGenerator[Started | Delta, None]:
        """Yields one Started, then Deltas; the last has finish_reason, usage and timing set.

        Raises (before the first yield, or at any later point) a BatchserveError subclass. Closing the generator
        (aclose(), task cancellation) aborts the request within one step.
        """
        ...

    async def generate(self, prompt, params=None, **kwargs) -> RequestOutput:
        """The same, whole (same keyword arguments)."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests (UnavailableError), wait for those in flight; True if all ended in time."""
        ...

    async def shutdown(self) -> None:
        """End every request in flight with UnavailableError and join the engine thread."""
        ...
