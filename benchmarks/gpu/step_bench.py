"""Steps of one engine with random weights, launched and waited for as the engine itself does."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from batchserve.attention.paged import PagedBackend
from batchserve.decoding_length.step_time import CRITICAL_RATIO
from batchserve.gpu.linears import RowLinear
from batchserve.request import GREEDY, ResolvedSampling
from batchserve.runner.queued_step import QueuedStep
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.sampling.device_rows import NEEDS_HOST
from benchmarks.gpu.cases import random_parents
from benchmarks.gpu.kit import Kit
from benchmarks.gpu.models import engine_on, num_graphs, random_llama, weight_bytes

if TYPE_CHECKING:
    from batchserve.runner.model_runner import ModelRunner

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
RUNS = 11
WARM_RUNS = 2
WARMING_S = 0.3  # before a cell's first steps
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=0.8),
    "top_p": replace(GREEDY, temperature=0.8, top_p=0.95),
}


@torch.inference_mode()
def fill_caches(runner: ModelRunner) -> None:
    """K/V of numbers as they come: zeros take a device less power, and so less time."""
    if isinstance(runner.backend, PagedBackend):
        for cache in chain.from_iterable(runner.backend.caches):
            cache.normal_()


class StepBench:
    """An engine of a shape; `options` are EngineConfig's."""

    def __init__(self, kit: Kit, shape: str, bandwidth: float, options: dict[str, Any]) -> None:
        model = random_llama(kit, shape)
        self._kit, self._bandwidth, self._weight_bytes = kit, bandwidth, weight_bytes(model)
        self.engine = engine_on(kit, model, shape, **options)
        self._core, self.runner = self.engine.core, self.engine.core.executor
        self.runner.bind_thread()
        fill_caches(self.runner)
        self._bytes_per_token = self.runner.allocator.bytes_per_token

    def about(self) -> dict[str, Any]:
        model = self._core.drafts.policy.step_time
        return {
            **self.ran_on(),
            "graphs": num_graphs(self.engine),
            "own_linears": sum(isinstance(each, RowLinear) for each in self.runner._model.modules()),
            "weight_bytes": self._weight_bytes,
            "kv_bytes_per_token": self._bytes_per_token,
            "kv_tokens": self.runner.allocator.total_tokens,
            "critical_length": model.critical_length(),
            "table": {"rows": model.table.rows, "ms": [round(s * 1e3, 3) for s in model.table.seconds]},
        }

    def ran_on(self) -> dict[str, str]:
        return {"attention": self.engine.info.attention_backend}

    def measure_eager(self, batch: int, context: int) -> dict[str, Any]:
        """As measure(), of the same engine without its graphs: they are not worth the time to build another one."""
        graphs, self.runner.graphs = self.runner.graphs, None
        try:
            return self.measure(batch, context)
        finally:
            self.runner.graphs = graphs

    def measure(self, batch: int, context: int, max_rows: int = ROWS[-1]) -> dict[str, Any]:
        """Milliseconds by rows of all requests together, trees where a request has several."""
        wanted = [rows for rows in self._kit.pick(ROWS, (1, 2, 4)) if rows % batch == 0 and rows <= max_rows]
        missing = self.lacks_memory(batch * context + max(wanted))
        if missing is not None:
            return {"skipped": missing}
        found: dict[str, list[float]] = {"ms": [], "launch_ms": []}
        with self.contexts(batch, context, max(wanted) // batch) as names:
            self._warm(names, context, wanted[0] // batch)
            for rows in wanted:
                timed = self._time(names, context, rows // batch)
                for key, values in found.items():
                    values.append(round(timed[key], 4))
        floor_ms = (self._weight_bytes + batch * context * self._bytes_per_token) / self._bandwidth * 1e3
        critical = [rows for rows, ms in zip(wanted, found["ms"], strict=True) if ms <= CRITICAL_RATIO * found["ms"][0]]
        return {
            **self.ran_on(),
            "rows": wanted,
            **found,
            "roofline_ms": round(floor_ms, 4),
            "over_roofline": [round(ms / floor_ms, 3) for ms in found["ms"]],
            "critical_rows": critical[-1],
        }

    def measure_sampling(self, batch: int, context: int) -> dict[str, Any]:
        """Milliseconds by how tokens are chosen, and by rows of all requests together; of how many the host decided."""
        wanted = self._kit.pick((1, 4, 16), (1, 2))
        missing = self.lacks_memory(batch * (context + max(wanted)))
        if missing is not None:
            return {"skipped": missing}
        ms: dict[str, list[float]] = {}
        host_rows: dict[str, list[float]] = {}
        with self.contexts(batch, context, max(wanted)) as names:
            for name, sampling in SAMPLINGS.items():
                timed = [self._time(names, context, rows, sampling) for rows in wanted]
                ms[name] = [round(each["ms"], 4) for each in timed]
                host_rows[name] = [each["host_rows"] for each in timed]
        return {**self.ran_on(), "rows": [batch * rows for rows in wanted], "ms": ms, "host_rows": host_rows}

    def lacks_memory(self, num_tokens: int) -> str | None:
        """Why there is no K/V memory for so many tokens; None: there is."""
        free = self.runner.allocator.free_tokens
        return None if num_tokens <= free else f"K/V memory holds {free} tokens, needed are {num_tokens}"

    @contextmanager
    def contexts(self, batch: int, context: int, rows: int) -> Iterator[list[str]]:
        """So many requests with that context, and memory for so many rows of each; their ids."""
        allocator = self.runner.allocator
        names = [f"step-{i}" for i in range(batch)]
        try:
            for name in names:
                allocator.reserve(name, context + rows)
                allocator.commit(name, range(context))
            yield names
        finally:
            for name in names:
                allocator.release(name)

    def _warm(self, names: list[str], context: int, rows: int) -> None:
        """Until the host's cores, too, run at full speed: behind a start they do not."""
        until_s = time.perf_counter() + self._kit.pick(WARMING_S, 0.0)
        rng = random.Random(rows)
        while time.perf_counter() < until_s:
            self.step(rng, names, context, rows)

    def _time(self, names: list[str], context: int, rows: int, sampling: ResolvedSampling = GREEDY) -> dict[str, float]:
        self._kit.beat()
        rng = random.Random(rows)
        runs = self._kit.pick(RUNS, 1) + WARM_RUNS
        steps = [self.step(rng, names, context, rows, sampling) for _ in range(runs)]
        total, launched, host_rows = zip(*steps[WARM_RUNS:], strict=True)
        times = {"ms": statistics.median(total) * 1e3, "launch_ms": statistics.median(launched) * 1e3}
        return {**times, "host_rows": statistics.median(host_rows)}

    def step(
        self, rng: random.Random, names: list[str], context: int, rows: int, sampling: ResolvedSampling = GREEDY
    ) -> tuple[float, float, int]:
        """Seconds of one step of so many rows of each request, and of its launch alone; rows left to the host."""
        requests = []
        for name in names:
            self.runner.allocator.reserve(name, rows)
            parents = [-1, *(max(0, p + 1) for p in random_parents(rng, rows - 1))]  # hanging from the last token
            requests.append(RequestRows(name, context, [rng.randrange(100)] * rows, parents, 1, sampling))
        batch = build_batch(requests)
        started_s = time.perf_counter()
        handle = self.runner.launch(batch)
        launched_s = time.perf_counter() - started_s
        handle.wait()
        took_s = time.perf_counter() - started_s
        assert isinstance(handle, QueuedStep)
        return took_s, launched_s, int((handle._copy.wait()[0] == NEEDS_HOST).sum())
