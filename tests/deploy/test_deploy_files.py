"""What deploy/ and docs/operations.md say agrees with the server: flags, ports, paths, metrics, time-outs, messages."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchserve.config import EngineConfig
from batchserve.engine import engine_process
from batchserve.metrics import GAUGES, LOAD, Acceptance, EngineMetrics
from batchserve.options import make_config
from batchserve.server import lifecycle
from batchserve.server.grpc import server as grpc_server
from batchserve.server.http import app
from batchserve.server.http import server as http_server
from batchserve.server.keys import read_keys
from batchserve.server.metrics_text import MetricsText
from batchserve.server.tenants import Tenant, Tenants
from batchserve.server_config import ServerConfig
from tests.deploy.files import (
    DEPLOY,
    FLAG,
    METRIC,
    OPERATIONS,
    ROOT,
    command_lines,
    container,
    documents,
    known_flags,
    parse,
    text_files,
    texts_of_code,
)
from tools import dashboard

KUBERNETES = DEPLOY / "kubernetes"
DEPLOYMENT, GPU, HTTP = (
    KUBERNETES / name for name in ("base/deployment.yaml", "gpu/patch.yaml", "http-probes/patch.yaml")
)
UNIT = (DEPLOY / "systemd" / "batchserve.service").read_text()
COMPOSE: Any = documents(DEPLOY / "compose.yaml")[0]
DEFAULTS = ServerConfig()
DOCKERFILES = [DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cuda"]
# Flags of docker, kubectl, systemd, pip, openssl and others that these files mention.
FOREIGN = set(
    "--rm --detach --build-arg --gpus --from --from-file --from-literal --dry-run --output --system --home-dir --shell "
    "--now --gid --uid --no-create-home --prefer-binary --no-deps --no-install-recommends --torch-backend --interval "
    "--timeout --start-period --retries --signal".split()
)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Pairs of an instruction and what follows it."""
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def unit_options() -> list[str]:
    """The options in the unit itself."""
    (own,) = re.findall(r"^ExecStart=\S+ serve (.*) \$BATCHSERVE_OPTIONS$", UNIT, re.MULTILINE)
    return shlex.split(own)


def served(arguments: list[str]) -> ServerConfig:
    """The configuration that `batchserve serve` makes of these; that of the engine is checked, too."""
    parsed = parse(["serve", *arguments])
    make_config(EngineConfig, parsed)
    return make_config(ServerConfig, parsed)


def entrypoint(dockerfile: Path) -> list[str]:
    (found,) = (json.loads(rest) for word, rest in instructions(dockerfile) if word == "ENTRYPOINT")
    assert found[:2] == ["batchserve", "serve"]
    return found[2:]


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m|)", text).groups()  # type: ignore[union-attr]
    return int(number) * (60 if unit == "m" else 1)


def shutdown_s(drain_s: float) -> float:
    """The longest that a server takes to end in order."""
    end_s = engine_process.JOIN_TIMEOUT_S + lifecycle.ARRIVALS_TIMEOUT_S + lifecycle.STATUS_TIMEOUT_S
    return drain_s + end_s + http_server.END_TIMEOUT_S + grpc_server.FLUSH_GRACE_S


@pytest.mark.parametrize("path", [each for each in text_files() if each.suffix in (".yaml", ".yml")], ids=str)
def test_yaml(path: Path):
    assert all(isinstance(each, dict) for each in documents(path))


