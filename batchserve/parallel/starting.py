"""Starts the ranks of an engine, beside its own loading of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchserve.errors import ConfigError
from batchserve.free_memory import free_memory_bytes
from batchserve.kv.slab import SlabAllocator
from batchserve.native.cores import default_threads, usable_cores
from batchserve.parallel import split
from batchserve.parallel.lookahead import LookaheadExecutor
from batchserve.parallel.messages import Built
from batchserve.parallel.ranks import Ranks
from batchserve.startup.kv_memory import share_of

if TYPE_CHECKING:
    from batchserve.config import EngineConfig
    from batchserve.startup.prepared import PreparedModel


class RanksBeingBuilt:
    """Ranks that load their model.

    config: of each rank by itself, rank 0 included: with its part of the machine's memory and threads.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Starts them, if there are to be any. Raises ConfigError."""
        count = config.lookahead_parallel_size
        self.config, self._ranks = config, None
        if count == 1:
            return
        if config.device == "cuda" or config.attention_backend not in ("auto", "cpu"):
            raise _refused(count)
        self.config = replace(
            config,
            lookahead_parallel_size=1,
            kv_cache_memory=config.kv_cache_memory or share_of(free_memory_bytes()) // count,
            num_threads=config.num_threads or max(1, default_threads() // count),
        )
        self._ranks = Ranks(count, config.rank_timeout_s)
        self._ranks.begin(self.config, _parts(usable_cores(), count))

    def joined(self, prepared: PreparedModel) -> PreparedModel:
        """Returns this rank's model with all ranks' executor. Raises ConfigError, and what a rank raises."""
        ranks = self._ranks
        assert ranks is not None
        if not isinstance(prepared.executor.allocator, SlabAllocator):
            raise _refused(len(ranks.each) + 1)
        ranks.wait_built(Built.of(prepared))
        split.compile_kernels()
        executor = LookaheadExecutor(prepared.executor, ranks)  # type: ignore[arg-type]
        return replace(prepared, executor=executor, marks=(*prepared.marks, f"{len(ranks.each) + 1} ranks"))


def _refused(count: int) -> ConfigError:
    return ConfigError(f"lookahead_parallel_size = {count}: must be 1 on the GPU path")


def _parts(cores: list[int], count: int) -> list[tuple[int, ...]]:
    """Returns the cores of each rank, next to each other; none, which means any, if there are too few."""
    size = len(cores) // count
    return [tuple(cores[i * size : (i + 1) * size]) for i in range(count)]
