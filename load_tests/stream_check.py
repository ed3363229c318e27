"""What a well-formed stream of gRPC is, checked event by event, and what the client's clock says of any stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from batchserve.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class StreamShapeError(Exception):
    """The server answered OK, but not with the stream that it has to send, or its counts do not agree."""


@dataclass(slots=True)
class StreamRecord:
    """One answered request. Times are seconds of the client's clock; `arrivals` has (time, tokens) of each delta."""

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended_s: float = 0.0
    usage: pb.Usage = field(default_factory=pb.Usage)

    @property
    def ttft_s(self) -> float | None:
        """From sending the request to its first token; None for an empty answer."""
        return next((at_s - self.sent_s for at_s, count in self.arrivals if count), None)

    @property
    def end_to_end_s(self) -> float:
        return self.ended_s - self.sent_s

    def inter_token_latencies_s(self) -> list[float]:
        """A delta of n tokens that comes g after the one before it is n tokens of g / n each."""
        arrivals = [arrival for arrival in self.arrivals if arrival[1]]
        latencies: list[float] = []
        for (before_s, _), (at_s, count) in pairwise(arrivals):
            latencies += [(at_s - before_s) / count] * count
        return latencies


def consume(
    request: pb.GenerateRequest,
    events: Iterable[pb.StreamGenerateResponse],
    clock: Callable[[], float],
    sent_s: float,
) -> StreamRecord:
    """Read a stream to its end; raises StreamShapeError, and whatever reading raises.

    sent_s: when the call was made, which takes time itself.
    """
    record = StreamRecord(sent_s)
    started: pb.Started | None = None
    finished: pb.Finished | None = None
    for event in events:
        kind = event.WhichOneof("event")
        if finished is not None:
            raise StreamShapeError(f"{kind} after finished")
        if (kind == "started") != (started is None):
            raise StreamShapeError("a second started" if kind == "started" else f"{kind} before started")
        if kind == "started":
            started = event.started
        elif kind == "delta":
            record.arrivals.append((clock(), len(event.delta.token_ids)))
        elif kind == "finished":
            finished = event.finished
        else:
            raise StreamShapeError("an empty event")
    record.ended_s = clock()
    if started is None or finished is None:
        raise StreamShapeError("ended with OK before " + ("started" if started is None else "finished"))
    record.usage = finished.usage
    check_counts(
        record,
        max_tokens=request.stop.max_tokens if request.stop.HasField("max_tokens") else None,
        is_speculating=request.speculation.mode != pb.SpeculationOptions.MODE_OFF,
        is_cut_at_max=finished.finish_reason == pb.FINISH_REASON_LENGTH,
        also={
            "a request id": bool(started.request_id),
            f"prompt_tokens {started.prompt_tokens} = {record.usage.prompt_tokens}": (
                started.prompt_tokens == record.usage.prompt_tokens
            ),
            "a finish reason": finished.finish_reason != pb.FINISH_REASON_UNSPECIFIED,
        },
    )
    return record


def check_counts(
    record: StreamRecord,
    *,
    max_tokens: int | None,
    is_speculating: bool,
    is_cut_at_max: bool,
    also: Mapping[str, bool],
) -> None:
    """Checks what the usage says against what was delivered and asked for. Raises StreamShapeError.

    is_cut_at_max: the answer ended because it had max_tokens. also: what else must be true.
    """
    usage = record.usage
    delivered = sum(count for _, count in record.arrivals)
    checks = {
        **also,
        f"prompt_tokens {usage.prompt_tokens} > 0": usage.prompt_tokens > 0,
        f"{delivered} tokens delivered = completion_tokens {usage.completion_tokens}": (
            delivered == usage.completion_tokens
        ),
        f"completion_tokens {usage.completion_tokens} <= max_tokens {max_tokens}": (
            max_tokens is None or usage.completion_tokens <= max_tokens
        ),
        f"accepted {usage.accepted_draft_tokens} <= drafted {usage.draft_tokens}": (
            usage.accepted_draft_tokens <= usage.draft_tokens
        ),
        f"drafted {usage.draft_tokens} = 0 without speculation": is_speculating or usage.draft_tokens == 0,
        f"{delivered} tokens = max_tokens {max_tokens} where that was the reason": (
            max_tokens is None or not is_cut_at_max or delivered == max_tokens
        ),
    }
    broken = [what for what, holds in checks.items() if not holds]
    if broken:
        raise StreamShapeError("not true: " + "; ".join(broken))
