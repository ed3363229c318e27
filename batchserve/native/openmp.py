"""Compiled loops on the threads that torch's own kernels run on, for steps in which torch's kernels run, too.

Those threads are awake between two kernels of a step (threads.py). The pool's (pool.py) would have to be
woken, layer after layer, which takes longer than what they are to do; and both would be too many for the cores.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

NAMES = ("libgomp", "libiomp5", "libomp")  # GNU's, and those that speak its language, too
_LOOP = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(loop: int, job: int, num_threads: int) -> None:
    """Call the compiled loop(job) on so many threads at once, both by address; the loop has to share its work."""
    library = _library() if num_threads > 1 else None
    if library is None:
        _LOOP(loop)(job)
    else:
        library.GOMP_parallel(ctypes.c_void_p(loop), ctypes.c_void_p(job), num_threads, 0)


def given(wanted: int) -> int:
    """How many threads a loop gets that asks for so many, as use_threads has seen to: one without OpenMP."""
    return wanted if wanted > 1 and _library() is not None else 1


def use_threads(wanted: int) -> int:
    """Give the calling thread `wanted` compute threads, or as many as OpenMP starts for it; returns how many.

    oneDNN computes only a part of a product where a loop gets fewer threads than were asked for (OMP_THREAD_LIMIT,
    OMP_DYNAMIC, OMP_MAX_ACTIVE_LEVELS), so torch is never told of more than there are.
    """
    torch.set_num_threads(wanted)
    library = _library()
    if library is None or wanted == 1:
        return wanted
    library.omp_set_dynamic(0)  # else the size changes from loop to loop
    if library.omp_get_max_active_levels() < 1:
        library.omp_set_max_active_levels(1)
    given = _team_size(library, wanted)
    torch.set_num_threads(given)
    return given


def _team_size(library: ctypes.CDLL, wanted: int) -> int:
    """How many threads a loop gets that asks for so many."""
    started: list[None] = []
    loop = _LOOP(lambda job: started.append(None))
    library.GOMP_parallel(loop, None, wanted, 0)
    return len(started)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The OpenMP that torch is linked to, None where it cannot be found: then everything runs on one thread."""
    maps = Path("/proc/self/maps")
    path = _find(maps.read_text(), Path(torch.__file__).parent) if maps.exists() else None
    library = None if path is None else ctypes.CDLL(str(path))
    return library if hasattr(library, "GOMP_parallel") else None


def _find(maps: str, torch_folder: Path) -> Path | None:
    """What a process has mapped: the OpenMP below torch's folder, or else the only one."""
    fields = [line.split(maxsplit=5) for line in maps.splitlines()]
    loaded = {Path(each[5]) for each in fields if len(each) == 6}
    found = sorted(path for path in loaded if path.name.startswith(NAMES) and path.exists())
    torchs = [path for path in found if torch_folder.resolve() in path.parents]
    best = torchs or found
    return best[0] if len(best) == 1 else None  # of several it is anybody's guess
