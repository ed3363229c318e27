"""Messages between rank 0 and the other ranks. Every step is one message to each rank, and one from it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.config import EngineConfig
    from batchserve.parallel.mirror import TableChange
    from batchserve.runner.ragged_batch import RaggedBatch
    from batchserve.sampling.verify import StepTokens
    from batchserve.startup.prepared import PreparedModel


@dataclass(frozen=True, slots=True)
class Rank:
    """Tells a process which rank it is, of how many. cores: those that it may use."""

    config: EngineConfig
    number: int
    num_ranks: int
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Built:
    """The rank has its model. total_tokens: of its K/V memory. marks: what its bits depend on."""

    total_tokens: int
    marks: tuple[str, ...]

    @classmethod
    def of(cls, prepared: PreparedModel) -> Built:
        marks = prepared.facts.dtype, prepared.execution, *prepared.marks
        return cls(prepared.executor.allocator.total_tokens, marks)


@dataclass(frozen=True, slots=True)
class Refused:
    """The rank cannot go on."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Step:
    """A rank's rows of a step, after changes of K/V memory that the steps before have led to."""

    changes: Sequence[TableChange]
    batch: RaggedBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """A rank's verified tokens, and K and V of the accepted rows: by place of the request, bytes."""

    tokens: StepTokens
    paths: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The rank's step had no memory. It may be made again."""

    error: str


def packed(message: object) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes) -> Any:
    return pickle.loads(data)
