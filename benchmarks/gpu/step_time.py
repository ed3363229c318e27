"""(c) How long a step takes by requests, rows and context, against the time that its bytes need.

After Lookahead (KDD'24), figures 1 and 6.

The roofline: weights and K/V, each read once, over the bandwidth that a copy has on this device.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from batchserve.request import ResolvedSampling
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.scheduler.step_time import CRITICAL_RATIO
from benchmarks.gpu.cases import Case, make_step, random_parents
from benchmarks.gpu.correctness import kernels, missing_module
from benchmarks.gpu.kit import Kit, Report, copy_bandwidth, kernel_ms
from benchmarks.gpu.models import all_backends, engine_on, graph_modes, random_llama, shape_names, weight_bytes

BATCHES = (1, 2, 4, 8, 16, 32)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CONTEXTS = (1024, 128, 4096, 8192)  # the most usual first
GREEDY = ResolvedSampling(0.0, 0, 1.0, 0, 1, frozenset())
RUNS = 7


def run(kit: Kit, report: Report) -> None:
    bandwidth = copy_bandwidth(kit)
    report.about(copy_gb_per_s=round(bandwidth / 1e9, 1))
    first, second = shape_names(kit)
    modes = graph_modes(kit)
    _grid(kit, report, first, "default", modes["default"], bandwidth, kit.pick(BATCHES, (1, 2)))
    if "eager" in modes:
        _grid(kit, report, first, "eager", modes["eager"], bandwidth, (1, 16), CONTEXTS[:1])
    _grid(kit, report, second, "default", modes["default"], bandwidth, kit.pick(BATCHES, (1,)))
    if "compiled" in modes:
        _grid(kit, report, first, "compiled", modes["compiled"], bandwidth, (1, 16), CONTEXTS[:1])
    for batch in kit.pick((1, 8), (1,)):
        report.cell(f"attention/b{batch}", partial(attention_ms, kit, batch))
    for name, options in all_backends(kit, 128, torch.bfloat16).items():
        _grid(kit, report, second, name, options, bandwidth, kit.pick((1, 8), (1,)), CONTEXTS[:1])


def _grid(
    kit: Kit,
    report: Report,
    shape: str,
    mode: str,
    options: dict[str, Any],
    bandwidth: float,
    batches: Sequence[int],
    contexts: Sequence[int] = CONTEXTS,
) -> None:
    """One engine, a cell for every number of requests and context."""
    contexts = kit.pick(contexts, (64,))
    names = {f"{shape}/{mode}/b{b}/c{c}": (b, c) for c in contexts for b in batches}
    if not report.wants(*names):
        return
    longest = max(contexts) + max(ROWS) + 1
    more = {"max_num_seqs": max(batches), "max_model_len": longest}
    bench = report.build(f"{shape}/{mode}", lambda: StepBench(kit, shape, bandwidth, {**more, **options}))
    if bench is None:
        return
    report.about(**{f"{shape}/{mode}": bench.about()})
    for name, (batch, context) in names.items():
        report.cell(name, partial(bench.measure, batch, context))
    del bench
    kit.free()


class StepBench:
    """Steps of one engine, launched and waited for as the engine itself does."""

    def __init__(self, kit: Kit, shape: str, bandwidth: float, options: dict[str, Any]) -> None:
        model = random_llama(kit, shape)
        self._kit, self._bandwidth, self._weight_bytes = kit, bandwidth, weight_bytes(model)
        self._engine = engine_on(kit, model, shape, **options)
        self._core, self._runner = self._engine.core, self._engine.core.runner
        self._runner.bind_thread()
        self._bytes_per_token = self._runner.backend.allocator.bytes_per_token

    def about(self) -> dict[str, Any]:
        model = self._core.drafts.adaptive.step_time
        return {
            "attention": self._engine.info.attention_backend,
            "weight_bytes": self._weight_bytes,
            "kv_bytes_per_token": self._bytes_per_token,
            "kv_tokens": self._runner.backend.allocator.total_tokens,
            "critical_length": model.critical_length(),
            "table": {"rows": model.table.rows, "ms": [round(s * 1e3, 3) for s in model.table.seconds]},
        }

    def measure(self, batch: int, context: int) -> dict[str, Any]:
        """Milliseconds by rows of all requests together, trees where a request has several."""
        wanted = [rows for rows in self._kit.pick(ROWS, (1, 2, 4)) if rows % batch == 0]
        allocator = self._runner.backend.allocator
        needed = batch * context + max(wanted)
        if needed > allocator.free_tokens:
            return {"skipped": f"K/V memory holds {allocator.free_tokens} tokens, needed are {needed}"}
        names = [f"step-{i}" for i in range(batch)]
        found: dict[str, list[float]] = {"ms": [], "launch_ms": []}
        try:
            for name in names:
                allocator.reserve(name, context + max(wanted) // batch)
                allocator.commit(name, range(context))
            for rows in wanted:
                for key, value in self._time(names, context, rows // batch).items():
                    found[key].append(round(value, 4))
        finally:
            for name in names:
                allocator.release(name)
        floor_ms = (self._weight_bytes + batch * context * self._bytes_per_token) / self._bandwidth * 1e3
        critical = [rows for rows, ms in zip(wanted, found["ms"], strict=True) if ms <= CRITICAL_RATIO * found["ms"][0]]
        return {
            "rows": wanted,
            **found,
            "roofline_ms": round(floor_ms, 4),
            "over_roofline": [round(ms / floor_ms, 3) for ms in found["ms"]],
            "critical_rows": critical[-1],
        }

    def _time(self, names: list[str], context: int, rows: int) -> dict[str, float]:
        rng, allocator = random.Random(rows), self._runner.backend.allocator
        total, launched = [], []
        for number in range(self._kit.pick(RUNS, 1) + 2):
            requests = []
            for name in names:
                allocator.reserve(name, rows)
                parents = [-1, *(max(0, p + 1) for p in random_parents(rng, rows - 1))]  # hanging from the last token
                requests.append(RequestRows(name, context, [number] * rows, parents, 1, GREEDY))
            batch = build_batch(requests)
            started_s = time.perf_counter()
            handle = self._runner.launch(batch)
            launched.append(time.perf_counter() - started_s)
            handle.wait()
            total.append(time.perf_counter() - started_s)
        return {"ms": statistics.median(total[2:]) * 1e3, "launch_ms": statistics.median(launched[2:]) * 1e3}


def attention_ms(kit: Kit, batch: int) -> dict[str, Any]:
    """One layer's attention: every kernel on trees, and on chains of as many rows, which is plain causal attention."""
    dtype = kit.pick(torch.bfloat16, torch.float32)
    shape = kit.pick({}, {"heads": 4, "kv_heads": 2, "head_dim": 64})
    found: dict[str, Any] = {}
    for rows in kit.pick((1, 4, 8, 16, 32, 64), (4,)):
        for kind, count in (("tree", rows), ("causal", -rows)):
            case = Case(kind, (kit.pick(2048, 64),) * batch, (count,) * batch, **shape)
            step = make_step(case, kit.device, dtype)
            for name, make in kernels(kit).items():
                if missing_module(kit, name, case, dtype) is not None:
                    continue
                kernel = make(case, dtype)
                kernel.plan(step.metadata)
                args = step.query, step.key_cache, step.value_cache, step.metadata, case.params
                ms = kernel_ms(kit, partial(kernel.run, *args))
                found.setdefault(name, {}).setdefault(kind, {})[str(rows)] = round(ms, 5)
    return found
