"""Bind, warm up, serve, drain: what clients see at each point. The engine is a fake one."""

from __future__ import annotations

import asyncio
import logging
import socket
import urllib.request
from collections import Counter
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from batchserve.config import EngineConfig
from batchserve.draft.factory import DraftLimits
from batchserve.engine.input_processor import InputProcessor, ModelFacts
from batchserve.errors import ConfigError, EngineFaultError, QueueFullError
from batchserve.metrics import (
    AGE,
    CALIBRATION,
    COUNTERS,
    EDGES,
    FAILED_CALLS,
    GAUGES,
    HISTOGRAMS,
    LOAD,
    VERIFIED,
    Acceptance,
)
from batchserve.server import lifecycle, metrics_endpoint
from batchserve.server.grpc.servicer import SERVICE_NAME
from batchserve.server.health import ServingStatus
from batchserve.server.keys import Caller, KeyStore
from batchserve.server.lifecycle import GenerationServer
from batchserve.server.metrics_text import MetricsText
from batchserve.server_config import ServerConfig
from batchserve.types import Timing
from batchserve.v1 import generation_pb2 as pb
from tests.server.fakes import FakeEngine
from tests.server.harness import LOOPBACK, Client, Served, ask, failure_of, read_all, serving, until


def _engine() -> Any:
    return FakeEngine()


async def test_before_it_is_warm_it_listens_and_refuses():
    server = GenerationServer(LOOPBACK, "test")
    client = Client(await server.bind())
    for service in ("", SERVICE_NAME):
        assert await client.health_of(service) == "NOT_SERVING"
    for call in (client.generate(ask()), client.stream(ask()), client.stub.GetModelInfo(pb.GetModelInfoRequest())):
        failed = await failure_of(call)
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
        assert "warming up" in failed.message
        assert failed.retry_after_s is not None
    await client.channel.close()
    await server.drain()


async def test_health_watch_sees_every_transition():
    server = GenerationServer(LOOPBACK, "test")
    client = Client(await server.bind())
    watch = client.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    seen = [(await watch.read()).status]
    await server.open(_engine())
    seen.append((await watch.read()).status)
    draining = asyncio.create_task(server.drain())
    seen.append((await watch.read()).status)
    names = [health_pb2.HealthCheckResponse.ServingStatus.Name(status) for status in seen]
    assert names == ["NOT_SERVING", "SERVING", "NOT_SERVING"]
    assert await watch.read() is grpc.aio.EOF
    assert await watch.code() is grpc.StatusCode.OK, "the server ends it, so that gRPC need not"
    await draining
    await client.channel.close()


async def test_health_lists_all_services(fake: Served):
    serving_now = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    answer = await fake.client.health.List(health_pb2.HealthListRequest())
    assert dict(answer.statuses) == {"": serving_now, SERVICE_NAME: serving_now}


async def test_unknown_service_is_not_found_in_health(fake: Served):
    assert (await failure_of(fake.client.health_of("nobody"))).code is grpc.StatusCode.NOT_FOUND


async def test_drain_lets_requests_end_and_refuses_new_ones(fake: Served):
    call = aiter(fake.client.stub.StreamGenerate(ask()))
    assert (await anext(call)).WhichOneof("event") == "started"
    draining = asyncio.create_task(fake.server.drain())
    async with asyncio.timeout(5):
        while await fake.client.health_of() == "SERVING":
            pass
    failed = await failure_of(fake.client.generate(ask()))
    assert failed.code is grpc.StatusCode.UNAVAILABLE
    assert failed.retry_after_s is not None
    assert not draining.done()
    fake.engine.go_on.set()
    rest = [message.WhichOneof("event") async for message in call]
    assert rest == ["delta", "delta", "finished"]
    assert await draining


async def test_drain_ends_what_is_left_after_its_time():
    engine = _engine()
    async with serving(engine, ServerConfig(port=0, http_port=0, drain_timeout_s=0.05)) as served:
        call = aiter(served.client.stub.StreamGenerate(ask()))
        await anext(call)
        assert await served.server.drain() is False
        failed = await failure_of(read_all(call))
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")


async def test_a_second_signal_ends_the_waiting(fake: Served):
    call = aiter(fake.client.stub.StreamGenerate(ask()))
    await anext(call)
    hurry = asyncio.Event()
    draining = asyncio.create_task(fake.server.drain(hurry))
    hurry.set()
    async with asyncio.timeout(5):
        assert await draining is False
    assert (await failure_of(read_all(call))).code is grpc.StatusCode.UNAVAILABLE


