"""`batchserve run-batch`: with an engine of its own, with a server's, and going on where a killed run stopped."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batchserve.cli import main
from batchserve.errors import ConfigError
from batchserve.http_client import HttpClient, ServerUrl, UnreachableError
from batchserve.run_batch.command import Batch, BatchOptions, run_batch
from batchserve.run_batch.requests import BatchRequest, read_requests
from batchserve.run_batch.results import BatchResult, ResultFile
from tests.fake_endpoint import Asked, endpoint, whole

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def request(custom_id: str, url: str = COMPLETION, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": custom_id}}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def results(path: Path) -> dict[str, Any]:
    """The lines of an output by custom_id, each of which must come once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.read_bytes().endswith(b"\n")
    assert len({line["id"] for line in lines}) == len(lines)
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_an_engine_of_its_own_answers_every_kind_and_a_second_run_has_nothing_to_do(tmp_path: Path, capsys: Any):
    given = write(
        tmp_path / "in.jsonl",
        request("chat", CHAT, messages=[{"role": "user", "content": "Count."}], max_tokens=5, model="bundled"),
        request("text", COMPLETION, prompt="def f(x):", max_tokens=4, ignore_eos=True),
        request("response", RESPONSE, input="Count.", max_output_tokens=5),
        request("refused", COMPLETION, prompt="a", max_tokens=0),
        request("unknown", CHAT, messages=[{"role": "user", "content": "x"}], model="other"),
    )
    out = tmp_path / "out.jsonl"
    command = ["run-batch", str(given), str(out), "--drafter", "none", "--kv-cache-memory", "64MiB"]
    assert main(command) == 1
    assert "3 of 5 requests have an answer, 2 an error" in capsys.readouterr().err
    found = results(out)
    assert list(found["chat"]) == ["id", "custom_id", "response", "error"]
    assert list(found["chat"]["response"]) == ["status_code", "request_id", "body"]
    codes = {name: line["response"]["status_code"] for name, line in found.items()}
    assert codes == {"chat": 200, "text": 200, "response": 200, "refused": 400, "unknown": 404}
    assert all(line["error"] is None for line in found.values())
    bodies = {name: line["response"]["body"] for name, line in found.items()}
    assert [bodies[name]["object"] for name in ("chat", "text", "response")] == [
        "chat.completion",
        "text_completion",
        "response",
    ]
    assert bodies["text"]["usage"]["completion_tokens"] == 4
    assert found["text"]["response"]["request_id"] == bodies["text"]["id"]
    assert bodies["refused"]["error"]["param"] == "max_tokens"
    assert bodies["unknown"]["error"]["code"] == "model_not_found"
    before = out.read_bytes()
    assert main(command) == 1
    told = capsys.readouterr().err
    assert "5 of 5 requests have a response already and are skipped" in told
    assert "loading" not in told, "there is nothing to load a model for"
    assert out.read_bytes() == before


async def run(url: str, given: Path, out: Path, **options: Any) -> int:
    return await asyncio.to_thread(run_batch, BatchOptions(given, out, url=url, **options))


async def test_a_run_goes_on_where_a_killed_one_stopped(tmp_path: Path, capsys: Any):
    given = write(tmp_path / "in.jsonl", *(request(f"r{i}") for i in range(6)))
    out = tmp_path / "out.jsonl"
    with ResultFile(out) as file:
        file.add(BatchResult("r0", 200, "x", {"text": "né"}))
        file.add(BatchResult("r1", error="connection lost"))
        file.add(BatchResult("r2", 400, "", {"error": {}}))
        file.add(BatchResult("r3", 503, "", {"error": {}}))
        file.add(BatchResult("r4", 200, "x", {}))
    kept = out.read_bytes().splitlines(keepends=True)
    out.chmod(0o640)
    for size in (1, 5, 40, len(kept[4]) - 1):
        out.write_bytes(b"".join(kept[:4]) + kept[4][:size])

        async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
            writer.write(whole(200, {"id": asked.json["prompt"]}, X_Request_Id="from the header"))

        async with endpoint(answer) as server:
            assert await run(server.url, given, out) == 1
        assert sorted(asked.json["prompt"] for asked in server.asked) == ["r1", "r3", "r4", "r5"]
        assert "2 of 6 requests have a response already" in capsys.readouterr().err
        found = results(out)
        assert {name: line["response"]["status_code"] for name, line in found.items()} == {
            **{f"r{i}": 200 for i in range(6)},
            "r2": 400,
        }
        assert found["r5"]["response"]["request_id"] == "from the header"
        assert out.read_bytes().startswith(kept[0] + kept[2]), "what was there stays as it was, and comes first"
        assert out.stat().st_mode & 0o777 == 0o640


