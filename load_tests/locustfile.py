"""Locust users that stream answers over gRPC, in stages of 2, 8 and 16 users, speculation on against off.

Each user sends its next request when its last one has ended. Three entries a stage: TTFT, inter-token latency and
end-to-end. A stream of a wrong shape, with wrong counts or with a non-OK status is a Locust failure of its end-to-end
entry. Run by load_tests/run.py, or by hand against a running server:

    locust -f load_tests/locustfile.py --headless --host 127.0.0.1:50051 --stage-seconds 10
"""

from __future__ import annotations

import json
import random
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gevent
import grpc
import grpc.experimental.gevent
from locust import LoadTestShape, User, constant, events, task

from batchserve.v1 import generation_pb2_grpc
from load_tests.stages import USER_COUNTS, Stage, StageSamples, plan_stages, stage_at
from load_tests.stream_check import StreamShapeError, consume
from load_tests.workloads import Workload

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from locust.env import Environment

# Locust has patched the standard library for gevent; gRPC's own threads have to be told, before any channel is made.
grpc.experimental.gevent.init_gevent()

REQUEST_TIMEOUT_S = 30.0
MAX_REQUESTS = 20_000
IDLE_S = 0.05  # behind the last stage, until Locust ends the run
CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for every user, as with real clients
]


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--stage-seconds", type=float, default=10.0, help="how long each stage lasts")
    parser.add_argument("--max-tokens", type=int, default=128, help="the most tokens of an answer")
    parser.add_argument("--seed", type=int, help="of the prompts (default: another one each run)")
    parser.add_argument("--samples-out", default="", help="where to write what each stage measured, as JSON")


class Stages(LoadTestShape):
    """Walks through the stages; also holds what they measured, since every user sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[Stage] = []
        self.samples: dict[str, StageSamples] = {}
        self.start_s = 0.0
        self.seed = 0
        self.shown: Stage | None = None
        self.num_requests = 0

    def begin(self, stage_seconds: float, seed: int | None) -> None:
        # A server that has answered a run's prompts before would draft their answers from that.
        self.seed = random.SystemRandom().getrandbits(64) if seed is None else seed
        self.stages = plan_stages(stage_seconds, USER_COUNTS)
        self.samples = {stage.name: StageSamples(stage) for stage in self.stages}

    def reset_time(self) -> None:
        """Called by Locust when the run begins."""
        super().reset_time()
        self.start_s = time.perf_counter()

    def current(self) -> Stage | None:
        return stage_at(self.stages, time.perf_counter() - self.start_s)

    def tick(self) -> tuple[int, float] | None:
        """The number of users wanted, and how many to start a second; None ends the run.

        All users from the start on, who wait for their stages: Locust asks once a second only.
        """
        stage = self.current()
        if stage is None:
            return None
        if self.num_requests >= MAX_REQUESTS:
            print(f"load: ended in the midst of {stage.name}: {MAX_REQUESTS} requests are the most", flush=True)
            self.runner.environment.process_exit_code = 1
            return None
        if stage is not self.shown:
            self.shown = stage
            print(f"load: stage {self.stages.index(stage) + 1} of {len(self.stages)}: {stage.name}", flush=True)
        return max(USER_COUNTS), 100.0


@events.init.add_listener
def on_init(environment: Environment, **_: Any) -> None:
    shape = environment.shape_class
    if isinstance(shape, Stages) and environment.parsed_options is not None:
        shape.begin(environment.parsed_options.stage_seconds, environment.parsed_options.seed)


@events.quitting.add_listener
def on_quitting(environment: Environment, **_: Any) -> None:
    shape = environment.shape_class
    path = environment.parsed_options.samples_out if environment.parsed_options is not None else ""
    if path and isinstance(shape, Stages):
        Path(path).write_text(json.dumps([samples.summary() for samples in shape.samples.values()]))


class GrpcUser(User):
    """One client with a connection of its own that streams one answer after the other."""

    wait_time = constant(0)
    workload = Workload()
    numbers = count()

    def on_start(self) -> None:
        self.number = next(self.numbers)
        self.num_sent = 0
        self.channel = grpc.insecure_channel(self.environment.host, options=CHANNEL_OPTIONS)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)

    def on_stop(self) -> None:
        self.channel.close()

    @task
    def stream(self) -> None:
        shape = self.environment.shape_class
        stage = shape.current()
        if stage is None or shape.num_requests >= MAX_REQUESTS:
            gevent.sleep(IDLE_S)
            return
        if self.number >= stage.users:
            gevent.sleep(shape.start_s + stage.end_s - time.perf_counter())
            return
        samples = shape.samples[stage.name]
        shape.num_requests += 1
        self.num_sent += 1
        # Not the same prompts in two stages: what one left in the shared drafts would flatter the other.
        seed = f"{shape.seed} {stage.name} {self.number} {self.num_sent}"
        request = self.workload.request(seed, stage.is_speculating, self.environment.parsed_options.max_tokens)
        sent_s = time.perf_counter()
        try:
            call = self.stub.StreamGenerate(request, timeout=REQUEST_TIMEOUT_S)
            record = consume(request, call, time.perf_counter, sent_s)
        except (grpc.RpcError, StreamShapeError) as error:
            samples.num_failures += 1
            self.report(stage, "end-to-end", time.perf_counter() - sent_s, 0, error)
            return
        # A stream that crosses into the next stage is checked as any other, but measures neither.
        if samples.add(record, shape.start_s):
            if record.ttft_s is not None:
                self.report(stage, "TTFT", record.ttft_s)
            for latency_s in record.inter_token_latencies_s():
                self.report(stage, "inter-token", latency_s)
            self.report(stage, "end-to-end", record.end_to_end_s, record.usage.completion_tokens)

    def report(
        self, stage: Stage, what: str, seconds: float, num_tokens: int = 0, error: Exception | None = None
    ) -> None:
        self.environment.events.request.fire(
            request_type="gRPC",
            name=f"{stage.users:>2} users, {'on ' if stage.is_speculating else 'off'}: {what}",
            response_time=seconds * 1e3,
            response_length=num_tokens,
            exception=error,
            context={},
        )
