"""(c) How long a step takes by requests, rows and context, against the time that its bytes need.

After Lookahead (KDD'24), figures 1 and 6.

The roofline: weights and K/V, each read once, over the bandwidth that a copy has on this device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import buckets, profile, small_q
from benchmarks.gpu.cases import Case, make_step
from benchmarks.gpu.correctness import kernels, missing_module
from benchmarks.gpu.kit import Kit, Report, copy_bandwidth, tolerated
from benchmarks.gpu.models import all_backends, build_for, graph_modes, shape_names
from benchmarks.gpu.small_q import call_us, several
from benchmarks.gpu.step_bench import ROWS, StepBench
from benchmarks.gpu.verdict import KERNELS

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (1024, 128, 4096, 8192)  # the most usual first
EAGER = (1, 16)  # requests of steps that are timed without graphs, too
FEW_ROWS = 64
PROMPTS = {"begin": (0, 1024), "middle": (4096, 1024), "short": (512, 256)}  # context, and rows of a chunk


def run(kit: Kit, report: Report) -> None:
    bandwidth = copy_bandwidth(kit)
    report.about(copy_gb_per_s=round(bandwidth / 1e9, 1))
    first, second = shape_names(kit)
    modes = graph_modes(kit)
    compiling = [f"{first}/{mode}" for mode in modes if mode != "uncompiled"]
    profiled = kit.pick((first, second), (first,))
    compiling += [f"{second}/default", *(f"{second}/{name}" for name in KERNELS)]
    report.about(compiles=[*compiling, *(f"{shape}/{profile.KERNELS}" for shape in profiled)])
    # A word on every question, then all the rest.
    _grid(kit, report, first, "default", modes["default"], bandwidth, kit.pick(BATCHES, (1, 2)), CONTEXTS[:1])
    for batch in kit.pick((1, 8), (1,)):
        report.cell(f"attention/b{batch}", partial(attention_ms, kit, batch))
    report.cell("attention/prompts", partial(prompts_ms, kit))
    _grid(kit, report, second, "default", modes["default"], bandwidth, kit.pick(BATCHES, (1,)), CONTEXTS[:1])
    for mode in ("torch_kernels", "one_by_one", "uncompiled"):
        _mode(kit, report, first, modes, bandwidth, mode)
    small_q.run(kit, report, bandwidth, small_q.FEW)
    buckets.run(kit, report, first, bandwidth)
    _grid(kit, report, first, "default", modes["default"], bandwidth, kit.pick(BATCHES, (1, 2)), CONTEXTS[1:])
    profile.run(kit, report, profiled)
    small_q.run(kit, report, bandwidth)
    for name, options in all_backends(kit, 128, torch.bfloat16).items():
        named = dataclasses.replace(kit, backend=options["attention_backend"])  # no other is to take its place
        _grid(named, report, second, name, options, bandwidth, kit.pick((1, 8), (1,)), CONTEXTS[:1])
    _grid(kit, report, second, "default", modes["default"], bandwidth, kit.pick(BATCHES, (1,)), CONTEXTS[1:])
    # Behind what must not be lost: a part may be ended while inductor compiles.
    _mode(kit, report, first, modes, bandwidth, "whole")


def _mode(kit: Kit, report: Report, shape: str, modes: dict[str, dict[str, Any]], bandwidth: float, mode: str) -> None:
    """Steps of few rows, as another way to run the model has them."""
    if mode in modes:
        options = {**modes[mode], "max_graph_rows": FEW_ROWS}
        _grid(kit, report, shape, mode, options, bandwidth, (1, 16), CONTEXTS[:1], max_rows=FEW_ROWS)


def _grid(
    kit: Kit,
    report: Report,
    shape: str,
    mode: str,
    options: dict[str, Any],
    bandwidth: float,
    batches: Sequence[int],
    contexts: Sequence[int] = CONTEXTS,
    max_rows: int = ROWS[-1],
) -> None:
    """One engine, a cell for every number of requests and context, of steps of up to max_rows, or the kit's."""
    if kit.most_rows is not None:
        max_rows = min(max_rows, kit.most_rows)
        options = {**options, "max_graph_rows": max_rows}
    is_first, contexts = CONTEXTS[0] in contexts, kit.pick(contexts, (64,))
    names = {f"{shape}/{mode}/b{b}/c{c}": (b, c) for c in contexts for b in batches}
    sampling_batch = min(16, max(batches))
    has_more = mode == "default" and is_first
    sampling = [f"{shape}/sampling/b{sampling_batch}"] if has_more else []
    eager = {f"{shape}/eager/b{b}/c{contexts[0]}": b for b in EAGER if has_more and "eager" in graph_modes(kit)}
    longest = max(contexts) + max(ROWS) + 1
    sizes = {"max_num_seqs": max(batches), "max_model_len": longest}

    def make(kit: Kit) -> StepBench:
        return StepBench(kit, shape, bandwidth, {**sizes, **options})

    fitting = [each for each in profile.PROFILED if has_more and each[0] <= max(batches)]
    stages = {f"{shape}/stages/b{b}/r{rows}": (b, rows) for b, rows in fitting}
    cells = [*names, *sampling, *eager, *stages]
    bench = build_for(kit, report, f"{shape}/{mode}", cells, make, options=options)
    if bench is None:
        return
    report.about(**{f"{shape}/{mode}": bench.about()})
    for name, (batch, context) in names.items():
        report.cell(name, partial(bench.measure, batch, context, max_rows))
    for name, (batch, rows) in stages.items():
        report.cell(name, partial(profile.stages, kit, bench, batch, rows))
    for name in sampling:
        report.cell(name, partial(bench.measure_sampling, sampling_batch, contexts[0]))
    for name, batch in eager.items():
        report.cell(name, partial(bench.measure_eager, batch, contexts[0]))
    del bench
    kit.free()


