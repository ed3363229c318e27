"""`batchserve bench serve` against a server with the bundled model, and against endpoints that misbehave."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batchserve.bench import add_bench_parser
from batchserve.bench.load_clients import make_client
from batchserve.bench.load_prompts import load_prompts
from batchserve.bench.load_report import Measurement, as_json, show_report
from batchserve.bench.serve_command import measure
from batchserve.bench.serve_options import ServeBenchOptions
from batchserve.errors import ConfigError
from batchserve.http_client import HttpFailure
from tests.fake_endpoint import Answer, Asked, Endpoint, chunk, endpoint, event, stream_head, text, whole, whole_stream
from tests.server.harness import Served
from tests.server.http.conftest import served

__all__ = ["served"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    add_bench_parser(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["bench", "serve", *flags])
    status: int = arguments.run(arguments)
    return status


async def measured(options: ServeBenchOptions, key: str | None = None) -> Measurement:
    return await measure(options, load_prompts(options), make_client(options, key, None))


async def test_grpc_and_http_count_the_same_tokens(served: Served, tmp_path: Path):
    common: dict[str, Any] = {"num_requests": 6, "concurrency": 3, "input_tokens": 12, "max_tokens": 20}
    found = {
        name: await measured(ServeBenchOptions(**common, **target))
        for name, target in {
            "grpc": {"grpc": served.address},
            "http": {"url": served.url},
            "last": {"url": f"{served.url}/v1", "usage": "last"},
            "chat over grpc": {"grpc": served.address, "endpoint": "chat"},
            "chat": {"url": served.url, "endpoint": "chat"},
        }.items()
    }

    def counts(name: str) -> list[Any]:
        records = sorted(found[name].records, key=lambda record: record.number)
        return [(each.prompt_tokens, each.output_tokens, each.finish_reason) for each in records]

    assert all(each.summary.num_completed == 6 and each.model == "bundled" for each in found.values())
    assert counts("grpc") == counts("http") == counts("last")
    assert counts("chat over grpc") == counts("chat")
    assert counts("chat") != counts("http")
    for name in ("grpc", "http"):
        assert found[name].summary.num_by_counting == {"delta": 6}
        for record in found[name].records:
            assert sum(count for _, count in record.deltas) == record.output_tokens
            assert 0 < record.due_s <= record.sent_s < record.deltas[0][0] <= record.deltas[-1][0] <= record.ended_s
    assert found["last"].summary.num_by_counting == {"answer": 6}
    assert max(count for each in found["http"].records for _, count in each.deltas) > 1, "drafts were accepted"


async def test_the_command_shows_a_table_and_writes_everything(served: Served, tmp_path: Path, capsys: Any):
    out, prompts = tmp_path / "out.json", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a b", "max_tokens": 3}\n{"messages": [{"role": "user", "content": "c"}]}\n')
    flags = ["--prompts", str(prompts), "--endpoint", "chat", "--json", str(out), "--slo", "ttft:1e6,e2e:1e6"]
    flags += ["--num-requests", "5", "--rate", "inf", "--seed", "3", "--warmup", "1", "--ignore-eos"]
    assert await asyncio.to_thread(run, "--url", served.url, *flags) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for line in ("open loop, all at once; 5 requests; prompts of prompts.jsonl; seed 3", "TTFT", "TPOT", "ITL", "E2E"):
        assert line in shown.out
    assert "5 within TTFT 1e+06 ms, E2E 1e+06 ms" in shown.out
    assert "There are 2 different prompts, so that some were asked more than once" in shown.out
    written = json.loads(out.read_text())
    assert written["options"]["rate"] == "inf"
    assert written["options"]["slo"]["e2e_ms"] == 1e6
    assert [each["number"] for each in written["requests"]] == [0, 1, 2, 3, 4]
    assert [each["output_tokens"] for each in written["requests"]] == [128, 3, 128, 3, 128], "the first one warmed up"
    assert written["summary"]["output_tokens"] == 390
    assert written["summary"]["latencies"]["TTFT"]["percentiles_ms"].keys() == {"50", "90", "95", "99"}
    for each in written["requests"]:
        assert each["tpot_s"] == pytest.approx((each["e2e_s"] - each["ttft_s"]) / (each["output_tokens"] - 1), abs=1e-5)


async def test_what_the_server_refuses_is_counted_by_its_code(served: Served):
    for target in ({"url": served.url}, {"grpc": served.address}):
        options = ServeBenchOptions(**target, num_requests=2, input_tokens=5000)
        found = (await measured(options)).summary
        expected = "HTTP 400: context_length_exceeded" if "url" in target else "INVALID_ARGUMENT: PROMPT_TOO_LONG"
        assert (found.num_completed, found.failures) == (0, {expected: 2})


def in_turn(*answers: Any) -> Answer:
    """Answers the n-th request for a completion with the n-th of these: bytes, or None for nothing at all."""
    left = list(answers)

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path == "/v1/models":
            writer.write(whole(200, {"data": [{"id": "fake"}]}))
            return
        data = left.pop(0)
        if data is not None:
            writer.write(data)
            if b"[DONE]" not in data and b"Content-Length" not in data:
                writer.close()

    return answer


def options_for(server: Endpoint, num_requests: int, **more: Any) -> ServeBenchOptions:
    return ServeBenchOptions(url=server.url, num_requests=num_requests, **{"concurrency": 1, **more})


@pytest.mark.faults
async def test_an_endpoint_that_misbehaves_costs_single_requests(capsys: Any):
    done = event(b"[DONE]") + chunk(b"")
    answers = {
        whole_stream(): None,
        whole(500, {"error": {"message": "x", "type": "server_error", "code": None}}): "HTTP 500: server_error",
        whole(502, b"<html>"): "HTTP 502",
        whole(307, b"", Location="/elsewhere"): "HTTP 307",
        whole(200, {"choices": []}): "the response is not an event stream",
        stream_head() + event(text("a")): "connection lost",
        stream_head() + event(text("a", "stop")) + chunk(b""): "stream ended without [DONE]",
        stream_head() + event(text("a")) + done: "stream ended without a finish reason",
        stream_head() + event(b"{") + done: "malformed event",
        stream_head() + event({"error": {"code": "engine_fault"}}) + done: "error in the stream: engine_fault",
        b"HTTP/1.1 100000 OK\r\n\r\n": "malformed HTTP response",
    }
    async with endpoint(in_turn(*answers, whole_stream(7))) as server:
        options = options_for(server, len(answers) + 1)
        found = await measured(options)
    assert [each.failure for each in found.records] == [why or "" for why in answers.values()] + [""]
    summary = found.summary
    assert (summary.num_completed, summary.output_tokens, summary.prompt_tokens) == (2, 10, 10)
    assert summary.failures == dict(Counter(why for why in answers.values() if why))
    show_report(options, load_prompts(options), found)
    assert "1 HTTP 500: server_error" in " ".join(capsys.readouterr().out.split())
    asked = server.asked[1].json
    assert (asked["model"], asked["stream"], asked["max_tokens"], asked["temperature"]) == ("fake", True, 128, 0.0)
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.faults
async def test_an_answer_that_does_not_end_in_time_is_a_failure():
    begun = stream_head() + event(text("a")) + b"5"
    hanging: list[asyncio.StreamWriter] = []

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        hanging.append(writer)

    async with endpoint(answer) as server:
        found = await measured(options_for(server, 2, model="m", timeout_s=0.05))
    assert found.summary.failures == {"no complete answer within 0.05 s": 2}
    assert (
        as_json(options_for(server, 2), load_prompts(options_for(server, 2)), found)["summary"]["requests_per_s"] == 0
    )


async def test_the_exit_status_tells_of_failures(capsys: Any):
    for flags, status in (([], 1), (["--allow-failures"], 0)):
        async with endpoint(in_turn(whole(500, {}), whole_stream())) as server:
            flags = ["--url", server.url, "--num-requests", "2", "--concurrency", "1", *flags]
            assert await asyncio.to_thread(run, *flags) == status


async def test_the_key_is_sent_and_a_missing_model_is_told():
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        is_known = asked.headers.get("authorization") == "Bearer secret"
        writer.write(whole_stream() if is_known else whole(401, {"error": {"code": "invalid_api_key"}}))

    async with endpoint(answer) as server:
        assert (await measured(options_for(server, 1, model="m"), "secret")).summary.num_completed == 1
        with pytest.raises(ConfigError, match=r"model: must be given, as .*/v1/models names none \(HTTP 401: invalid"):
            await measured(options_for(server, 1))
    with pytest.raises(HttpFailure, match="/v1/models: connection refused"):
        await measured(options_for(server, 1))


async def test_an_open_loop_does_not_wait_for_answers():
    release, all_there = asyncio.Event(), asyncio.Event()

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if len(server.asked) == 6:
            all_there.set()
        await release.wait()
        writer.write(whole_stream())

    async with endpoint(answer) as server, asyncio.timeout(20):
        options = ServeBenchOptions(url=server.url, model="m", rate=1000.0, num_requests=6)
        measuring = asyncio.create_task(measured(options))
        await all_there.wait()
        release.set()
        summary = (await measuring).summary
    assert summary.num_completed == 6
    assert server.num_connections == 6


async def test_an_interrupt_ends_it_with_the_figures_so_far(capsys: Any):
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if len(server.asked) <= 3:
            writer.write(whole_stream())
        elif len(server.asked) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    async with endpoint(answer) as server:
        options = options_for(server, 100, model="m")
        found = await measured(options)
    assert signal.getsignal(signal.SIGINT) == before
    assert found.is_interrupted
    assert (found.summary.num_completed, found.summary.num_unfinished, found.summary.failures) == (3, 1, {})
    show_report(options, load_prompts(options), found)
    assert "Interrupted: these are the figures so far." in capsys.readouterr().out
