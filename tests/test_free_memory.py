"""Free memory as a machine says it, and as the control groups of a container bound it."""

from __future__ import annotations

from mmap import PAGESIZE
from pathlib import Path

import pytest

from batchserve.free_memory import free_memory_bytes

MACHINE = {"proc/meminfo": "MemTotal:       9000 kB\nMemAvailable:   8000 kB\n"}


def group(folder: str, most: str, used: int, inactive: int = 0) -> dict[str, str]:
    place = f"sys/fs/cgroup/{folder}"
    files = {"memory.max": most, "memory.current": str(used), "memory.stat": f"anon 5\ninactive_file {inactive}\n"}
    return {f"{place}/{name}": f"{text}\n" for name, text in files.items()}


def process(most: str, pages: int) -> dict[str, str]:
    """Under `ulimit -v`."""
    line = f"Max address space         {most}              unlimited            bytes     \n"
    return {"proc/self/limits": f"Limit\n{line}", "proc/self/statm": f"{pages} 5 5 1 0 9 0\n"}


HYBRID = "5:pids:/a\n4:cpu,memory:/a\n0::/\n"


def first_group(folder: str, most: int, used: int, inactive: int = 0) -> dict[str, str]:
    """Of version 1."""
    place, stat = f"sys/fs/cgroup/memory/{folder}", f"inactive_file 3\ntotal_inactive_file {inactive}\n"
    files = {"memory.limit_in_bytes": str(most), "memory.usage_in_bytes": str(used), "memory.stat": stat}
    return {f"{place}/{name}": f"{text}\n" for name, text in files.items()}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MACHINE, 8000 * 1024),
        ({**MACHINE, "proc/self/cgroup": "0::/\n", **group("", "5000000", 1000, 10)}, 5000000 - 1000 + 10),
        ({**MACHINE, "proc/self/cgroup": "0::/\n", **group("", "max", 1000)}, 8000 * 1024),
        ({**MACHINE, "proc/self/cgroup": "0::/\n", **group("", "100", 1000)}, 0),
        # Of nested groups the narrowest counts; in a namespace the path is that of the host.
        (
            {**MACHINE, "proc/self/cgroup": "0::/a/b\n", **group("a/b", "7000000", 0), **group("a", "6000000", 500)},
            6000000 - 500,
        ),
        ({**MACHINE, "proc/self/cgroup": "0::/host/pod\n", **group("", "4000000", 0)}, 4000000),
        ({**MACHINE, **process("5000000", 100)}, 5000000 - 100 * PAGESIZE),
        ({**MACHINE, **process("5000000", 1 << 30)}, 0),
        ({**MACHINE, **process("unlimited", 100)}, 8000 * 1024),
        ({**MACHINE, "proc/self/cgroup": "3:memory:/a\n"}, 8000 * 1024),
        ({**MACHINE, "proc/self/cgroup": HYBRID, **first_group("a", 3000000, 1000, 10)}, 3000000 - 1000 + 10),
        ({**MACHINE, "proc/self/cgroup": HYBRID, **first_group("", 2000000, 0)}, 2000000),
        ({**MACHINE, "proc/self/cgroup": HYBRID, **first_group("a", 2**63 - 4096, 5000)}, 8000 * 1024),
    ],
)
def test_the_least_that_anybody_allows_counts(files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory_bytes(tmp_path) == expected


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="the system does not say")
def test_there_is_some_here() -> None:
    assert (free_memory_bytes() or 0) > 0