def prompts_ms(kit: Kit) -> dict[str, Any]:
    """One layer's causal attention of a chunk of a prompt, by kernel."""
    dtype, found = kit.pick(torch.bfloat16, torch.float32), {}
    shape = kit.pick({}, {"heads": 4, "kv_heads": 2, "head_dim": 64})
    for name, (context, rows) in kit.pick(PROMPTS, {"begin": (0, 64)}).items():
        case = Case(name, (context,), (-rows,), **shape)
        step = make_step(case, kit.device, dtype)
        for kernel_name, make in kernels(kit).items():
            if missing_module(kit, kernel_name, case, dtype) is None:
                kernel = make(case, dtype)
                us = call_us(
                    kit, kernel, step.query, several(step, 2 * step.key_cache.nbytes), step.metadata, case.params
                )
                found.setdefault(kernel_name, {})[name] = round(us / 1e3, 5)
    return {"prompts": found}


def attention_ms(kit: Kit, batch: int) -> dict[str, Any]:
    """One layer's attention: every kernel on trees, and on chains of as many rows, which is plain causal attention."""
    dtype = kit.pick(torch.bfloat16, torch.float32)
    shape = kit.pick({}, {"heads": 4, "kv_heads": 2, "head_dim": 64})
    found: dict[str, Any] = {}
    failed: dict[str, Any] = {}
    for rows in kit.pick((1, 4, 8, 16, 32, 64), (4,)):
        for kind, count in (("tree", rows), ("causal", -rows)):
            case = Case(kind, (kit.pick(2048, 64),) * batch, (count,) * batch, **shape)
            step = make_step(case, kit.device, dtype)
            # A single row would be a chain; and a layer's K/V is not in the caches of the device.
            metadata = dataclasses.replace(step.metadata, is_causal=kind == "causal")
            caches = several(step, 2 * step.key_cache.nbytes)
            needed = case if kind == "causal" else dataclasses.replace(case, rows=(2,))
            for name, make in kernels(kit).items():
                if missing_module(kit, name, needed, dtype) is not None:
                    continue
                kernel = make(case, dtype)
                try:
                    ms = call_us(kit, kernel, step.query, caches, metadata, case.params) / 1e3
                except Exception as error:  # the others are to be measured
                    failed.setdefault(name, {}).setdefault(kind, {})[str(rows)] = tolerated(error)
                    continue
                found.setdefault(name, {}).setdefault(kind, {})[str(rows)] = round(ms, 5)
    return {**found, "failed": failed} if failed else found
