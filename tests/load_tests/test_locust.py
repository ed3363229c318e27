"""Locust processes against a real server with a fake engine, over gRPC and HTTP: each call counts once, in one process
or in several, and Locust's own options, web UI and shapes are honoured.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from batchserve.server.keys import add_key
from batchserve.server_config import ServerConfig
from batchserve.types import Chat, GenerateCall
from tests.server.fakes import FakeEngine
from tests.server.harness import Served, serving

ROOT = Path(__file__).resolve().parents[2]
LOCUSTFILE = str(ROOT / "load_tests" / "locustfile.py")
STEP_S = 0.05
SHAPE = """
from locust import LoadTestShape

class Mine(LoadTestShape):
    def tick(self):
        return (2, 2) if self.get_run_time() < 2 else None
"""

pytestmark = pytest.mark.faults


class CountingEngine(FakeEngine):
    """Answers two tokens, and keeps the prompts and the most calls that were in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[Any] = []
        self.chats: list[Chat] = []
        self.max_in_flight = 0
        self.go_on.set()

    async def events(self, call: GenerateCall, **options: Any) -> AsyncGenerator[Any, None]:
        if isinstance(call.prompt, Chat):
            self.chats.append(call.prompt)
            call = replace(call, prompt=call.prompt.messages[-1]["content"])
        self.prompts.append(call.prompt)
        async for event in super().events(call, **options):
            self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
            await asyncio.sleep(STEP_S)
            yield event


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    engine: Any = CountingEngine()
    async with serving(engine) as served:
        yield served


@asynccontextmanager
async def locust(*flags: str, file: str = LOCUSTFILE) -> AsyncIterator[asyncio.subprocess.Process]:
    command = ["-m", "locust", "-f", file, "--max-tokens", "2", "--stop-timeout", "5", *flags]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run_locust(*flags: str, file: str = LOCUSTFILE) -> tuple[int | None, str]:
    async with locust("--headless", "--only-summary", *flags, file=file) as process:
        output, _ = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, output.decode()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def entries(path: Path) -> dict[tuple[str, str], tuple[int, int]]:
    """Requests and failures of each entry of a run, by type and name."""
    return {
        (each["method"], each["name"]): (each["num_requests"], each["num_failures"])
        for each in json.loads(path.read_text())
    }


def counted(path: Path, kind: str = "gRPC", name: str = "StreamGenerate") -> tuple[int, int]:
    """Requests and failures of a run. First tokens and tokens are entries of their own."""
    found = entries(path)
    assert found.keys() == {("ITL", name), ("TTFT", name), (kind, name)}
    requests, failures = found[kind, name]
    # Every answer has two tokens: one is the first, and the other comes a while after it.
    assert found["TTFT", name] == found["ITL", name] == (requests - failures, 0)
    return requests, failures


def reported(path: Path) -> list[dict[str, Any]]:
    """The rows of Locust's HTML report."""
    _, _, rest = path.read_text().partition('"requests_statistics": ')
    rows, _ = json.JSONDecoder().raw_decode(rest)
    return rows


async def test_locusts_options_are_honoured_and_a_call_counts_once(served: Any, tmp_path: Path):
    flags = ("--host", served.address, "-u", "3", "-r", "3", "-t", "2s", "--json-file", str(tmp_path / "run"))
    status, output = await run_locust(*flags)
    assert status == 0, output
    assert counted(tmp_path / "run.json") == (len(served.engine.prompts), 0)
    assert served.engine.max_in_flight == 3
    assert "time to first token in ms: p50" in output
    assert "inter-token latency in ms: p50" in output


def assert_seeds_differ(prompts: Sequence[str]) -> None:
    """Workers of one seed would ask every prompt twice. Two seeds draw the same task once in 36,000 pairs."""
    num_repeated = len(prompts) - len(set(prompts))
    assert num_repeated <= len(prompts) / 10, prompts


async def test_workers_share_the_work(served: Any, tmp_path: Path):
    port = str(free_port())
    flags = ("--host", served.address, "-u", "4", "-r", "4", "-t", "2s", "--seed", "1")
    master = ("--master", "--expect-workers", "2", "--master-bind-host", "127.0.0.1", "--master-bind-port", port)
    worker = ("--worker", "--master-host", "127.0.0.1", "--master-port", port)
    (status, output), *workers = await asyncio.gather(
        run_locust(*flags, *master, "--json-file", str(tmp_path / "run")),
        run_locust(*worker),
        run_locust(*worker),
    )
    assert status == 0, output
    assert [status for status, _ in workers] == [0, 0], workers
    prompts = served.engine.prompts
    num_requests, num_failures = counted(tmp_path / "run.json")
    # Streams that were cut at the end are the server's, and no event.
    assert len(prompts) - 4 <= num_requests <= len(prompts)
    assert num_requests > 4
    assert num_failures == 0
    assert served.engine.max_in_flight == 4
    assert_seeds_differ(prompts)


async def test_a_shape_of_the_users_own(served: Any, tmp_path: Path):
    shape = tmp_path / "my_shape.py"
    shape.write_text(SHAPE)
    status, output = await run_locust("--host", served.address, file=f"{LOCUSTFILE},{shape}")
    assert status == 0, output
    assert served.engine.max_in_flight == 2


