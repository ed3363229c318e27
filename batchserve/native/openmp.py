"""Runs compiled loops on the threads of torch's own kernels, for steps in which torch's kernels run as well.

Those threads are awake between two kernels of a step (threads.py). The threads of the pool (pool.py) would have to be
woken for every layer, which takes longer than their work, and both sets together would be too many for the cores.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

NAMES = ("libgomp", "libiomp5", "libomp")  # GNU's, and two that also provide GNU's interface
_LOOP = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(loop: int, job: int, num_threads: int) -> None:
    """Calls the compiled loop(job), both addresses, on num_threads threads at once; the loop has to divide its work."""
    library = _library() if num_threads > 1 else None
    if library is None:
        _LOOP(loop)(job)
    else:
        library.GOMP_parallel(ctypes.c_void_p(loop), ctypes.c_void_p(job), num_threads, 0)


def given(wanted: int) -> int:
    """Returns the number of threads that a loop gets: `wanted`, as use_threads has ensured, or one without OpenMP."""
    return wanted if wanted > 1 and _library() is not None else 1


def use_threads(wanted: int) -> int:
    """Gives the calling thread `wanted` compute threads, or as many as OpenMP starts for it; returns the number.

    oneDNN computes only part of a product if a loop gets fewer threads than it asked for (OMP_THREAD_LIMIT,
    OMP_DYNAMIC, OMP_MAX_ACTIVE_LEVELS), so torch is never told to use more threads than there are.
    """
    torch.set_num_threads(wanted)
    library = _library()
    if library is None or wanted == 1:
        return wanted
    library.omp_set_dynamic(0)  # otherwise the number of threads varies between loops
    if library.omp_get_max_active_levels() < 1:
        library.omp_set_max_active_levels(1)
    given = _team_size(library, wanted)
    torch.set_num_threads(given)
    return given


def _team_size(library: ctypes.CDLL, wanted: int) -> int:
    """Returns the number of threads that a loop gets if it asks for `wanted`."""
    started: list[None] = []
    loop = _LOOP(lambda job: started.append(None))
    library.GOMP_parallel(loop, None, wanted, 0)
    return len(started)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Returns the OpenMP library that torch is linked to, or None if not found. Everything then runs on one thread."""
    maps = Path("/proc/self/maps")
    path = _find(maps.read_text(), Path(torch.__file__).parent) if maps.exists() else None
    library = None if path is None else ctypes.CDLL(str(path))
    return library if hasattr(library, "GOMP_parallel") else None


def _find(maps: str, torch_folder: Path) -> Path | None:
    """Returns the OpenMP library that a process has mapped: the one in torch's folder, or else the only one."""
    fields = [line.split(maxsplit=5) for line in maps.splitlines()]
    loaded = {Path(each[5]) for each in fields if len(each) == 6}
    found = sorted(path for path in loaded if path.name.startswith(NAMES) and path.exists())
    torchs = [path for path in found if torch_folder.resolve() in path.parents]
    best = torchs or found
    return best[0] if len(best) == 1 else None  # several: there is no way to tell
