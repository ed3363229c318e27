"""A process's tree, and its memory, from /proc. Only the standard library: every engine's environment runs it."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")


def tree(pid: int) -> list[int]:
    """The process and all that it has started, directly or not; those that are gone are left out."""
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        for listed in PROC.glob(f"{one}/task/*/children"):
            try:
                waiting += map(int, listed.read_text().split())
            except OSError:  # it ended meanwhile
                continue
    return found


def pss_bytes(pid: int) -> int | None:
    """Resident memory of a process's tree, shared pages split between those who share them; None without Linux."""
    total = None
    for one in tree(pid):
        try:
            lines = (PROC / str(one) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        (kilobytes,) = [int(line.split()[1]) for line in lines if line.startswith("Pss:")] or [0]
        total = (total or 0) + kilobytes * 1024
    return total
