"""The dashboard with real data: a real server and a real Prometheus, which answers every panel's query.

python -m pytest -m slow tests/deploy/test_dashboard.py     # needs Debian's package prometheus
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from batchserve.server.keys import add_key
from batchserve.v1 import generation_pb2 as pb
from batchserve.v1 import generation_pb2_grpc
from tests.deploy.files import DEPLOY
from tools import dashboard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
    ),
]
SCRAPE_S = 1
# What a healthy server has no series of.
WITHOUT_DATA = {"Contained faults, by place"}
RECORD = 'Write this JSON as a record.\n{{\n  "name": "{}",\n  "version": {},\n  "owner": "thread manager"\n}}'
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Given:
    """What the clients were given, by their own count."""

    prompt_tokens: Counter[str] = field(default_factory=Counter)  # by tenant
    completion_tokens: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)

    def add(self, tenant: str, prompt_tokens: int, completion_tokens: int) -> None:
        self.prompt_tokens[tenant] += prompt_tokens
        self.completion_tokens[tenant] += completion_tokens
        self.requests[tenant] += 1


@dataclass(frozen=True)
class Running:
    """The server's addresses, and Prometheus'."""

    grpc: str
    http: str
    prometheus: str
    keys: dict[str, str]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What Prometheus answers now."""
        query = urllib.parse.urlencode({"query": expression})
        with OPENER.open(f"{self.prometheus}/api/v1/query?{query}", timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]["result"]

    def value(self, expression: str) -> float:
        """The one value of an expression, NaN if there is none."""
        found = self.query(expression)
        assert len(found) <= 1
        return float(found[0]["value"][1]) if found else math.nan

    def by(self, label: str, expression: str) -> dict[str, float]:
        return {each["metric"][label]: float(each["value"][1]) for each in self.query(expression)}


@contextmanager
def process(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, text=True, **options) as running:
        try:
            yield running
        finally:
            running.terminate()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()


def follows(is_so: Callable[[], bool], timeout_s: float) -> None:
    """Returns once it is so."""
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until, "it is not so in time"
        time.sleep(0.3)


def prometheus_config(folder: Path, http: str, key: str) -> Path:
    """The configuration of deploy/, for this server, every second."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yaml")]
    (job,) = config["scrape_configs"]
    job["scrape_timeout"] = f"{SCRAPE_S}s"
    (folder / job["authorization"]["credentials_file"]).write_text(f"{key}\n")
    job["static_configs"][0]["targets"] = [http.removeprefix("http://")]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    names = tmp_path / "keys.yaml"
    keys = {tenant: add_key(names, tenant=tenant) for tenant in ("acme", "globex")}
    keys["poor"] = add_key(names, tenant="poor", tokens_per_minute=10)
    keys["operations"] = add_key(names, tenant="operations", is_admin=True)
    flags = ["--keys", str(names), "--tenant-metrics", "--wait-for-drafter", "--log-level", "error"]
    command = [sys.executable, "-m", "batchserve.cli", "serve", "--port", "0", "--http-port", "0", *flags]
    with process(*command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        addresses = [server.stdout.readline().split()[-1] for _ in range(2)]
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        config = prometheus_config(tmp_path, addresses[1], keys["operations"])
        arguments = (f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}", "--log.level=error")
        with process("prometheus", *arguments, f"--web.listen-address={address}"):
            found = Running(addresses[0], addresses[1], f"http://{address}", keys)
            follows(lambda: _is_scraped(found), 60.0)
            yield found


def _is_scraped(running: Running) -> bool:
    try:
        return running.value('up{job="batchserve"}') == 1 and running.value("batchserve_steps_total") >= 0
    except OSError:
        return False


def call(running: Running, path: str, tenant: str | None = None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the server answers; only the status if it refuses."""
    headers = {"Content-Type": "application/json"}
    if tenant is not None:
        headers["Authorization"] = f"Bearer {running.keys[tenant]}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with OPENER.open(urllib.request.Request(f"{running.http}{path}", data, headers), timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return {"status": error.code}


def ask_over_http(running: Running, given: Given, tenant: str, number: int) -> None:
    content = RECORD.format("socket reader", 3100 + number)
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 60, "temperature": 0}
    usage = call(running, "/v1/chat/completions", tenant, body)["usage"]
    given.add(tenant, usage["prompt_tokens"], usage["completion_tokens"])


