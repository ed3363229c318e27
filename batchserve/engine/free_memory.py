"""How much memory of the host can still be had: by the machine, and by the control groups that a container sets."""

from __future__ import annotations

from pathlib import Path


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can be had without swapping; None where the system does not say. root: where proc and sys are."""
    limits = [_of_machine(root), *(_of_group(folder) for folder in _groups(root))]
    return min((limit for limit in limits if limit is not None), default=None)


def _of_machine(root: Path) -> int | None:
    kilobytes = _numbers(root / "proc/meminfo").get("MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _groups(root: Path) -> list[Path]:
    """The folders of this process's control group (version 2) and of those that it is in; each has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    top = root / "sys/fs/cgroup"
    inside = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), None)
    if inside is None:
        return []
    own = top / inside if inside and (top / inside).is_dir() else top  # in a namespace the path is of no use
    return [own, *(folder for folder in own.parents if folder.is_relative_to(top))]


def _of_group(folder: Path) -> int | None:
    """None: it has no limit. What is kept of files can be given up."""
    try:
        most = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    if not most.isdigit():
        return None
    return max(0, int(most) - used + _numbers(folder / "memory.stat").get("inactive_file", 0))


def _numbers(path: Path) -> dict[str, int]:
    """The first number behind the name of each line."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