@pytest.mark.parametrize("path", text_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_flag_is_there(path: Path):
    text = path.read_text()
    assert set(FLAG.findall(re.sub(r"--[a-z]+(\.[a-z]+)+\S*", "", text))) - FOREIGN <= known_flags()
    for arguments in command_lines(text):
        parse(arguments)


def test_foreign_flags_are_used():
    used = {flag for path in text_files() for flag in FLAG.findall(path.read_text())}
    assert used >= FOREIGN - known_flags()


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles(dockerfile: Path):
    found = instructions(dockerfile)
    words = Counter(word for word, _ in found)
    assert words["HEALTHCHECK"] == words["ENTRYPOINT"] == 1
    last = dict(found[max(i for i, (word, _) in enumerate(found) if word == "FROM") :])
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert last["USER"] == "10001:10001"
    assert last["EXPOSE"].split() == [str(DEFAULTS.port), str(DEFAULTS.http_port)]
    # Every other machine may reach a container's port, so the user must say who may call.
    config = served(entrypoint(dockerfile))
    assert (config.host, config.keys, config.allow_unauthenticated) == ("0.0.0.0", None, False)
    for source in (rest.split()[:-1] for word, rest in found if word == "COPY" and "--from" not in rest):
        for each in source:
            assert (ROOT / each).exists()
            assert f"!{each}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_healthcheck_asks_what_needs_no_key():
    (url,) = re.findall(r'^URL = "(.*)"$', (DEPLOY / "healthcheck.py").read_text(), re.MULTILINE)
    assert url == f"http://127.0.0.1:{DEFAULTS.http_port}/ready"
    assert {"/ready", "/health"} <= set(app.OPEN)


def test_compose():
    server = COMPOSE["services"]["server"]
    command = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", each) for each in server["command"]]
    config = served([*entrypoint(DOCKERFILES[0]), *command])
    assert config.keys is not None
    assert server["ports"] == [f"127.0.0.1:{port}:{port}" for port in (config.port, config.http_port)]
    assert seconds(server["stop_grace_period"]) >= shutdown_s(config.drain_timeout_s)
    keys = COMPOSE["services"]["keys"]
    assert keys["entrypoint"] == ["batchserve", "keys", config.keys]
    parse(["keys", config.keys, "--tenant", "acme"])
    state = "state:/var/lib/batchserve"
    assert state in server["volumes"]
    assert state in keys["volumes"]
    for mount in (mount for each in COMPOSE["services"].values() for mount in each["volumes"]):
        source = mount.partition(":")[0]
        assert (DEPLOY / source).is_dir() if source.startswith(".") else source in COMPOSE["volumes"]


def test_prometheus_and_grafana():
    config = documents(DEPLOY / "prometheus" / "prometheus.yml")[0]
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{DEFAULTS.http_port}"]}]
    assert job["metrics_path"] == "/metrics"
    assert seconds(job["scrape_timeout"]) > engine_process.READING_TIMEOUT_S
    assert all((DEPLOY / "prometheus" / name).exists() for name in config["rule_files"])
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = documents(provisioning / "datasources" / "prometheus.yaml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = documents(provisioning / "dashboards" / "batchserve.yaml")[0]["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in COMPOSE["services"]["grafana"]["volumes"]


def test_systemd_unit(tmp_path: Path):
    config = served(unit_options())
    (timeout,) = re.findall(r"^TimeoutStopSec=(.*)$", UNIT, re.MULTILINE)
    assert seconds(timeout) >= shutdown_s(config.drain_timeout_s)
    for line in re.findall(r"BATCHSERVE_OPTIONS=(.*)", (DEPLOY / "systemd" / "batchserve.env").read_text()):
        served([*unit_options(), *shlex.split(line)])
    assert "ExecReload=/bin/kill -HUP $MAINPID" in UNIT
    # Compiled kernels are memory that is written and then executed.
    assert not re.search(r"^MemoryDenyWriteExecute", UNIT, re.MULTILINE)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "batchserve.service"
    unit.write_text(UNIT.replace("/opt/batchserve/bin/batchserve", "/bin/true"))  # which exists
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(unit)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_kubernetes():
    base = container(DEPLOYMENT)
    for each in (base, container(GPU)):
        config = served([*entrypoint(DOCKERFILES[0]), *each["args"]])
        assert config.keys == "/etc/batchserve/keys/keys.yaml"
    ports = {each["name"]: each["containerPort"] for each in base["ports"]}
    assert ports == {"grpc": config.port, "http": config.http_port}
    probes = {name: base[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert all(probe["grpc"] == {"port": config.port} for probe in probes.values())
    paths = {name: container(HTTP)[name]["httpGet"] for name in probes}
    assert {name: each["path"] for name, each in paths.items()} == {
        **{"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    }
    assert {each["path"] for each in paths.values()} <= set(app.OPEN)
    assert {each["port"] for each in paths.values()} <= set(ports)
    # While it drains the server is NOT_SERVING; killed then, it would cut its answers short.
    assert probes["livenessProbe"]["periodSeconds"] * probes["livenessProbe"]["failureThreshold"] > (
        config.drain_timeout_s + 5
    )
    spec = documents(DEPLOYMENT)[0]["spec"]["template"]["spec"]
    pause = int(base["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] >= pause + shutdown_s(config.drain_timeout_s)
    for name in ("requests", "limits"):
        assert float(base["resources"][name]["cpu"]).is_integer()
    for service in documents(KUBERNETES / "base" / "service.yaml"):
        for port in service["spec"]["ports"]:
            assert port["port"] == ports[port["targetPort"]]
    (endpoint,) = documents(KUBERNETES / "podmonitor.yaml")[0]["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in ports
    assert endpoint["path"] == "/metrics"


def test_the_keys_of_the_example_can_be_read(tmp_path: Path):
    path = tmp_path / "keys.yaml"
    path.write_text(documents(KUBERNETES / "secret.example.yaml")[0]["stringData"]["keys.yaml"])
    assert {caller.tenant: caller.is_admin for caller in read_keys(path).values()} == {
        **{"acme": False, "operations": True}
    }


@pytest.mark.parametrize("name", ["base", "gpu", "http-probes"])
def test_kustomizations(name: str):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", str(KUBERNETES / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (deployment,) = (each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "Deployment")
    server = deployment["spec"]["template"]["spec"]["containers"][0]
    kinds = {"httpGet" if name == "http-probes" else "grpc"}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert set(server[probe]) & {"httpGet", "grpc"} == kinds


def exposition() -> set[str]:
    """The name of every sample that a server can give."""
    metrics = EngineMetrics(
        acceptance=lambda: {"mixture": Acceptance(["1"], [2], [1], 0.1)},
        adaptive=lambda: dict.fromkeys(GAUGES, 1.0),
        load=lambda: dict.fromkeys(LOAD, 1.0),
    )
    tenants = Tenants()
    tenants.by_name["acme"] = Tenant()
    text = MetricsText(Counter({"QUEUE_FULL": 1}), tenants)
    text.show(metrics, "model")
    with metrics.contained:
        raise ValueError("a fault, for its counter")
    _, _, body = text.read("")
    return {re.split(r"[{ ]", line)[0] for line in body.decode().splitlines() if line and line[0] != "#"}


def test_every_metric_is_there():
    known = exposition()
    for path in (*text_files(), ROOT / "tests" / "deploy" / "alerts_test.yaml"):
        assert set(METRIC.findall(path.read_text())) - known <= {"batchserve_"}, path


def test_the_dashboard_is_current():
    assert json.loads(dashboard.FILE.read_text()) == dashboard.dashboard()
    ids = [panel["id"] for panel in dashboard.dashboard()["panels"]]
    assert len(ids) == len({*ids})


def test_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < dashboard.COLUMNS
        taken |= cells


def test_promtool():
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    for arguments in (
        ["check", "rules", DEPLOY / "prometheus" / "alerts.yaml"],
        ["check", "config", "--syntax-only", DEPLOY / "prometheus" / "prometheus.yml"],
        ["test", "rules", ROOT / "tests" / "deploy" / "alerts_test.yaml"],
    ):
        done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_explained():
    (group,) = documents(DEPLOY / "prometheus" / "alerts.yaml")[0]["groups"]
    names = {rule["alert"] for rule in group["rules"]}
    assert names == set(re.findall(r"\bBatchserve[A-Z]\w+", OPERATIONS.read_text()))


def test_symptoms_are_messages_of_the_code():
    (table,) = re.findall(r"^\| symptom \|.*\n\|[ -|]+\n((?:\|.*\n)+)", OPERATIONS.read_text(), re.MULTILINE)
    rows = [line.split("|")[1].strip() for line in table.splitlines()]
    assert len(rows) >= 15
    messages = [message for row in rows for message in re.findall(r"`([^`]+ [^`]+)`", row)]
    known = "\n".join(texts_of_code())
    assert not [message for message in messages if message not in known]
