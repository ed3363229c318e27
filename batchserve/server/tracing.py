"""OpenTelemetry traces: a span for each call, with its time in the queue, of the prompt and of decoding under it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from batchserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from batchserve.server.request_log import CallRecord

logger = logging.getLogger(__name__)

SERVICE = "batchserve"
CONTEXT_HEADERS = ("traceparent", "tracestate")  # W3C's, over HTTP and as gRPC metadata
SHUTDOWN_TIMEOUT_MS = 5000


class Tracing:
    """Sends spans when their calls have ended. What the sender cannot deliver is dropped: no call waits for it."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, version: str, model: str) -> Tracing:
        """Sends to an OTLP collector by HTTP, such as http://127.0.0.1:4318/v1/traces. Raises ConfigError."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                f"otlp_endpoint = {endpoint!r}: needs OpenTelemetry: pip install 'batchserve[tracing]'"
            ) from None
        resource = Resource.create({"service.name": SERVICE, "service.version": version, "gen_ai.request.model": model})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def ended(self, record: CallRecord, status: str, reason: str) -> None:
        """Makes the spans of a call that has ended. reason: the error's, "" without one. Raises nothing."""
        try:
            self._make_spans(record, status, reason)
        except Exception:
            logger.warning("tracing: a call has no trace", exc_info=True)

    def _make_spans(self, record: CallRecord, status: str, reason: str) -> None:
        from opentelemetry import trace
        from opentelemetry.trace import SpanKind, Status, StatusCode

        context = self._propagator.extract(dict(record.trace_context))
        attributes = _attributes(record, status)
        span = self._tracer.start_span(record.method, context, SpanKind.SERVER, attributes, start_time=record.begun_ns)
        if reason:
            span.set_status(Status(StatusCode.ERROR, reason))
        if span.is_recording() and record.timing is not None:
            self._add_parts(record, trace.set_span_in_context(span))
        span.end(time.time_ns())

    def shutdown(self) -> None:
        """Sends what is left. May take some seconds."""
        self._provider.force_flush(SHUTDOWN_TIMEOUT_MS)
        self._provider.shutdown()

    def _add_parts(self, record: CallRecord, parent: object) -> None:
        timing = record.timing
        assert timing is not None
        ends_s = (0.0, timing.queue_s, timing.first_token_s, timing.total_s)
        for name, begin_s, end_s in zip(("queue", "prefill", "decode"), ends_s[:-1], ends_s[1:], strict=True):
            begin_ns, end_ns = (record.arrival_ns + round(seconds * 1e9) for seconds in (begin_s, end_s))
            span: Span = self._tracer.start_span(name, parent, start_time=begin_ns)  # type: ignore[arg-type]
            span.end(end_ns)


def _attributes(record: CallRecord, status: str) -> Mapping[str, str | int]:
    """Returns what OpenTelemetry's conventions for generative AI name, and our own."""
    found: dict[str, str | int] = {"batchserve.status": status, "client.address": record.peer}
    if record.request_id:
        found["gen_ai.response.id"] = record.request_id
    if record.tenant:
        found["batchserve.tenant"] = record.tenant
    if record.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = record.finish_reason.value
    if (usage := record.usage) is not None:
        found["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
        found["batchserve.cached_tokens"] = usage.cached_tokens
        found["batchserve.draft_tokens"] = usage.draft_tokens
        found["batchserve.accepted_draft_tokens"] = usage.accepted_draft_tokens
    elif record.prompt_tokens is not None:
        found["gen_ai.usage.input_tokens"] = record.prompt_tokens
    return found
