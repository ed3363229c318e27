"""What the parts of the kit share: the settings of a run, and a report that is on disk after every cell."""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch

from batchserve.runner.cuda_graphs import nothing_collected

FAULTS = ("CUDA error", "device-side assert", "illegal memory access", "illegal instruction", "misaligned address",
          "unspecified launch")  # fmt: skip
# A capture that has failed leaves torch's allocator believing that it is under way: what comes next is done elsewhere.
FAILED_CAPTURES = ("graph capture", "capturing")
MAX_ERROR_CHARS, MAX_CHARS_OF_ONE = 2000, 300
# A part begins nothing new behind this share of its time: what is under way must end before it is stopped.
SOFT_SHARE = 0.85
WARMING_S = 0.7  # until an idle device runs at full speed
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kit:
    """One run. scratch: a folder for models and measured tables, gone afterwards; replay: recorded answers, or None.

    backend: an attention backend that engines shall use, "auto": the fastest whose kernels are there. can_compile:
    whether FlashInfer may compile what it lacks, which takes minutes. unfit: kernels that were found wrong or failing.
    is_eager: engines have no graphs. probes: by shape, what the probe at load found; for build_for() to report. cells:
    patterns of the cells that are to be measured, () for all. most_rows: of the steps that step_time measures, and of
    the graphs that are captured for them.
    """

    is_dry: bool
    scratch: Path
    replay: Path | None = None
    backend: str = "auto"
    can_compile: bool = False
    unfit: frozenset[str] = frozenset()
    is_eager: bool = False
    probes: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)
    cells: tuple[str, ...] = ()
    most_rows: int | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_dry else "cuda")

    def sync(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize()

    @property
    def beat_path(self) -> Path:
        return self.scratch / "beat"

    def beat(self) -> None:
        """A sign of life: a cell without any for long is taken to hang."""
        self.beat_path.touch()

    def free(self) -> None:
        """Give back what nobody refers to."""
        gc.collect()
        if not self.is_dry:
            torch.cuda.empty_cache()

    def pick(self, real: Any, dry: Any) -> Any:
        return dry if self.is_dry else real


class DeviceFaultError(Exception):
    """The device does nothing more in this process: the part goes on in another one, behind the cell at fault."""


def is_fault(error: Exception) -> bool:
    """Whether nothing that this process does on the device counts any more."""
    return any(fault in str(error) for fault in (*FAULTS, *FAILED_CAPTURES))


def partial_path(path: Path) -> Path:
    """What a report is written to before it takes the place of `path`; a process that is killed may leave it."""
    return path.with_name(f".{path.name}")


def tolerated(error: Exception) -> str:
    """What to say of a contender that failed, for the others to go on; raises what they could not go on after."""
    if is_fault(error):
        raise error
    return f"{type(error).__name__}: {error}"[:MAX_CHARS_OF_ONE]


class Report:
    """A part's results by cell, written to `path` whenever one begins or ends.

    What an earlier process of the same part has finished is not done again; a cell that it began and did not end is an
    error of its own. Errors that end a process have is_fault; what was kept of a cell stays beside its error.
    deadline_s: time.monotonic() behind which no cell begins; those are named in left_out. patterns: of the cells that
    are wanted (Kit.cells).
    """

    def __init__(self, path: Path, deadline_s: float, patterns: Sequence[str] = ()) -> None:
        self._path, self._deadline_s, self._patterns = path, deadline_s, patterns
        self._started_s = time.monotonic()
        self._kernels: dict[str, str] = {}
        self._data: dict[str, Any] = {"part": path.stem, "took_s": 0.0, "about": {}, "cells": {}, "left_out": []}
        if path.exists():
            self._data.update(json.loads(path.read_text()))
            self._data["left_out"] = []
            self._data.pop("error", None)  # of an earlier call, which this one goes on with
            under_way, _ = self._data.pop("under_way", None), self._data.pop("on", None)
            if under_way is not None:
                self._fail(under_way, "the process ended in it", is_fault=True)
        self._before_s = float(self._data["took_s"])

    @property
    def cells(self) -> dict[str, Any]:
        cells: dict[str, Any] = self._data["cells"]
        return cells

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def wants(self, *names: str) -> bool:
        """Whether one of the cells is still to be run: what they need may be dear to build."""
        missing = [name for name in names if name not in self.cells and self._is_asked_for(name)]
        if missing and self.is_late:
            self._data["left_out"] += [name for name in missing if name not in self._data["left_out"]]
            self._write()
            return False
        return bool(missing)

    def _is_asked_for(self, name: str) -> bool:
        return not self._patterns or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def faults(self, *names: str) -> list[str]:
        """Those of the cells that a process ended in."""
        return [name for name in names if self.cells.get(name, {}).get("is_fault")]

    def rename(self, name: str, other: str) -> None:
        """What is kept under `name` is kept under `other`, and the cell can be run again."""
        self.cells[other] = self.cells.pop(name)
        self._write()

    def about(self, **facts: Any) -> None:
        self._data["about"].update(facts)
        self._write()

    def on(self, kernel: str, *names: str) -> None:
        """These cells run on that kernel: it is to blame if one of them hangs."""
        self._kernels.update(dict.fromkeys(names, kernel))

    def keep(self, name: str, found: dict[str, Any]) -> None:
        """What there is of a cell that is under way."""
        self.cells[name] = {**found, "is_partial": True}
        self._write()

    def _fail(self, name: str, why: str, **more: Any) -> None:
        self.cells[name] = {**self.cells.get(name, {}), "error": why, **more}

    def cell(self, name: str, measure: Callable[[], Any]) -> None:
        """Keep what measure() gives under `name`, or why it failed; nothing where there is no time left for it."""
        if self.wants(name):
            found = self.build(name, measure)
            if found is not None:
                self.cells[name] = found
                self._write()

    def build(self, name: str, make: Callable[[], T]) -> T | None:
        """What make() gives, for several cells to use; where it fails, None and a cell of that name that says why.

        None, too, where an earlier process failed in it.
        """
        if name in self.cells:
            return None
        self._data["under_way"], self._data["on"] = name, self._kernels.get(name)
        self._write()
        try:
            return make()
        except Exception as error:  # whatever it is belongs to this cell; the next ones are to be run
            self._fail(name, "".join(traceback.format_exception(error))[-MAX_ERROR_CHARS:])
            if is_fault(error):
                self.cells[name]["is_fault"] = True
                raise DeviceFaultError(str(error)) from error
            return None
        finally:
            del self._data["under_way"], self._data["on"]
            self._write()

    def _write(self) -> None:
        self._data["took_s"] = round(self._before_s + time.monotonic() - self._started_s, 1)
        partial = partial_path(self._path)
        partial.write_text(json.dumps(self._data, indent=1) + "\n")
        os.replace(partial, self._path)


def environment(kit: Kit) -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    from importlib import metadata

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "missing"

    packages = ("torch", "transformers", "triton", "flashinfer-python", "apache-tvm-ffi", "numpy", "numba", "grpcio")
    facts: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count(), "dry": kit.is_dry}
    facts |= {name: version(name) for name in packages}
    facts |= {
        "backend": kit.backend,
        "unfit": sorted(kit.unfit),
        "is_eager": kit.is_eager,
        "can_compile": kit.can_compile,
        **({"asked_for": kit.cells} if kit.cells else {}),
        **({} if kit.most_rows is None else {"most_rows": kit.most_rows}),
    }
    if not kit.is_dry:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_mib": properties.total_memory >> 20,
            "cuda": torch.version.cuda,
        }
    return facts


