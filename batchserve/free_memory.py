"""Reads how much host memory is available, within the machine and the control groups that a container sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from mmap import PAGESIZE as PAGE
from pathlib import Path

from batchserve.config import MiB
from batchserve.errors import ConfigError, is_out_of_memory
from batchserve.native.control_groups import group_folders

LOW_BYTES = 256 << 20  # with less, a library's failure without a reason is taken for lack of memory
LIBRARY_BYTES = 640 << 20  # memory of a start besides weights and K/V, including kernels that are compiled
FAILURES = ("could not create", "could not execute", "error return without exception")


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Returns the memory available without swapping; None if the system does not say. root: contains proc and sys."""
    limits = [_of_machine(root), _of_process(root), *(_of_group(folder) for folder in group_folders("memory", root))]
    return min((limit for limit in limits if limit is not None), default=None)


@contextmanager
def name_memory_errors(what: str) -> Iterator[None]:
    """Turns errors for lack of memory into a ConfigError with the purpose, the bytes asked for and what is free."""
    try:
        yield
    except Exception as error:
        if (message := describe_out_of_memory(what, error)) is None:
            raise
        raise ConfigError(message) from error


def describe_out_of_memory(what: str, error: BaseException) -> str | None:
    """Returns one line if the error is for lack of memory, else None."""
    free = free_memory_bytes()
    is_low = free is not None and free < LOW_BYTES
    said = str(error)
    if not is_out_of_memory(error) and not (is_low and any(failure in said for failure in FAILURES)):
        return None
    asked = re.search(r"allocate (\d+) bytes", said)
    of = f"{int(asked[1]) / MiB:.1f} MiB more were asked for" if asked else (said.splitlines() or ["none is left"])[0]
    left = "" if free is None else f"; {free / MiB:.0f} MiB can still be had (machine, control group and ulimit -v)"
    return f"no memory {what}: {of}{left}"


def check_weights_fit(model: str, num_bytes: int) -> None:
    """Raises ConfigError if a model's weights, in the served dtype, take more memory than is available.

    Under `ulimit -v`, libraries and kernels need address space, too. Without it, they end the process silently.
    """
    free, space = free_memory_bytes(), _of_process(Path("/"))
    needed = num_bytes if space is None or space > num_bytes + LIBRARY_BYTES else num_bytes + LIBRARY_BYTES
    if free is not None and needed > free:
        libraries = "" if needed == num_bytes else f", and libraries {LIBRARY_BYTES / MiB:.0f} MiB of address space"
        raise ConfigError(
            f"model = {model!r}: no memory to serve it: its weights take {num_bytes / MiB:.0f} MiB{libraries}; "
            f"{free / MiB:.0f} MiB can still be had (machine, control group and ulimit -v)"
        )


def _of_machine(root: Path) -> int | None:
    kilobytes = _numbers(root / "proc/meminfo").get("MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _of_process(root: Path) -> int | None:
    """Returns what `ulimit -v` leaves, or None if it is not set."""
    try:
        limits = (root / "proc/self/limits").read_text().splitlines()
        words = next(line.split() for line in limits if line.startswith("Max address space"))
        return max(0, int(words[3]) - int((root / "proc/self/statm").read_text().split()[0]) * PAGE)
    except (OSError, ValueError, StopIteration, IndexError):
        return None  # "unlimited" is not a number, either


def _of_group(folder: Path) -> int | None:
    """Returns what the group's limit leaves, or None without one. Cached files count as free: they can be dropped."""
    for limit, usage, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1: 2^63 without a limit
    ):
        with suppress(OSError, ValueError):
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            return max(0, most - used + _numbers(folder / "memory.stat").get(cached, 0))
    return None


def _numbers(path: Path) -> dict[str, int]:
    """Returns the first number after the name in each line, by name."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
