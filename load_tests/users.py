"""The users that load_tests/locustfile.py offers to Locust, their options, and how a run ends."""

from __future__ import annotations

import random
import re
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar

import gevent
import grpc
import grpc.experimental.gevent
from locust import User, constant, events, task
from locust.exception import LocustError
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from batchserve.errors import ConfigError
from batchserve.server.grpc.tls import ClientTls, client_credentials
from batchserve.v1 import generation_pb2_grpc
from load_tests import staged  # not its class: Locust would take that for the shape of every run
from load_tests.latencies import Latencies
from load_tests.stream_check import StreamShapeError, consume
from load_tests.workloads import Workload

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from locust.env import Environment
    from locust.runners import Runner

    from load_tests.stages import Stage
    from load_tests.stream_check import StreamRecord

REQUEST_TIMEOUT_S = 30.0
AFTER_FAILURE_S = 0.1  # a server that is gone would be asked thousands of times a second
HOST_NAME = re.compile(r"[\w.-]+|\[[0-9A-Fa-f:.%\w]+\]", re.ASCII)  # or an IPv6 address
CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for every user, as with real clients
]


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=128, help="the most tokens of an answer")
    parser.add_argument("--speculation", choices=("on", "off"), default="on", help="whether calls ask for drafts")
    parser.add_argument("--seed", default="", help="of the prompts (default: another one each run)")
    # Locust has --tls-cert and --tls-key for its web UI.
    parser.add_argument("--grpc-tls", action="store_true", help="speak TLS with the server")
    parser.add_argument("--grpc-tls-ca", metavar="FILE", help="speak TLS, and trust the certificates in this file")
    parser.add_argument("--grpc-tls-certificate", metavar="FILE", help="show this certificate to the server")
    parser.add_argument("--grpc-tls-key", metavar="FILE", help="the key of --grpc-tls-certificate")
    hidden: dict[str, Any] = {"include_in_web_ui": False}  # Locust's own parser knows this
    parser.add_argument(
        "--stage-seconds",
        type=float,
        help="walk through stages of 2, 8 and 16 users, speculation on against off, each so long",
        **hidden,
    )
    parser.add_argument("--samples-out", default="", help="where to write what each stage measured, as JSON", **hidden)


@events.init.add_listener
def on_init(environment: Environment, runner: Runner, **_: Any) -> None:
    # Locust has patched the standard library for gevent. gRPC has to be told before any channel is made, and after
    # --processes has forked.
    grpc.experimental.gevent.init_gevent()
    options = environment.parsed_options
    if options.stage_seconds is not None:
        if not isinstance(runner, LocalRunner) or environment.shape_class is not None:
            _refuse("--stage-seconds: must be in one process, and without another shape")
        environment.shape_class = staged.StagedShape(options.stage_seconds, environment)
    # A worker is told by its master, and the web UI asks for it.
    if (options.headless or environment.host) and not isinstance(runner, WorkerRunner):
        try:
            _address(environment.host or "")
        except LocustError as error:
            _refuse(f"--host: {error}")
    GrpcUser.load = Run(environment)


def _address(host: str) -> str:
    """The HOST:PORT of what may be written as a URL, as in the field of the web UI. Raises LocustError."""
    address = host.removeprefix("http://").removeprefix("grpc://").rstrip("/")
    name, _, port = address.rpartition(":")
    if not name or not HOST_NAME.fullmatch(name) or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        raise LocustError(f"host = {host!r}: must be the server's HOST:PORT, such as 127.0.0.1:50051")
    return address


def _refuse(message: str) -> None:
    print(f"load: {message}", file=sys.stderr)
    sys.exit(2)


