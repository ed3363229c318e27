"""Converts answers of the engine to protocol messages, and back for clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

from batchserve.types import Delta, FinishReason, Started, Timing, TokenLogprobs, Usage
from batchserve.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchserve.metrics import MetricsReading
    from batchserve.types import ModelInfo, RequestOutput

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_FINISH_REASONS_BACK = {theirs: mine for mine, theirs in _FINISH_REASONS.items()}


def to_stream_responses(event: Started | Delta) -> Iterator[pb.StreamGenerateResponse]:
    """Yields the messages of one engine event. The last Delta gives a `delta`, unless empty, and a `finished`."""
    if isinstance(event, Started):
        started = pb.Started(request_id=event.request_id, prompt_tokens=event.prompt_tokens)
        yield pb.StreamGenerateResponse(started=started)
        return
    if event.text or event.token_ids or event.prompt_logprobs:
        delta = pb.TokenDelta(
            text=event.text,
            token_ids=event.token_ids,
            logprobs=_logprobs(event.logprobs),
            index=event.index,
            prompt_logprobs=_logprobs(event.prompt_logprobs),
        )
        yield pb.StreamGenerateResponse(delta=delta)
    if event.finish_reason is not None:
        finished = pb.Finished(
            finish_reason=_FINISH_REASONS[event.finish_reason],
            usage=_usage(event.usage),
            timing=_timing(event.timing),
            stop_reason=_stop_reason(event.stop_reason),
            index=event.index,
        )
        yield pb.StreamGenerateResponse(finished=finished)


def from_stream_response(message: pb.StreamGenerateResponse) -> Started | Delta:
    """Converts a message to an engine event. A `finished` becomes a Delta without tokens.

    A newer server's finish reason that this client does not know becomes None.
    """
    if message.WhichOneof("event") == "started":
        return Started(message.started.request_id, message.started.prompt_tokens)
    if message.WhichOneof("event") == "delta":
        logprobs = _logprobs_back(message.delta.logprobs)
        delta = message.delta
        of_prompt = _logprobs_back(delta.prompt_logprobs)
        return Delta(
            "",
            delta.text,
            list(delta.token_ids),
            logprobs=logprobs,
            index=delta.index,
            prompt_logprobs=None if of_prompt is None else [None, *of_prompt],
        )
    finished = message.finished
    usage, timing = finished.usage, finished.timing
    return Delta(
        "",
        finish_reason=_FINISH_REASONS_BACK.get(finished.finish_reason),
        usage=Usage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            usage.draft_tokens,
            usage.accepted_draft_tokens,
        ),
        timing=Timing(
            queue_s=timing.queue.ToNanoseconds() / 1e9,
            first_token_s=timing.first_token.ToNanoseconds() / 1e9,
            total_s=timing.total.ToNanoseconds() / 1e9,
        ),
        stop_reason=_stop_reason_back(finished.stop_reason),
        index=finished.index,
    )


def to_generate_response(output: RequestOutput) -> pb.GenerateResponse:
    """Converts a complete answer."""
    return pb.GenerateResponse(
        request_id=output.request_id,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=_FINISH_REASONS[output.finish_reason],
        usage=_usage(output.usage),
        timing=_timing(output.timing),
        stop_reason=_stop_reason(output.stop_reason),
        logprobs=_logprobs(output.logprobs),
        prompt_logprobs=_logprobs(output.prompt_logprobs),
        other_samples=[to_generate_response(sample) for sample in output.samples[1:]],
    )


def to_stats(reading: MetricsReading) -> pb.GetStatsResponse:
    """Converts an engine's figures."""
    drafters = {
        name: pb.DrafterStats(depths=each.depths, tested=map(int, each.tested), accepted=map(int, each.accepted))
        for name, each in reading.acceptance.items()
    }
    load = {name: int(value) for name, value in reading.load.items()}
    return pb.GetStatsResponse(**load, counters=reading.values, drafters=drafters, age_seconds=reading.age_s)


def _logprobs(each: Sequence[TokenLogprobs | None] | None) -> list[pb.TokenLogprobs]:
    """Converts those that are there."""
    return [
        pb.TokenLogprobs(
            logprob=one.logprob,
            rank=one.rank,
            top_token_ids=[token_id for token_id, _ in one.top],
            top_logprobs=[logprob for _, logprob in one.top],
            text_offset=one.text_offset,
        )
        for one in each or ()
        if one is not None
    ]


def _logprobs_back(each: Sequence[pb.TokenLogprobs]) -> list[TokenLogprobs] | None:
    """Returns None if there are none."""
    found = [
        TokenLogprobs(
            one.logprob,
            one.rank,
            tuple(zip(one.top_token_ids, one.top_logprobs, strict=True)),
            one.text_offset if one.HasField("text_offset") else None,
        )
        for one in each
    ]
    return found or None


def _stop_reason(reason: str | int | None) -> pb.StopReason | None:
    if reason is None:
        return None
    return pb.StopReason(stop_string=reason) if isinstance(reason, str) else pb.StopReason(stop_token_id=reason)


def _stop_reason_back(reason: pb.StopReason) -> str | int | None:
    kind = reason.WhichOneof("reason")
    found: str | int | None = getattr(reason, kind) if kind else None
    return found


def to_model_info(info: ModelInfo, version: str) -> pb.GetModelInfoResponse:
    """Converts the description of the served model. version: of this package."""
    return pb.GetModelInfoResponse(
        model=info.name,
        architecture=info.architecture,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        eos_token_ids=info.eos_token_ids,
        attention_backend=info.attention_backend,
        drafter=info.drafter,
        decoding_length=info.decoding_length,
        has_tokenizer=info.has_tokenizer,
        execution=info.execution,
        instruction_set=info.instruction_set,
        version=version,
    )


def _usage(usage: Usage | None) -> pb.Usage | None:
    if usage is None:
        return None
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        draft_tokens=usage.draft_tokens,
        accepted_draft_tokens=usage.accepted_draft_tokens,
    )


def _timing(timing: Timing | None) -> pb.Timing | None:
    if timing is None:
        return None
    return pb.Timing(
        queue=_duration(timing.queue_s), first_token=_duration(timing.first_token_s), total=_duration(timing.total_s)
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