async def test_a_second_signal_does_not_wait_for_clients_that_do_not_read(
    fake: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lifecycle, "STATUS_TIMEOUT_S", 60.0)
    monkeypatch.setattr(fake.server._calls, "wait_idle", asyncio.Event().wait)  # as long as nobody reads
    hurry = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, hurry.set)
    async with asyncio.timeout(10):
        assert await fake.server.drain(hurry) is False


async def test_an_engine_that_stands_still_is_killed_behind_a_second_signal(
    fake: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lifecycle, "HURRIED_S", 0.05)
    engine, ended = fake.engine, asyncio.Event()
    monkeypatch.setattr(engine, "shutdown", ended.wait)
    monkeypatch.setattr(engine, "kill", ended.set, raising=False)
    hurry = asyncio.Event()
    draining = asyncio.create_task(fake.server.drain(hurry))
    await asyncio.sleep(0.1)
    assert not draining.done(), "nobody hurries"
    hurry.set()
    async with asyncio.timeout(10):
        await draining
    assert ended.is_set()


async def test_a_burst_of_calls_is_answered_and_none_is_cancelled(fake: Served):
    """Of more than a thousand that wait gRPC would cancel some by itself."""
    fake.engine.go_on.set()
    calls = await asyncio.gather(*(fake.client.generate(ask()) for _ in range(1500)))
    assert {tuple(call.token_ids) for call in calls} == {(1, 2)}


async def test_calls_that_arrive_while_it_stops_are_refused_and_not_cancelled(monkeypatch: pytest.MonkeyPatch):
    """gRPC cancels what it has received and not handed over when it stops; a client may not retry CANCELLED."""
    monkeypatch.setattr(lifecycle, "ARRIVALS_TIMEOUT_S", 60.0)  # a busy machine takes its time for 300 calls
    monkeypatch.setattr(lifecycle, "QUIET_S", 0.5)
    async with serving(_engine()) as served:
        hurry = asyncio.Event()
        hurry.set()
        calls = [asyncio.create_task(failure_of(served.client.generate(ask()))) for _ in range(300)]
        await until(lambda: served.server._calls.num_calls > 0)
        await served.server.drain(hurry)
        assert {failed.code for failed in await asyncio.gather(*calls)} == {grpc.StatusCode.UNAVAILABLE}


async def test_calls_that_never_cease_do_not_keep_it_from_stopping(fake: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lifecycle, "ARRIVALS_TIMEOUT_S", 0.2)
    is_over = False

    async def keep_asking() -> None:
        while not is_over:
            await failure_of(fake.client.generate(ask()))

    draining = asyncio.create_task(fake.server.drain())
    asking = asyncio.create_task(keep_asking())
    async with asyncio.timeout(20):
        assert await draining
    is_over = True
    await asking


async def test_cancelled_calls_close_the_stream(fake: Served):
    for method in (fake.client.stub.StreamGenerate, fake.client.stub.Generate):
        call = method(ask())
        if method is fake.client.stub.StreamGenerate:
            await call.read()
        await until(lambda: fake.engine.num_in_flight == 1)
        call.cancel()
        async with asyncio.timeout(5):
            await fake.engine.is_empty.wait()
        assert fake.engine.num_in_flight == 0


async def test_deadline_and_arguments_reach_the_engine(fake: Served):
    fake.engine.go_on.set()
    request = ask(4, 5, request_id="mine", model="fake", speculation=pb.SpeculationOptions(max_draft_tokens=3))
    request.priority = -3
    answer = await fake.client.generate(request, timeout=60)
    arguments = fake.engine.arguments
    assert 50 < arguments["deadline_s"] < 61  # on the wire it is rounded up
    assert (arguments["prompt"], arguments["request_id"], arguments["model"]) == ([4, 5], "mine", "fake")
    assert (arguments["speculation"].max_draft_tokens, arguments["priority"]) == (3, -3)
    assert (answer.text, list(answer.token_ids)) == ("ab", [1, 2])
    assert answer.timing.queue.ToMilliseconds() == 250
    await fake.client.generate(ask())
    assert fake.engine.arguments["deadline_s"] is None


async def test_engine_errors_become_statuses(fake: Served, caplog: pytest.LogCaptureFixture):
    fake.engine.go_on.set()
    fake.engine.error = EngineFaultError("the step failed")
    for call in (fake.client.generate(ask()), fake.client.stream(ask())):
        failed = await failure_of(call)
        assert (failed.code, failed.reason, failed.domain) == (grpc.StatusCode.INTERNAL, "ENGINE_FAULT", "batchserve")
    fake.engine.error = ZeroDivisionError("secret")
    with caplog.at_level(logging.ERROR):
        failed = await failure_of(fake.client.stream(ask()))
    assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in failed.message
    assert "ZeroDivisionError: secret" in caplog.text


