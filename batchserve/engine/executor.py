"""The contract between an engine core and whatever runs its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchserve.kv.allocator import KVAllocator
    from batchserve.runner.ragged_batch import RaggedBatch
    from batchserve.sampling.verify import StepTokens


class StepHandle(Protocol):
    """A launched step."""

    @property
    def is_running(self) -> bool:
        """Whether it is computed while the host does other things, or only in wait()."""

    @property
    def is_trial(self) -> bool:
        """Whether it was computed in an unusual way, so that its time says nothing of other steps. Ask after wait()."""

    def wait(self) -> StepTokens:
        """Returns the verified tokens of every request of the batch. Call it once."""


class Executor(Protocol):
    """Computes ragged batches: all that an engine core knows of models and devices.

    NativeRunner and ModelRunner are those of one process, LookaheadExecutor is that of several. Only the thread that
    called bind_thread() may launch steps.
    """

    num_threads: int  # of the host, that steps compute on
    can_walk_sampled: Callable[[], bool]  # whether the walks of sampled requests are compiled, or may be now

    @property
    def allocator(self) -> KVAllocator:
        """The K/V memory that its steps use."""

    @property
    def bucket_sizes(self) -> Sequence[int]:
        """The numbers of rows that steps are padded to, ascending; empty if they are not."""

    def bind_thread(self) -> None:
        """Gives the calling thread its compute threads and its device."""

    def launch(self, batch: RaggedBatch) -> StepHandle:
        """Starts a step. Only one may be in progress. Raises RuntimeError or MemoryError if memory is out."""

    def check_device(self) -> None:
        """Raises RuntimeError if the device takes no more work."""
