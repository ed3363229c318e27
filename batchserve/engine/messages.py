"""What the front of an engine and its loop tell each other: plain messages, which may cross processes.

A ticket names one request of the front's for as long as the engine runs; ids may be used again at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchserve.draft.factory import DraftLimits
    from batchserve.engine.input_processor import ModelFacts
    from batchserve.errors import BatchserveError, EngineFaultError
    from batchserve.metrics import MetricsReading
    from batchserve.request import DraftScope, Request
    from batchserve.types import Delta, ModelInfo


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request; where it is_whole its deltas come in one, with the last."""

    ticket: int
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a request; harmless when it has ended."""

    ticket: int


@dataclass(frozen=True, slots=True)
class ClearScope:
    """Forget what a draft scope's requests have shared; answered by Done."""

    ticket: int
    scope: DraftScope


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered by Done, between two steps."""

    ticket: int


@dataclass(frozen=True, slots=True)
class End:
    """Abort everything, save the draft cache, and end."""


@dataclass(frozen=True, slots=True)
class Events:
    """What a step came to. The last of a request is an error, or a Delta with a finish_reason."""

    events: list[tuple[int, Delta | BatchserveError]]


@dataclass(frozen=True, slots=True)
class Done:
    """What was asked with this ticket is done, or has failed."""

    ticket: int
    error: BatchserveError | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Every request that has been handed over is ended by this; for good, unless the books are consistent."""

    error: EngineFaultError
    is_consistent: bool


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """Answered by Reading, also while a step is under way; only between processes."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What ReadMetrics has asked for."""

    reading: MetricsReading


@dataclass(frozen=True, slots=True)
class Progress:
    """What the start of an engine says while it goes on."""

    message: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built. What the front's door has to know of it, beside the tokenizer, which it loads itself."""

    info: ModelInfo
    facts: ModelFacts
    limits: Mapping[str, DraftLimits]


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """Why there is no engine."""

    error: Exception


Message = Add | Abort | ClearScope | Ping | End
Reply = Events | Done | Failed
