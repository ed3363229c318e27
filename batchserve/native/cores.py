"""The processor: its cores that this process may use, and how many threads it computes on by default."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path

from batchserve.native.control_groups import group_folders

SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def default_threads(root: Path = Path("/")) -> int:
    """Returns OMP_NUM_THREADS if it is set, or else a thread for each physical core, within the quota of CPU time."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    cores, quota = physical_cores(root), cpu_quota(root)
    return cores if quota is None else min(cores, math.ceil(quota))  # more threads would only be stopped in turns


def usable_cores() -> list[int]:
    """Returns the numbers of the logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores(root: Path = Path("/")) -> int:
    """Returns the number of physical cores that this process may run on."""
    found = set()
    for core in usable_cores():
        with suppress(OSError):
            found.add((root / SIBLINGS.format(core)).read_text())
    return len(found) or len(usable_cores())


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the cores' worth of CPU time that the control groups leave this process; None if they set no limit."""
    found = [_of_group(folder) for folder in group_folders("cpu", root)]
    return min((quota for quota in found if quota is not None), default=None)


class Neighbours:
    """Measures how many of the machine's cores others have used since this was made."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._own_s, self._began_s = root, time.process_time(), time.perf_counter()
        self._busy_s = self._busy()

    def cores(self) -> float:
        """Returns the average number of cores that other processes have kept busy; 0.0 if the system does not say."""
        elapsed_s = time.perf_counter() - self._began_s
        others_s = self._busy() - self._busy_s - (time.process_time() - self._own_s)
        return max(0.0, others_s / elapsed_s) if elapsed_s > 0.0 else 0.0

    def _busy(self) -> float:
        """Returns the seconds that all cores together have been busy, or a hypervisor has kept."""
        with suppress(OSError, ValueError, StopIteration):
            numbers = [int(each) for each in (self._root / "proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
            idle, waiting = numbers[3:5]
            return (sum(numbers) - idle - waiting) / os.sysconf("SC_CLK_TCK")
        return 0.0


def processor_name() -> str:
    """Returns the processor's model, empty if the system does not say."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return ""


def _of_group(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        most, period = (folder / "cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    with suppress(OSError, ValueError):  # version 1: -1 without a limit
        most_us = int((folder / "cpu.cfs_quota_us").read_text())
        return most_us / int((folder / "cpu.cfs_period_us").read_text()) if most_us > 0 else None
    return None
