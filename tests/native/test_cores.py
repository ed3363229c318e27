"""How many threads are used by default: by cores, by the environment, and by quotas of CPU time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchserve.native import cores
from batchserve.native.cores import Neighbours, cpu_quota, default_threads, physical_cores


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight logical cores, of which two each are one physical core."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "usable_cores", lambda: list(range(8)))
    for core in range(8):
        file = tmp_path / cores.SIBLINGS.format(core)
        file.parent.mkdir(parents=True)
        file.write_text(f"{core % 4},{core % 4 + 4}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def test_each_physical_core_has_a_thread(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert physical_cores(root) == default_threads(root) == 4
    monkeypatch.setattr(cores, "usable_cores", lambda: [1, 5, 6])
    assert default_threads(root) == 2


def test_a_system_that_says_nothing_of_cores_has_a_thread_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "usable_cores", lambda: [0, 1, 2])
    assert default_threads(tmp_path) == 3


@pytest.mark.parametrize(("asked", "expected"), [("3", 3), ("2,1", 2), ("0", 4), ("many", 4), ("", 4)])
def test_the_environment_may_say_how_many(
    root: Path, monkeypatch: pytest.MonkeyPatch, asked: str, expected: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert default_threads(root) == expected


@pytest.mark.parametrize(
    ("line", "folder", "files", "quota"),
    [
        ("0::/a/b", "a/b", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b", "a", {"cpu.max": "50000 100000\n"}, 0.5),  # an ancestor's
        ("0::/a/b", "a/b", {"cpu.max": "max 100000\n"}, None),
        ("0::/elsewhere", "", {"cpu.max": "200000 100000"}, 2.0),  # in a namespace
        ("4:cpu,cpuacct:/a", "cpu/a", {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"}, 1.0),
        ("4:cpu,cpuacct:/a", "cpu/a", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/a", "a", {"cpu.max": "100000 100000"}, None),
    ],
)
def test_a_quota_limits_the_threads(
    root: Path, line: str, folder: str, files: dict[str, str], quota: float | None
) -> None:
    (root / "proc/self/cgroup").write_text(line)
    where = root / "sys/fs/cgroup" / folder
    where.mkdir(parents=True, exist_ok=True)
    if folder == "a":
        (where / "b").mkdir()
    for name, content in files.items():
        (where / name).write_text(content)
    assert cpu_quota(root) == quota
    assert default_threads(root) == {None: 4, 0.5: 1, 1.0: 1, 1.5: 2, 2.0: 2}[quota]


def test_what_others_take_is_counted_without_this_process_and_idle_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, clock = os.sysconf("SC_CLK_TCK"), {"perf_counter": 10.0, "process_time": 1.0}
    for name in clock:
        monkeypatch.setattr(cores.time, name, lambda name=name: clock[name])
    (tmp_path / "proc").mkdir()
    stat = tmp_path / "proc/stat"
    stat.write_text("cpu  100 0 50 900 20 0 0 5 0 0\ncpu0 1 2 3\n")
    neighbours = Neighbours(tmp_path)
    # In two seconds: three of user and system time, half of one stolen; of these one is this process's.
    stat.write_text(f"cpu  {100 + 2 * ticks} 0 {50 + ticks} {900 + ticks} 90 0 0 {5 + ticks // 2} 0 0\ncpu0 1 2 3\n")
    clock.update(perf_counter=12.0, process_time=2.0)
    assert neighbours.cores() == pytest.approx(1.25)
    assert Neighbours(tmp_path / "none").cores() == 0.0
