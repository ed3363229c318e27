"""The log of requests: a line for each call, refused ones too, without a text."""

from __future__ import annotations

import json
import logging

import grpc
import pytest

from batchserve.server.grpc.wire_sizes import SMALL_MESSAGE_BYTES
from batchserve.server.request_log import logger
from batchserve.v1 import generation_pb2 as pb
from tests.server.harness import Served, ask, failure_of
from tests.server.test_process import NO_DRAFTER, Launch, launch  # noqa: F401 - a fixture

pytestmark = pytest.mark.faults
TIMES = {"queue_s", "ttft_s", "total_s"}


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    standard = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
    records = [record for record in caplog.records if record.name == logger.name]
    return [{name: value for name, value in vars(record).items() if name not in standard} for record in records]


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
async def test_an_answered_request(fake: Served, caplog: pytest.LogCaptureFixture, method: str):
    fake.engine.go_on.set()
    with caplog.at_level(logging.INFO, logger.name):
        await (fake.client.generate(ask()) if method == "Generate" else fake.client.stream(ask()))
        await fake.settle()
    (line,) = lines_of(caplog)
    assert line.pop("peer").startswith("ipv4:127.0.0.1:")
    assert all(isinstance(line.pop(name), float) for name in TIMES)
    tokens = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0}
    assert line == {
        **{"method": method, "status": "OK", "request_id": "fake-id", "finish_reason": "length"},
        **{**tokens, "draft_tokens": 5, "accepted_draft_tokens": 1},
    }


async def test_refused_and_cancelled_calls(fake: Served, caplog: pytest.LogCaptureFixture):
    forged = "a\nINFO forged"
    large = pb.GenerateRequest(text="secret", request_id="x" * (SMALL_MESSAGE_BYTES * 8))
    with caplog.at_level(logging.INFO, logger.name):
        await failure_of(fake.client.generate(ask(request_id=forged, priority=5000)))
        await failure_of(fake.client.generate(large))
        await failure_of(fake.client.channel.unary_unary("/batchserve.v1.GenerationService/Generate")(b"\xff"))
        fake.server._calls.close("closed")
        await failure_of(fake.client.stream(ask(request_id="late")))
        fake.server._calls.open(fake.engine)
        call = fake.client.stub.StreamGenerate(ask(request_id="gone"))
        await call.read()
        call.cancel()
        await fake.settle()
    seen = [(line["status"], line.get("reason"), line.get("request_id")) for line in lines_of(caplog)]
    assert seen == [
        ("INVALID_ARGUMENT", "INVALID_REQUEST_ID", forged),  # the formatters escape it
        ("INVALID_ARGUMENT", "INVALID_REQUEST_ID", None),
        ("INVALID_ARGUMENT", "MALFORMED_MESSAGE", None),
        ("UNAVAILABLE", "UNAVAILABLE", "late"),
        ("CANCELLED", None, "gone"),
    ]
    assert "secret" not in caplog.text


async def test_every_line_of_a_server_is_json_that_of_its_engines_process_too(launch: Launch):  # noqa: F811
    async with launch("--log-format", "json", "--log-level", "debug", *NO_DRAFTER) as (process, client):
        await client.generate(ask(request_id="mine"))
        failed = await failure_of(client.generate(ask(request_id="not mine", priority=5000)))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        process.terminate()
        assert process.stderr is not None
        text = (await process.stderr.read()).decode()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"timestamp", "level", "logger", "message"} <= line.keys() for line in lines)
    first, second = (line for line in lines if line["logger"] == logger.name)
    assert (first["request_id"], first["status"], first["completion_tokens"]) == ("mine", "OK", 8)
    assert (second["request_id"], second["reason"]) == ("not mine", "INVALID_PRIORITY")
    assert any("K/V memory" in line["message"] for line in lines)
