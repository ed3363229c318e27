"""Compiled loops on the threads that torch's own kernels run on.

Those threads are awake between two kernels of a step (batchserve/threads.py). Any others would have to be woken, layer
after layer, which takes longer than what they are to do; and beside torch's they would be too many for the cores.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from batchserve.addresses import ONE_THREAD, Team

NAMES = ("libgomp", "libiomp5", "libomp")  # GNU's, and those that speak its language, too
_LOOP = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(loop: int, job: int, num_threads: int) -> None:
    """Call the compiled loop(job) on so many threads at once, both by address; the loop has to share its work."""
    library = _library() if num_threads > 1 else None
    if library is None:
        _LOOP(loop)(job)
    else:
        library.GOMP_parallel(ctypes.c_void_p(loop), ctypes.c_void_p(job), num_threads, 0)


def team(size: int) -> Team:
    """So many threads for compiled code that starts them itself."""
    library = _library() if size > 1 else None
    start = None if library is None else ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    return ONE_THREAD if start is None else Team(start, size)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The OpenMP that torch is linked to, None where it cannot be found: then everything runs on one thread."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    loaded = {Path(line.split()[-1]) for line in maps.read_text().splitlines() if line.count(" ") > 4}
    found = sorted(path for path in loaded if path.name.startswith(NAMES))
    torchs = [path for path in found if Path(torch.__file__).parent in path.parents]
    if len(torchs or found) != 1:  # of several it is anybody's guess
        return None
    library = ctypes.CDLL(str((torchs or found)[0]))
    return library if hasattr(library, "GOMP_parallel") else None
