"""(e) Memory by decoding length (Lookahead, table 5): what eager steps and drafters take beside weights and K/V."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from batchserve.config import MiB
from benchmarks.adaptive.driver import fixed
from benchmarks.adaptive.warm_drafter import WarmDrafter
from benchmarks.adaptive.workloads import new_drafter
from benchmarks.gpu import answers
from benchmarks.gpu.kit import Kit, Report, used_memory
from benchmarks.gpu.models import build_for, shape_names
from benchmarks.gpu.replay import ReplayBench

LENGTHS = (0, 4, 8, 16, 32, 48, 64)
KV_BYTES = 16 << 30


def run(kit: Kit, report: Report) -> None:
    shape = shape_names(kit)[0]
    sizes: tuple[int, ...] = kit.pick((1, 16), (1,))
    cells = {f"{shape}/b{size}": size for size in sizes}
    # Eager: what a graph needs is set aside when it is captured, whatever it is used for.
    options = {"kv_cache_memory": kit.pick(KV_BYTES, 64 * MiB), "enforce_eager": True}
    bench = build_for(kit, report, shape, cells, lambda kit: ReplayBench(kit, shape, **options))
    if bench is None:
        return
    report.about(kv_mib=kit.pick(KV_BYTES, 64 * MiB) >> 20, after_start=used_memory(kit))
    for name, size in cells.items():
        report.cell(name, partial(by_length, kit, bench, size, partial(report.keep, name)))


def by_length(kit: Kit, bench: ReplayBench, size: int, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """What is used at most, by decoding length; every length is kept as soon as it is done."""
    records = answers.load(kit.replay, answers.set_names(kit.replay)[0])
    lengths: dict[str, Any] = {}
    found = {"attention": bench.engine.info.attention_backend, "lengths": lengths}
    for length in kit.pick(LENGTHS, (0, 8)):
        drafter = bench.core.drafts.drafter = WarmDrafter(new_drafter("mixture"), records[: len(records) // 2])
        kit.free()
        if not kit.is_dry:
            torch.cuda.reset_peak_memory_stats()
        run = bench.driver.run(records[len(records) // 2 :], [(size, size * kit.pick(24, 4))], fixed(length))
        lengths[str(length)] = {
            **used_memory(kit),
            "drafter_mib": round(drafter.memory_bytes() / MiB, 2),
            "rows_per_step": round(sum(run.step_rows) / len(run.step_rows), 1),
        }
        keep(found)
    return found