class Run:
    """A run as one process sees it. The master, or a process alone, also knows the others' latencies and the end."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.latencies = Latencies()
        self.seed = ""
        self.num_users = 0
        self.num_workers = 0
        self.faults: set[str] = set()
        listeners = environment.events
        listeners.test_start.add_listener(self.begin)
        listeners.test_stopping.add_listener(self.count_workers)
        if isinstance(environment.runner, WorkerRunner):
            listeners.report_to_master.add_listener(self.report)
        else:
            listeners.worker_report.add_listener(self.take_report)
            listeners.quitting.add_listener(self.end)

    def begin(self, **_: Any) -> None:
        self.latencies, self.num_users, self.faults = Latencies(), 0, {"no call has ended"}
        # A server that has answered a run's prompts before would draft their answers from that. And no two workers ask
        # the same.
        seed = self.environment.parsed_options.seed or random.SystemRandom().getrandbits(64)
        self.seed = f"{seed} {getattr(self.environment.runner, 'worker_index', 0)}"
        self.num_workers = self._num_workers()

    def next_number(self) -> int:
        self.num_users += 1
        return self.num_users - 1

    def report(self, data: dict[str, Any], **_: Any) -> None:
        data["latencies"] = self.latencies.take()

    def take_report(self, data: dict[str, Any], **_: Any) -> None:
        self.latencies.merge(data.get("latencies", {}))

    def count_workers(self, **_: Any) -> None:
        if self._num_workers() < self.num_workers:
            self.faults.add("a worker was lost")

    def end(self, **_: Any) -> None:
        """Say what Locust does not count, and give a run that Locust thinks well of the status that it deserves."""
        if self.environment.stats.total.num_requests:
            self.faults.discard("no call has ended")
        for line in self.latencies.lines():
            print(f"load: {line}", flush=True)
        if self.faults:
            print(f"load: FAILED: {', '.join(sorted(self.faults))}", file=sys.stderr, flush=True)
            self.environment.process_exit_code = 1

    def _num_workers(self) -> int:
        runner = self.environment.runner
        return len(runner.clients) - len(runner.clients.missing) if isinstance(runner, MasterRunner) else 0


def _channel(address: str, options: Any) -> grpc.Channel:
    files = options.grpc_tls_ca, options.grpc_tls_certificate, options.grpc_tls_key
    if not options.grpc_tls and not any(files):
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    try:
        credentials = client_credentials(ClientTls(*files))
    except ConfigError as error:
        raise LocustError(str(error)) from None
    return grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


class GrpcUser(User):
    """One client with a connection of its own that streams one answer after the other."""

    wait_time = constant(0)
    workload = Workload()
    load: ClassVar[Run]  # this process's

    def on_start(self) -> None:
        address = _address(self.environment.host or "")
        self.number = self.load.next_number()
        self.num_sent = 0
        self.channel = _channel(address, self.environment.parsed_options)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)

    def on_stop(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()

    @task
    def stream(self) -> None:
        options, shape, stage = self.environment.parsed_options, self.environment.shape_class, None
        if isinstance(shape, staged.StagedShape):
            stage = shape.wait_for_stage(self.number)
            if stage is None:
                return
        is_speculating = options.speculation == "on" if stage is None else stage.is_speculating
        self.num_sent += 1
        # Not the same prompts in two stages: what one left in the shared drafts would flatter the other.
        seed = f"{self.load.seed} {stage.name if stage else ''} {self.number} {self.num_sent}"
        request = self.workload.request(seed, is_speculating, options.max_tokens)
        sent_s, record, error = time.perf_counter(), None, None
        try:
            record = consume(
                request, self.stub.StreamGenerate(request, timeout=REQUEST_TIMEOUT_S), time.perf_counter, sent_s
            )
        except grpc.RpcError as failed:  # its text differs from call to call, and Locust counts by text
            error = LocustError(f"{failed.code().name}: {failed.details()}")
        except StreamShapeError as failed:
            error = failed
        self._report(stage, record, error, time.perf_counter() - sent_s)
        if error is not None:
            gevent.sleep(AFTER_FAILURE_S)

    def _report(
        self, stage: Stage | None, record: StreamRecord | None, error: Exception | None, seconds: float
    ) -> None:
        """One event for the call; stages keep samples of their own."""
        shape = self.environment.shape_class
        if stage is not None and isinstance(shape, staged.StagedShape):
            shape.add(stage, record)
        elif record is not None:
            self.load.latencies.add(record)
        self.environment.events.request.fire(
            request_type="gRPC",
            name="StreamGenerate" if stage is None else f"{stage.users:>2} users, speculation {stage.mode}",
            response_time=(seconds if record is None else record.end_to_end_s) * 1e3,
            response_length=0 if record is None else record.usage.completion_tokens,
            exception=error,
            context={},
        )
