"""A Locust shape that walks through the stages of load_tests/stages.py, and what each of them measured."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gevent
from locust import LoadTestShape

from load_tests.stages import USER_COUNTS, Stage, StageSamples, plan_stages, stage_at

if TYPE_CHECKING:
    from locust.env import Environment

    from load_tests.stream_check import StreamRecord

MAX_REQUESTS = 20_000
IDLE_S = 0.05  # after the last stage, until Locust ends the run


class StagedShape(LoadTestShape):
    """Starts all users at once, who wait for their stages: Locust asks once a second only."""

    def __init__(self, stage_seconds: float, environment: Environment) -> None:
        super().__init__()
        self.environment = environment
        self.runner = environment.runner
        self.stages = plan_stages(stage_seconds, USER_COUNTS)
        self.samples = {stage.name: StageSamples(stage) for stage in self.stages}
        self.start_s = 0.0
        self.shown: Stage | None = None
        self.num_requests = 0
        environment.events.quitting.add_listener(self.write_samples)

    def reset_time(self) -> None:
        """Called by Locust when the run begins."""
        super().reset_time()
        self.start_s = time.perf_counter()

    def current(self) -> Stage | None:
        return stage_at(self.stages, time.perf_counter() - self.start_s)

    def tick(self) -> tuple[int, float] | None:
        """The number of users wanted, and how many to start a second; None ends the run."""
        stage = self.current()
        if stage is None:
            return None
        if self.num_requests >= MAX_REQUESTS:
            print(f"load: ended in the midst of {stage.name}: {MAX_REQUESTS} requests are the most", flush=True)
            self.environment.process_exit_code = 1
            return None
        if stage is not self.shown:
            self.shown = stage
            print(f"load: stage {self.stages.index(stage) + 1} of {len(self.stages)}: {stage.name}", flush=True)
        return max(USER_COUNTS), 100.0

    def wait_for_stage(self, user: int) -> Stage | None:
        """The stage in which this user, counted from 0, may send a call now; or None, after some sleep."""
        stage = self.current()
        if stage is None or self.num_requests >= MAX_REQUESTS:
            gevent.sleep(IDLE_S)
            return None
        if user >= stage.users:
            gevent.sleep(self.start_s + stage.end_s - time.perf_counter())
            return None
        self.num_requests += 1
        return stage

    def add(self, stage: Stage, record: StreamRecord | None) -> None:
        """Take in a call of a stage; no record: it failed."""
        if record is None:
            self.samples[stage.name].num_failures += 1
        else:
            self.samples[stage.name].add(record, self.start_s)

    def write_samples(self, **_: Any) -> None:
        path = self.environment.parsed_options.samples_out
        if path:
            Path(path).write_text(json.dumps([samples.summary() for samples in self.samples.values()]))
