"""How much memory of the host can still be had: by the machine, and by the control groups that a container sets."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can be had without swapping; None where the system does not say. root: where proc and sys are."""
    limits = [_of_machine(root), *(_of_group(folder) for folder in _groups(root))]
    return min((limit for limit in limits if limit is not None), default=None)


def _of_machine(root: Path) -> int | None:
    kilobytes = _numbers(root / "proc/meminfo").get("MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _groups(root: Path) -> list[Path]:
    """The folders of this process's control group and of those that it is in; each has a limit. Of both versions: what
    Linux calls hybrid has memory in the first.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "memory" not in controllers.split(","):
            continue
        top, inside = root / "sys/fs/cgroup" / ("memory" if controllers else ""), path.strip("/")
        own = top / inside if (top / inside).is_dir() else top  # in a namespace the path is of no use
        found += [own, *(folder for folder in own.parents if folder.is_relative_to(top))]
    return found


def _of_group(folder: Path) -> int | None:
    """None: it has no limit. What is kept of files can be given up."""
    for limit, usage, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1: without one, 2^63
    ):
        with suppress(OSError, ValueError):
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            return max(0, most - used + _numbers(folder / "memory.stat").get(cached, 0))
    return None


def _numbers(path: Path) -> dict[str, int]:
    """The first number behind the name of each line."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