def ask_over_grpc(stub: Any, running: Running, given: Given, tenant: str, number: int) -> None:
    content = RECORD.format("stream writer", 3100 + number)
    request = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", text=content)]))
    request.sampling_params.temperature = 0.0
    request.stop.max_tokens = 60
    metadata = (("authorization", f"Bearer {running.keys[tenant]}"),)
    prompt_tokens = completion_tokens = 0
    for message in stub.StreamGenerate(request, metadata=metadata, timeout=60):
        prompt_tokens += message.started.prompt_tokens
        completion_tokens += len(message.delta.token_ids)
    given.add(tenant, prompt_tokens, completion_tokens)


def fail(running: Running) -> None:
    """A bad field, no key, and a tenant whose tokens are used up."""
    message = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    assert call(running, "/v1/chat/completions", "acme", {**message, "top_p": 7}) == {"status": 400}
    assert call(running, "/v1/chat/completions", "poor", message) == {"status": 429}
    assert call(running, "/metrics") == {"status": 401}


def expressions() -> dict[str, list[str]]:
    """Every expression of the dashboard by its panel, with the variables put in."""
    panels = (panel for panel in json.loads(dashboard.FILE.read_text())["panels"] if panel["type"] != "row")
    known = {"$instance": ".*", "$__rate_interval": "1m"}
    found: dict[str, list[str]] = {}
    for panel in panels:
        for target in panel["targets"]:
            text = re.sub(r"\$\w+", lambda match: known[match[0]], target["expr"])
            found.setdefault(panel["title"], []).append(text)
    return found


def test_every_panel_shows_data(running: Running):
    given, poor = Given(), Given()
    with grpc.insecure_channel(running.grpc, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for number in range(6):
            if number == 0:
                ask_over_http(running, poor, "poor", 0)  # more tokens than it has in a minute
            ask_over_http(running, given, "acme", number)
            ask_over_grpc(stub, running, given, "globex", number)
            fail(running)
            time.sleep(SCRAPE_S)
    given.add("poor", poor.prompt_tokens.total(), poor.completion_tokens.total())
    assert given.requests == {"acme": 6, "globex": 6, "poor": 1}

    follows(lambda: running.value("batchserve_requests_finished_total") == given.requests.total(), 30.0)
    assert running.value("batchserve_completion_tokens_total") == given.completion_tokens.total()
    assert running.value("batchserve_prompt_tokens_total") == given.prompt_tokens.total()
    assert running.value("batchserve_requests_running") == running.value("batchserve_requests_waiting") == 0
    for name, counts in (("completion_tokens", given.completion_tokens), ("requests", given.requests)):
        assert running.by("tenant", f"batchserve_tenant_{name}_total > 0") == counts
    assert running.by("tenant", "batchserve_tenant_refused_total > 0") == {"poor": 6}
    reasons = running.by("reason", "batchserve_failed_calls_total")
    assert reasons == {"INVALID_TOP_P": 6, "QUOTA_EXCEEDED": 6, "UNAUTHENTICATED": 6}
    # The same figures by another way: each finished request is in the histograms once.
    assert running.value("batchserve_request_seconds_count") == given.requests.total()
    assert running.value("batchserve_time_to_first_token_seconds_count") == given.requests.total()
    assert 1 < running.value("1 + batchserve_accepted_draft_tokens_total / batchserve_decoding_requests_total") < 65

    without = {title for title, queries in expressions().items() if not all(map(has_data(running), queries))}
    assert without == WITHOUT_DATA
    firing = running.by("alertname", 'ALERTS{alertstate="firing"}')
    assert not firing


def has_data(running: Running) -> Callable[[str], bool]:
    """Whether a query has an answer that is a number."""

    def ask(query: str) -> bool:
        return any(math.isfinite(float(each["value"][1])) for each in running.query(query))

    return ask


def test_the_instance_can_be_chosen(running: Running):
    (variable,) = (each for each in dashboard.dashboard()["templating"]["list"] if each["name"] == "instance")
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
    assert set(running.by(label, metric)) == {running.http.removeprefix("http://")}