async def test_requests_in_flight_are_as_many_as_asked_for(tmp_path: Path):
    given = write(tmp_path / "in.jsonl", *(request(f"r{i}") for i in range(9)))
    in_flight, most, three = 0, 0, asyncio.Event()

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        if in_flight == 3:
            three.set()
        async with asyncio.timeout(20):
            await three.wait()
        in_flight -= 1
        writer.write(whole(200, {}))

    async with endpoint(answer) as server:
        assert await run(server.url, given, tmp_path / "out.jsonl", concurrency=3) == 0
    assert (most, server.num_connections) == (3, 3)


@pytest.mark.faults
async def test_busy_servers_are_asked_again(tmp_path: Path):
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        number = seen[asked.json["prompt"]] = seen[asked.json["prompt"]] + 1
        match asked.json["prompt"]:
            case "busy":
                writer.write(whole(429, {}, Retry_After="7") if number <= 2 else whole(200, {}))
            case "broken":
                writer.close()
            case "never":
                writer.write(whole(503, b"<html>", Retry_After="Fri, 31 Dec 1999 23:59:59 GMT"))

    seen: Counter[str] = Counter()
    given = write(tmp_path / "in.jsonl", *map(request, ("busy", "broken", "never")))
    options = BatchOptions(given, tmp_path / "out.jsonl", concurrency=1, retries=2)
    async with endpoint(answer) as server, HttpClient(ServerUrl.parse(server.url)) as client:
        with ResultFile(options.output) as file:
            batch = Batch(options, file, sleep)
            await batch.run(client, read_requests(given), lambda: None)
    assert slept == [7.0, 7.0, 1.0, 2.0, 1.0, 2.0]
    assert (batch.num_ended, batch.num_errors) == (3, 2)
    found = results(options.output)
    assert found["busy"]["response"]["status_code"] == 200
    assert found["broken"]["response"] is None
    assert found["broken"]["error"] == {"code": "request_failed", "message": "connection lost"}
    assert found["never"]["response"]["body"]["error"]["message"] == "<html>"
    with ResultFile(options.output) as file:
        assert file.resume(["busy", "broken", "never"]) == {"busy": True}, "the others are to be asked again"


@pytest.mark.faults
async def test_a_server_that_is_not_there_ends_the_batch(tmp_path: Path, capsys: Any):
    given, out = write(tmp_path / "in.jsonl", *(request(f"r{i}") for i in range(9))), tmp_path / "out.jsonl"
    with pytest.raises(UnreachableError, match="connection refused"):
        await run("http://127.0.0.1:1", given, out, retries=0)
    assert out.read_bytes() == b""
    assert "0 of 9 requests have an answer, 0 an error; 9 are left" in capsys.readouterr().err


