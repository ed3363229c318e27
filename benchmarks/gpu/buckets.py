"""(c) Graphs for buckets of rows against graphs for buckets of rows and requests: steps, time to capture, memory.

Over one engine, a set of graphs for each way. Their steps take turns, so that all of them see the same clocks and
temperatures: the attention that they differ in is a small part of a step.
"""

from __future__ import annotations

import random
import statistics
import time
from functools import partial
from typing import Any

from batchserve.config import MiB
from batchserve.runner.cuda_graphs import CudaCapturer, StepGraphs
from benchmarks.gpu.kit import Kit, Report, used_memory
from benchmarks.gpu.models import build_for
from benchmarks.gpu.step_bench import WARM_RUNS, StepBench
from tests.graphs import RerunCapturer

MAX_NUM_SEQS = 32  # as in the other parts
# The requests of the graphs: always all; as many as there are rows, which is how the engine captures; what fits.
WAYS: dict[str, tuple[int, ...] | None] = {"all": (MAX_NUM_SEQS,), "rows": None, "fitting": (1, 2, 4, 8, 16, 32)}
REQUESTS = (1, 16, 4, 2, 8)
ROWS_EACH = (1, 4, 8)  # of a request: decoding, and drafts
CONTEXT = 1024
KV_BYTES = 12 << 30
TURNS = 11


def run(kit: Kit, report: Report, shape: str, bandwidth: float) -> None:
    if kit.is_eager:
        return
    cells = {f"buckets/b{requests}": requests for requests in kit.pick(REQUESTS, REQUESTS[:2])}
    bench = build_for(kit, report, "buckets", cells, lambda kit: BucketBench(kit, shape, bandwidth))
    if bench is None:
        return
    # Once for nothing: what the first capture loads and takes would be booked to its way.
    if report.build("buckets/first capture", partial(bench.capture, "first", WAYS["rows"])) is not None:
        bench.forget("first")
    for way, request_sizes in WAYS.items():
        captured = report.build(f"buckets/capture {way}", partial(bench.capture, way, request_sizes))
        if captured is not None:
            report.about(**{f"buckets/{way}": captured})
    for name, requests in cells.items():
        report.cell(name, partial(bench.measure, requests))
    del bench
    kit.free()


class BucketBench:
    """An engine without graphs of its own, and the sets of graphs that its steps are run as."""

    def __init__(self, kit: Kit, shape: str, bandwidth: float) -> None:
        self._kit = kit
        longest = kit.pick(2 * CONTEXT, 128)
        options = {"enforce_eager": True, "max_num_seqs": MAX_NUM_SEQS, "max_model_len": longest}
        options["kv_cache_memory"] = kit.pick(KV_BYTES, 64 * MiB)
        self._bench = StepBench(kit, shape, bandwidth, options)
        self._graphs: dict[str, StepGraphs] = {}

    def capture(self, way: str, request_sizes: tuple[int, ...] | None) -> dict[str, Any]:
        runner, kit = self._bench.runner, self._kit
        kit.free()
        before, started_s = used_memory(kit), time.perf_counter()
        graphs = StepGraphs(
            runner.backend,
            runner.run_model,
            kit.pick(CudaCapturer, RerunCapturer)(),
            max_rows=max(REQUESTS) * max(ROWS_EACH),
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=self._bench.engine.info.max_model_len,
            say=lambda text: kit.beat(),
            request_sizes=request_sizes,
        )
        kit.sync()
        seconds = time.perf_counter() - started_s
        kit.free()
        after = used_memory(kit)
        self._graphs[way] = graphs
        more = {f"more_{name}": after[name] - before[name] for name in before}
        return {"graphs": len(graphs.buckets), "capture_s": round(seconds, 2), **more}

    def forget(self, way: str) -> None:
        del self._graphs[way]
        self._kit.free()

    def measure(self, requests: int) -> dict[str, Any]:
        """Milliseconds of a step by way, for so many rows of each request, and what the two others are of `fitting`."""
        context = self._kit.pick(CONTEXT, 32)
        missing = self._bench.lacks_memory(requests * (context + max(ROWS_EACH)))
        if missing is not None:
            return {"skipped": missing}
        found: dict[str, Any] = {
            **self._bench.ran_on(),
            "rows_each": list(ROWS_EACH),
            "ms": {way: [] for way in self._graphs},
        }
        with self._bench.contexts(requests, context, max(ROWS_EACH)) as names:
            for rows in ROWS_EACH:
                for way, seconds in self._turns(names, context, rows).items():
                    found["ms"][way].append(round(statistics.median(seconds[WARM_RUNS:]) * 1e3, 4))
        fitting = found["ms"].get("fitting")
        if fitting:
            found["over_fitting"] = {
                way: [round(one / two, 4) for one, two in zip(ms, fitting, strict=True)]
                for way, ms in found["ms"].items()
                if way != "fitting"
            }
        return found

    def _turns(self, names: list[str], context: int, rows: int) -> dict[str, list[float]]:
        runner = self._bench.runner
        seconds: dict[str, list[float]] = {way: [] for way in self._graphs}
        try:
            for turn in range(self._kit.pick(TURNS, 1) + WARM_RUNS):
                for way, graphs in self._graphs.items():
                    runner.graphs = graphs
                    seconds[way].append(self._bench.step(random.Random(turn), names, context, rows)[0])
        finally:
            runner.graphs = None
        return seconds