async def test_a_stream_without_an_end_is_an_engine_fault(fake: Served):
    fake.engine.go_on.set()
    fake.engine.is_cut_short = True
    assert (await failure_of(fake.client.stream(ask()))).reason == "ENGINE_FAULT"


async def test_model_info(fake: Served):
    info = await fake.client.stub.GetModelInfo(pb.GetModelInfoRequest(model="fake"))
    assert (info.model, info.max_model_len, list(info.eos_token_ids), info.version) == ("fake", 64, [2], "test")
    failed = await failure_of(fake.client.stub.GetModelInfo(pb.GetModelInfoRequest(model="other")))
    assert (failed.code, failed.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")


async def test_reflection_lists_the_service_unless_switched_off(fake: Served):
    assert SERVICE_NAME in await _reflected_services(fake.client)
    async with serving(_engine(), ServerConfig(port=0, http_port=0, has_reflection=False)) as served:
        failed = await failure_of(_reflected_services(served.client))
        assert failed.code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.slow
async def test_keepalive_without_calls_is_permitted(fake: Served):
    """gRPC's default policy answers the third ping with GOAWAY too_many_pings."""
    options = [
        ("grpc.keepalive_time_ms", 10_000),  # clients ping no more often
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with grpc.aio.insecure_channel(fake.address, options=options) as channel:
        await channel.channel_ready()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 45)


async def test_a_port_in_use_is_a_config_error(fake: Served):
    port = int(fake.address.rsplit(":", 1)[1])
    second = GenerationServer(ServerConfig(port=port, http_port=0), "test")
    with pytest.raises(ConfigError, match=str(port)):
        await second.bind()
    await second.drain()


async def test_listens_on_ipv6_loopback():
    if not _has_ipv6():
        pytest.skip("no IPv6 loopback here")
    async with serving(_engine(), ServerConfig(host="::1", port=0, http_port=0)) as served:
        assert served.address.startswith("[::1]:")
        assert await served.client.health_of() == "SERVING"


async def test_who_asks_for_nothing_keeps_no_thread_of_the_metrics(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics_endpoint._Handler, "timeout", 0.05)
    endpoint = metrics_endpoint.MetricsEndpoint(
        "127.0.0.1", 0, MetricsText(Counter()), ServingStatus(), KeyStore(None, Caller())
    )
    try:
        with socket.create_connection(endpoint.address.rsplit(":", 1), timeout=10) as silent:
            assert await asyncio.to_thread(silent.recv, 1) == b"", "it is closed"
    finally:
        endpoint.close()


async def test_metrics_endpoint():
    engine = _engine()
    metrics = engine.metrics
    metrics.preempted(3)
    metrics.begun(100, 64)
    metrics.begun(20, 0)
    metrics.begun(9, None)
    metrics.unfinished(num_aborted=1, num_failed=4)
    # Drafted, accepted, given, whether these are the first, seconds since the tokens before.
    verified = np.array([(3, 1, 2, True, 0.7), (3, 1, 2, False, 0.008), (3, 0, 1, False, 7.0)], VERIFIED)
    metrics.step_done(num_rows=14, num_draft_rows=10, num_decoding=4, forward_s=0.25, verified=verified)
    metrics.adaptive = lambda: {
        "price_tokens_per_second": 80.0,
        "predicted_step_seconds": 0.02,
        "actual_step_seconds": 0.03,
        "step_time_factor": 1.5,
        "host_seconds": 0.001,
    }
    metrics.acceptance = lambda: {"trie": Acceptance(("1", "2+"), [8, 4], accepted=[6, 1], calibration_error=0.125)}
    metrics.load = lambda: dict(zip(LOAD, (3, 2, 128, 512), strict=True))
    metrics.finished(Timing(queue_s=0.02, first_token_s=0.7, total_s=0.9), num_tokens=5)
    async with serving(engine, ServerConfig(port=0, http_port=0, metrics_port=0)) as served:
        assert served.server._endpoint is not None
        engine.error = QueueFullError(4, 3)
        engine.go_on.set()
        for request in (ask(), ask(), pb.GenerateRequest()):
            await failure_of(served.client.stream(request))
        url = f"http://{served.server._endpoint.address}/metrics"
        body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    samples = {
        (sample.name.removeprefix("batchserve_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }
    expected = {
        ("preemptions_total",): 3,
        ("prompt_tokens_total",): 129,
        ("requests_aborted_total",): 1,
        ("requests_expired_total",): 0,
        ("requests_failed_total",): 4,
        ("prefix_queried_tokens_total",): 120,
        ("prefix_hit_tokens_total",): 64,
        ("draft_rows_total",): 10,
        ("draft_rows_per_request",): 2.5,
        ("price_tokens_per_second",): 80,
        ("predicted_step_seconds",): 0.02,
        ("actual_step_seconds",): 0.03,
        ("step_time_factor",): 1.5,
        ("host_seconds",): 0.001,
        ("requests_running",): 3,
        ("requests_waiting",): 2,
        ("kv_used_tokens",): 128,
        ("kv_total_tokens",): 512,
        ("tested_edges_total", "1", "trie"): 8,
        ("tested_edges_total", "2+", "trie"): 4,
        ("accepted_edges_total", "1", "trie"): 6,
        ("accepted_edges_total", "2+", "trie"): 1,
        ("calibration_error", "trie"): 0.125,
        ("failed_calls_total", "QUEUE_FULL"): 2,
        ("failed_calls_total", "MISSING_INPUT"): 1,
        ("reading_age_seconds",): 0,
        ("requests_finished_total",): 1,
        ("request_seconds_sum",): 0.9,
        ("request_queue_seconds_sum",): 0.02,
        ("time_per_output_token_seconds_sum",): pytest.approx(0.05),
        ("inter_token_latency_seconds_bucket", "0.0025"): 0,
        ("inter_token_latency_seconds_bucket", "0.004"): 2,
        ("inter_token_latency_seconds_bucket", "1.0"): 2,
        ("inter_token_latency_seconds_bucket", "+Inf"): 3,
        ("inter_token_latency_seconds_count",): 3,
        ("inter_token_latency_seconds_sum",): pytest.approx(7.008),
        ("time_to_first_token_seconds_count",): 1,
        ("time_to_first_token_seconds_sum",): 0.7,
    }
    assert {name: samples.get(name) for name in expected} == expected
    names = {name for name, *_ in samples}
    counts = {f"{name}_count" for name in HISTOGRAMS}
    known = {*COUNTERS, *FAILED_CALLS, *GAUGES, *AGE, *LOAD, *EDGES, *CALIBRATION, *counts}
    assert names >= known, "every one is exported"


@pytest.mark.parametrize("name", ["port", "http_port", "metrics_port"])
async def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(lifecycle.signal, "signal", lambda number, handler: None)
    started = []

    async def start_engine() -> Any:
        started.append(True)
        return _engine()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        ports = {"port": _free_port(), "http_port": _free_port(), "metrics_port": _free_port(), name: number}
        with pytest.raises(ConfigError, match=rf"{name}.*{number}.*cannot listen there .*in use"):
            await lifecycle.serve(ServerConfig(**ports), "test", start_engine, started.append)
    assert not started
    for free in set(ports.values()) - {number}:
        socket.create_server(("127.0.0.1", free)).close()  # nobody listens there any more


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def _reflected_services(client: Client) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answer = await call.read()
    if answer is grpc.aio.EOF:
        await call
    return {service.name for service in answer.list_services_response.service}


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.faults
@pytest.mark.parametrize(
    ("host", "options", "shares"),
    [
        ("127.0.0.1", {}, True),
        ("0.0.0.0", {}, False),
        ("0.0.0.0", {"default_draft_scope": "default"}, True),
        ("0.0.0.0", {"default_draft_scope": "team"}, True),
        ("0.0.0.0", {"max_num_seqs": 2}, False),
    ],
)
async def test_callers_of_other_machines_share_nothing_unless_a_scope_was_chosen(
    host: str, options: dict[str, Any], shares: bool
):
    """However the server was started."""
    config = replace(EngineConfig(), **options)
    limits = {"mixture": DraftLimits(4, 4)}
    processor = InputProcessor(ModelFacts("m", 100, (2,), {}), 64, config, limits)
    engine: Any = FakeEngine()

    def restrict() -> None:
        engine.processor = engine.processor.with_isolated_default_scope()

    engine.processor, engine.isolate_default_scope = processor, restrict
    async with serving(engine, ServerConfig(host=host, port=0, http_port=0, allow_unauthenticated=True)):
        assert (engine.processor.resolve_scope("") is not None) == shares
        assert engine.processor.resolve_scope("mine") is not None