async def test_the_fields_of_the_web_ui(served: Any):
    port = free_port()

    def post(path: str, **fields: str) -> Any:
        data = urllib.parse.urlencode(fields).encode() or None
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", data, timeout=10) as answer:
            return json.load(answer)

    async with locust("--web-host", "127.0.0.1", "--web-port", str(port)) as process:
        assert process.stdout is not None
        while b"Starting web interface" not in (line := await process.stdout.readline()):
            assert line, "Locust has ended"
        fields = {"user_count": "2", "spawn_rate": "2", "run_time": "2s", "host": served.address}
        async with asyncio.timeout(30):
            while True:
                try:
                    started = await asyncio.to_thread(post, "swarm", **fields)
                    break
                except OSError:
                    await asyncio.sleep(0.1)
            assert started["success"], started
            while True:
                stats = await asyncio.to_thread(post, "stats/requests")
                if stats["state"] == "stopped":
                    break
                await asyncio.sleep(0.2)
        process.terminate()
        output, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, output
    assert served.engine.max_in_flight == 2
    found = {each["method"]: each["num_requests"] for each in stats["stats"]}
    assert found["gRPC"] == found["TTFT"] == found[""] == len(served.engine.prompts)


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ((), 2, "must be the server's HOST:PORT"),
        (("--host", "nonsense"), 2, "host = 'nonsense': must be the server's HOST:PORT"),
        (("--host", "ftp://127.0.0.1:1"), 2, "host = 'ftp://127.0.0.1:1': must be"),
        (("--host", "127.0.0.1:99999"), 2, "host = '127.0.0.1:99999': must be"),
        (("--host", "127.0.0.1:1"), 1, "UNAVAILABLE"),
        (("--host", "http://127.0.0.1:1"), 1, "ConnectionRefusedError"),
        (("--host", "h:1", "--protocol", "http", "GrpcUser"), 2, "--protocol = http: must be auto, or the one of Grpc"),
        (("--host", "h:1", "--workload", LOCUSTFILE), 2, "locustfile.py line 1: is not JSON"),
    ],
    ids=str,
)
async def test_a_run_that_fails_says_so(flags: tuple[str, ...], status: int, message: str):
    found, output = await run_locust("-t", "1s", *flags)
    assert message in output
    assert "Traceback" not in output
    assert found == status


async def test_the_host_may_be_written_as_a_url_of_grpc(served: Any):
    status, output = await run_locust("--host", f"grpc://{served.address}", "-t", "1s")
    assert status == 0, output


async def test_a_run_without_an_answer_fails(served: Any):
    served.engine.go_on.clear()
    status, output = await run_locust("--host", served.address, "-t", "1s", "--stop-timeout", "0")
    assert status == 1
    assert "FAILED: no call has ended" in output


async def test_users_speak_http(served: Any, tmp_path: Path):
    work, run = tmp_path / "work.jsonl", tmp_path / "run"
    lines = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}]
    work.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("-u", "3", "-r", "3", "-t", "3s", "--json-file", str(run), "--html", f"{run}.html")
    status, output = await run_locust("--host", served.url, "--workload", str(work), *flags)
    assert status == 0, output
    found, asked = entries(Path(f"{run}.json")), Counter(served.engine.prompts)
    assert asked.keys() == {"a", "b"}
    for name, prompt in (("/v1/completions", "a"), ("/v1/chat/completions", "b")):
        assert {found[kind, name] for kind in ("POST", "TTFT", "ITL")} == {(asked[prompt], 0)}
    assert served.engine.max_in_flight == 3
    # The report's total, and the CSV's, are of calls alone.
    shown = {each["method"]: each["num_requests"] for each in reported(Path(f"{run}.html"))}
    assert {"POST", "TTFT", "ITL"} < shown.keys()
    assert shown[""] == sum(asked.values())


async def test_processes_over_http_with_a_key(tmp_path: Path):
    engine: Any = CountingEngine()
    key = add_key(tmp_path / "keys.yaml", tenant="load")
    async with serving(engine, ServerConfig(port=0, http_port=0, keys=str(tmp_path / "keys.yaml"))) as served:
        flags = ("--host", served.url, "--processes", "2", "-u", "4", "-r", "4", "-t", "2s")
        status, output = await run_locust(*flags, "--api-key", key, "--json-file", str(tmp_path / "run"))
        assert status == 0, output
        num_requests, num_failures = counted(tmp_path / "run.json", "POST", "/v1/chat/completions")
        assert len(engine.prompts) - 4 <= num_requests <= len(engine.prompts)
        assert (num_failures, engine.max_in_flight) == (0, 4)
        assert_seeds_differ(engine.prompts)
        status, output = await run_locust("--host", served.url, "-t", "1s")
        assert status == 1
        assert "HTTP 401: invalid_api_key" in output


async def test_a_shape_over_grpc_with_a_key(tmp_path: Path):
    engine: Any = CountingEngine()
    key = add_key(tmp_path / "keys.yaml", tenant="load")
    async with serving(engine, ServerConfig(port=0, http_port=0, keys=str(tmp_path / "keys.yaml"))) as served:
        flags = ("--shape", "steps", "-u", "3", "-r", "9", "--step-seconds", "1", "--api-key", key)
        status, output = await run_locust("--host", served.address, *flags, "GrpcUser")
    assert status == 0, output
    assert engine.max_in_flight == 3
    assert "Ramping to 2 users" in output
    assert "Ramping to 3 users" in output


async def test_users_speak_tls(tmp_path: Path):
    ca, path = trustme.CA(), tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(str(path))
    pair = ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem
    pair.write_to_path(str(tmp_path / "server.pem"))
    server = str(tmp_path / "server.pem")
    engine: Any = CountingEngine()
    async with serving(engine, ServerConfig(port=0, http_port=0, tls_certificate=server, tls_key=server)) as served:
        status, output = await run_locust("--host", served.address, "-t", "1s", "--server-tls-ca", str(path))
        assert status == 0, output
        url = served.url.replace("http://", "https://")
        status, output = await run_locust("--host", url, "-t", "1s", "--server-tls-ca", str(path))
        assert status == 0, output
        status, _ = await run_locust("--host", served.address, "-t", "1s")
        assert status != 0
