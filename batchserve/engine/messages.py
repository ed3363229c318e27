"""Messages between the front end (AsyncEngine) and the engine loop. They are plain data and may cross processes.

A ticket names one request of the front end for as long as the engine runs. Request ids may be reused at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchserve.draft.factory import DraftLimits
    from batchserve.engine.input_processor import ModelFacts
    from batchserve.engine.step_watch import SeenStep
    from batchserve.errors import BatchserveError, EngineFaultError
    from batchserve.metrics import MetricsReading
    from batchserve.request import DraftScope, NewRequest
    from batchserve.types import Delta, ModelInfo


@dataclass(frozen=True, slots=True)
class Add:
    """Queues a request. If it is_whole, all of its deltas come as one, at its end."""

    ticket: int
    request: NewRequest


@dataclass(frozen=True, slots=True)
class Compiled:
    """The grammar of a request is compiled, or has failed with `error`. Only used inside the engine's process."""

    ticket: int
    error: BatchserveError | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Aborts a request. Has no effect if the request has ended."""

    ticket: int


@dataclass(frozen=True, slots=True)
class ClearScope:
    """Clears what a draft scope's requests have shared. Answered by Done."""

    ticket: int
    scope: DraftScope


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a Done, which comes between two steps."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Watch:
    """Asks for pictures of steps (Seen), or for no more of them."""

    is_on: bool


@dataclass(frozen=True, slots=True)
class End:
    """Aborts all requests, saves the draft cache and ends the loop."""


@dataclass(frozen=True, slots=True)
class Events:
    """The events of a step, with their tickets. A request's last event is an error or a Delta with a finish_reason."""

    events: list[tuple[int, Delta | BatchserveError]]


@dataclass(frozen=True, slots=True)
class Done:
    """The message with this ticket has been handled, or has failed with `error`."""

    ticket: int
    error: BatchserveError | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A picture of a step."""

    step: SeenStep


@dataclass(frozen=True, slots=True)
class Failed:
    """Ends every request that was handed over. Unless is_consistent, the engine has failed for good."""

    error: EngineFaultError
    is_consistent: bool


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """Asks for the metrics. Answered by Reading, even during a step. Only used between processes."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The answer to ReadMetrics."""

    reading: MetricsReading


@dataclass(frozen=True, slots=True)
class Progress:
    """A progress message during the start of an engine."""

    message: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built. Has what the InputProcessor needs, except the tokenizer: the front end loads that itself."""

    info: ModelInfo
    facts: ModelFacts
    limits: Mapping[str, DraftLimits]


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """The engine could not be built because of this error."""

    error: Exception


Message = Add | Compiled | Abort | ClearScope | Ping | Watch | End
Reply = Events | Done | Seen | Failed