def used_memory(kit: Kit) -> dict[str, int]:
    """MiB of tensors now and at most, and what is taken from the driver; in a dry run, of the process."""
    if kit.is_dry:
        return {"process_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_mib": torch.cuda.memory_allocated() >> 20,
        "peak_mib": torch.cuda.max_memory_allocated() >> 20,
        "reserved_mib": torch.cuda.memory_reserved() >> 20,
        "device_mib": (total - free) >> 20,
    }


def timed_ms(kit: Kit, call: Callable[[], Any], runs: int, *, is_queued: bool = False) -> float:
    """Milliseconds of one call on the device: the median of `runs`, two before them for warming up.

    is_queued: each behind another one, so that the device does not wait for its launch.
    """
    samples = []
    kit.beat()
    for number in range(runs + 2):
        if kit.is_dry:
            started_s = time.perf_counter()
            call()
            elapsed = (time.perf_counter() - started_s) * 1e3
        else:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if is_queued:
                call()
            begin.record()
            call()
            end.record()
            end.synchronize()
            elapsed = begin.elapsed_time(end)
        if number >= 2:
            samples.append(elapsed)
    return statistics.median(samples)


def kernel_ms(kit: Kit, call: Callable[[], Any], repeats: int = 20) -> float:
    """Milliseconds that the device needs for one call, without the host's: from a graph of `repeats` calls."""
    if kit.is_dry:
        return timed_ms(kit, call, 1)
    call()
    kit.sync()
    graph = torch.cuda.CUDAGraph()
    with nothing_collected(), torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return timed_ms(kit, graph.replay, 5, is_queued=True) / repeats


def copy_bandwidth(kit: Kit) -> float:
    """Bytes a second that a copy on the device reads and writes together, once its clocks have gone up."""
    source = torch.empty(kit.pick(2 << 30, 1 << 20), dtype=torch.uint8, device=kit.device)
    target = torch.empty_like(source)
    until_s = time.monotonic() + kit.pick(WARMING_S, 0)
    while time.monotonic() < until_s:
        target.copy_(source)
        kit.sync()
    return 2 * len(source) / (timed_ms(kit, lambda: target.copy_(source), 10) / 1e3)
