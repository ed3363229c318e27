"""batchserve: lossless speculative decoding for small, latency-sensitive batches, without a draft model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchserve.config import DraftConfig, EngineConfig
from batchserve.errors import BatchserveError
from batchserve.native.instruction_set import choose_instruction_set
from batchserve.native.kernel_cache import provide_cache_folder
from batchserve.native.threads import apply_thread_policy
from batchserve.types import Chat, Delta, FinishReason, RequestOutput, SamplingParams, SpeculationParams, Started, Usage
from batchserve.version import __version__ as __version__

if TYPE_CHECKING:
    from batchserve.engine.async_engine import AsyncEngine
    from batchserve.llm import LLM

__all__ = [
    "LLM",
    "AsyncEngine",
    "BatchserveError",
    "Chat",
    "Delta",
    "DraftConfig",
    "EngineConfig",
    "FinishReason",
    "RequestOutput",
    "SamplingParams",
    "SpeculationParams",
    "Started",
    "Usage",
    "choose_instruction_set",
]

provide_cache_folder()


def __getattr__(name: str) -> Any:
    """Imports LLM and AsyncEngine on first use, after the thread policy is applied, because they import torch."""
    if name not in ("LLM", "AsyncEngine"):
        raise AttributeError(f"module 'batchserve' has no attribute {name!r}")
    apply_thread_policy()
    if name == "LLM":
        from batchserve.llm import LLM

        return LLM
    from batchserve.engine.async_engine import AsyncEngine

    return AsyncEngine
