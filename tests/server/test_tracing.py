"""Traces by OTLP, received by a real collector's protocol; and prompts in the log, if they are asked for."""

from __future__ import annotations

import asyncio
import gzip
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from batchserve.errors import ConfigError
from batchserve.server_config import ServerConfig
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine
from tests.server.harness import ask, failure_of, serving
from tests.server.http.raw import post

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Keeps the spans that are sent to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for each in request.resource_spans:
            self.resources.append({one.key: one.value.string_value for one in each.resource.attributes})
            for scope in each.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}


async def test_a_trace_of_each_call(serve_tiny: Serve, collector: Collector):
    config = ServerConfig(port=0, http_port=0, otlp_endpoint=collector.url)
    parent = f"00-{TRACE}-{PARENT}-01"
    body = {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True, "temperature": 0, "request_id": "over-http"}
    async with serve_tiny(server=config) as served:
        await post(served.url, "/v1/completions", body, traceparent=parent, tracestate="x=y")
        call = served.client.stub.StreamGenerate(ask(request_id="over-grpc"), metadata=(("traceparent", parent),))
        assert [message async for message in call]
        await failure_of(served.client.generate(ask(max_tokens=10**6)))
        await post(served.url, "/v1/completions", {**body, "request_id": "not-sampled"}, traceparent=parent[:-1] + "0")
        await served.client.generate(ask(request_id="alone"))
    servers = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    calls = {attributes(span).get("gen_ai.response.id"): span for span in servers}
    assert set(calls) == {"over-http", "over-grpc", "alone", None}
    assert collector.resources[0]["service.name"] == "batchserve"
    for name, method in (("over-http", "/v1/completions"), ("over-grpc", "StreamGenerate")):
        span = calls[name]
        assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (method, TRACE, PARENT)
        found = attributes(span)
        assert found["gen_ai.usage.input_tokens"] == 3
        assert found["gen_ai.usage.output_tokens"] in (20, 8)
        assert found["gen_ai.response.finish_reasons"] == "length"
        assert found["batchserve.status"] == "OK"
        parts = [each for each in collector.spans if each.parent_span_id == span.span_id]
        assert [each.name for each in parts] == ["queue", "prefill", "decode"]
        times = [time for each in parts for time in (each.start_time_unix_nano, each.end_time_unix_nano)]
        assert times == sorted(times)
        assert span.start_time_unix_nano <= times[0] + 10**6
        assert times[-1] <= span.end_time_unix_nano + 10**6
    assert calls["alone"].trace_id.hex() != TRACE
    failed = calls[None]
    assert (failed.status.code, failed.status.message) == (2, "CONTEXT_EXCEEDED")


async def test_a_collector_that_is_not_there_costs_nothing(caplog: pytest.LogCaptureFixture):
    engine: Any = FakeEngine()
    engine.go_on.set()
    config = ServerConfig(port=0, http_port=0, otlp_endpoint="http://127.0.0.1:9/v1/traces", drain_timeout_s=1.0)
    async with asyncio.timeout(30):
        async with serving(engine, config) as served:
            assert (await served.client.generate(ask())).text == "ab"
    with pytest.raises(ConfigError, match="otlp_endpoint = 'collector:4317': must be a URL"):
        ServerConfig(otlp_endpoint="collector:4317")


@pytest.mark.parametrize("has_prompt_logs", [False, True])
async def test_prompts_are_logged_only_if_asked_for(has_prompt_logs: bool, caplog: pytest.LogCaptureFixture):
    engine: Any = FakeEngine()
    engine.go_on.set()
    caplog.set_level(logging.DEBUG, "batchserve")
    config = ServerConfig(port=0, http_port=0, has_prompt_logs=has_prompt_logs)
    async with serving(engine, config) as served:
        await served.client.generate(ask(77, 78))
        await post(served.url, "/v1/completions", {"prompt": [77, 78], "stream": True})
    lines = [record for record in caplog.records if record.message == "request"]
    assert len(lines) >= 2
    for line in lines[:2]:
        assert (getattr(line, "prompt", None), getattr(line, "answer", None)) == (
            ([77, 78], "ab") if has_prompt_logs else (None, None)
        )
    assert ("77, 78" in "".join(str(vars(record)) for record in caplog.records)) == has_prompt_logs
