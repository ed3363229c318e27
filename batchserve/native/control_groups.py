"""Finds the control groups of this process, in which a container or a service has its limits."""

from __future__ import annotations

from pathlib import Path


def group_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """Returns the folders of this process's control group and of its ancestors, as each may have a limit.

    controller: "memory" or "cpu". Covers both versions: in what Linux calls hybrid, these are in the first. root:
    contains proc and sys.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and controller not in controllers.split(","):
            continue
        top, inside = root / "sys/fs/cgroup" / (controller if controllers else ""), path.strip("/")
        own = top / inside if (top / inside).is_dir() else top  # in a namespace, the path may not exist
        found += [own, *(folder for folder in own.parents if folder.is_relative_to(top))]
    return found
