"""A run of Locust as one process sees it: its prompts, its latencies, and how it ends."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

from locust.runners import MasterRunner, WorkerRunner

from batchserve.errors import ConfigError
from load_tests.latencies import Latencies
from load_tests.options import refuse
from load_tests.workload_file import load_workload

if TYPE_CHECKING:
    from locust.env import Environment

    from load_tests.stream_check import StreamRecord
    from load_tests.workloads import Workload

TTFT, ITL = "TTFT", "ITL"  # the types of the entries in Locust's statistics


class Run:
    """What a process knows. The master, or a process alone, also knows the others' latencies and the end."""

    workload: Workload

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
            self.read_workload()  # a worker is told by its master which one

    def begin(self, **_: Any) -> None:
        self.latencies, self.num_users, self.faults = Latencies(), 0, {"no call has ended"}
        # A server that has answered a run's prompts before would draft their answers from that. And no two workers ask
        # the same.
        seed = self.environment.parsed_options.seed or random.SystemRandom().getrandbits(64)
        self.seed = f"{seed} {getattr(self.environment.runner, 'worker_index', 0)}"
        self.num_workers = self._num_workers()
        self.read_workload()

    def read_workload(self) -> None:
        """Reads the requests, once. Ends the process if they cannot be read."""
        try:
            self.workload = load_workload(self.environment.parsed_options.workload)
        except ConfigError as error:
            refuse(str(error))

    def next_number(self) -> int:
        self.num_users += 1
        return self.num_users - 1

    def add(self, record: StreamRecord, name: str) -> None:
        """Takes in the latencies of an answered call, here and as entries of Locust's statistics.

        Such an entry counts first tokens, or tokens. It is no request: Locust's totals leave it out.
        """
        self.latencies.add(record)
        stats = self.environment.stats
        if record.ttft_s is not None:
            stats.get(name, TTFT).log(record.ttft_s * 1e3, 0)
        for latency_s in record.inter_token_latencies_s():
            stats.get(name, ITL).log(latency_s * 1e3, 0)

    def report(self, data: dict[str, Any], **_: Any) -> None:
        data["latencies"] = self.latencies.take()

    def take_report(self, data: dict[str, Any], **_: Any) -> None:
        self.latencies.merge(data.get("latencies", {}))

    def count_workers(self, **_: Any) -> None:
        if self._num_workers() < self.num_workers:
            self.faults.add("a worker was lost")

    def end(self, **_: Any) -> None:
        """Says what Locust does not count, and gives a run that Locust thinks well of the status that it deserves."""
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