async def test_an_interrupt_keeps_what_has_come(tmp_path: Path):
    given, out = write(tmp_path / "in.jsonl", *(request(f"r{i}") for i in range(9))), tmp_path / "out.jsonl"
    process: asyncio.subprocess.Process | None = None

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.json["prompt"] == "r4":
            assert process is not None
            process.send_signal(signal.SIGINT)
        else:
            writer.write(whole(200, {}))

    async with endpoint(answer) as server, asyncio.timeout(60):
        command = ["run-batch", str(given), str(out), "--url", server.url, "--concurrency", "1"]
        process = await asyncio.create_subprocess_exec(
            *(os.sys.executable, "-m", "batchserve.cli", *command), stderr=asyncio.subprocess.PIPE
        )
        _, told = await process.communicate()
    assert process.returncode == 130
    assert told.decode() == (
        "4 of 9 requests have an answer, 0 an error; 5 are left, with which the same command goes on\n"
    )
    assert set(results(out)) == {"r0", "r1", "r2", "r3"}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "in.jsonl line 3: is not JSON"),
        ("[]", "in.jsonl line 3: must be a JSON object"),
        ({**request("b"), "custom_id": 7}, "line 3: field 'custom_id' must be a text"),
        ({**request("b"), "custom_id": ""}, "line 3: field 'custom_id' must not be empty"),
        (request("a"), "line 3: custom_id 'a' is that of "),
        ({"custom_id": "b"}, "line 3: field 'method' is missing"),
        ({**request("b"), "method": "GET"}, "line 3: field 'method' must be 'POST', is 'GET'"),
        (request("b", "/v1/embeddings"), "line 3: field 'url' must be one of /v1/chat/completions"),
        ({**request("b"), "body": []}, "line 3: field 'body' must be an object"),
        (request("b", stream=True), "line 3: field 'body' must not ask for a stream"),
        ({**request("b"), "priority": 1}, "line 3: field 'priority' is not known"),
    ],
)
def test_requests_that_are_refused_before_any_is_asked(line: Any, message: str, tmp_path: Path, capsys: Any):
    given, out = write(tmp_path / "in.jsonl", request("a"), "", line), tmp_path / "out.jsonl"
    assert main(["run-batch", str(given), str(out), "--url", "http://127.0.0.1:1"]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("my notes", "out.jsonl line 1: is not a line of a batch's output"),
        ("{}\n", "out.jsonl line 1: is not a line of a batch's output"),
        (BatchResult("b", 200).line().decode(), "out.jsonl line 1: custom_id 'b' is not in the input"),
        (BatchResult("a", 200).line().decode() * 2, "out.jsonl line 2: custom_id 'a' comes twice"),
    ],
)
def test_a_file_that_is_not_the_output_of_this_batch_stays_as_it_is(content: str, message: str, tmp_path: Path):
    given, out = write(tmp_path / "in.jsonl", request("a")), tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(ConfigError) as refused:
        run_batch(BatchOptions(given, out, url="http://127.0.0.1:1"))
    assert message in str(refused.value)
    assert out.read_text() == content


def test_one_process_at_a_time_writes_to_an_output(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    with out.open("ab") as other, ResultFile(tmp_path / "another.jsonl"):
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is writing to it"), ResultFile(out):
            pass


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "0"], "concurrency = 0: must be at least 1"),
        (["--retries", "-1"], "retries = -1: must be at least 0"),
        (["--concurrency", "999", "--max-waiting", "1"], "concurrency = 999: must be at most 17"),
        (["--api-key", "x"], "--api-key: must be with --url"),
        (["--url", "x"], "url = 'x': must be http://HOST:PORT"),
        (["--url", "http://x", "--model", "y"], "--model: must not be given with --url"),
    ],
)
def test_options_that_are_refused(flags: list[str], message: str, tmp_path: Path, capsys: Any):
    given = write(tmp_path / "in.jsonl", request("a"))
    assert main(["run-batch", str(given), str(tmp_path / "out.jsonl"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert main(["run-batch", str(given), str(given)]) == 2
    assert "must be another file than INPUT" in capsys.readouterr().err


def test_bodies_are_sent_as_they_are(tmp_path: Path):
    given = write(tmp_path / "in.jsonl", request("a", prompt="né", seed=2**63))
    assert read_requests(given) == [BatchRequest("a", COMPLETION, b'{"prompt":"n\\u00e9","seed":9223372036854775808}')]
