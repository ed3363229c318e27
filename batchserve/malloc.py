"""The memory policy of the CPU path: what one step frees, the next one takes again.

By default glibc gives large blocks back to the system when they are freed, and takes them anew in the next step; every
page of them then costs a fault, which on a virtual machine takes as long as a thousand multiplications.
"""

from __future__ import annotations

import ctypes
import os

# Names and numbers of mallopt(3). Blocks from the first size on still come from the system and go back to it.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT_BLOCK, MOST_KEPT = 32 << 20, 256 << 20  # bytes; 32 MiB is the most that glibc allows
CHOSEN_BY_USER = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let this process keep up to MOST_KEPT bytes of freed memory; False where malloc is not glibc's or the user has
    chosen a policy or another allocator.
    """
    if any(name in os.environ for name in CHOSEN_BY_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no such function: musl, macOS; TypeError: Windows
        return False
    return all([mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK), mallopt(M_TRIM_THRESHOLD, MOST_KEPT)])
