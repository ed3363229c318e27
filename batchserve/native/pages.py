"""Arrays in pages of their own, which the system gets back as soon as the array is gone.

Large arrays of all sizes that live from a moment to hours leave holes on the heap between what every step allocates,
and a process grows to a multiple of what it uses. Nor does the heap keep an array's untouched part from being memory.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections.abc import Callable
from typing import Any

import numpy as np

TRIM_S = 60.0
FEWEST_BYTES = 1 << 16  # a smaller array is on the heap: most of its last page would be wasted


def zeros(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """As np.zeros; pages that are not written to take no memory. Raises MemoryError."""
    shape = (shape,) if isinstance(shape, int) else shape
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < FEWEST_BYTES:
        return np.zeros(shape, dtype)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error.strerror}") from error
    return np.frombuffer(pages, dtype).reshape(shape)


class HeapTrimmer:
    """Gives back to the system, once a minute, what is free in the midst of the heap.

    Arrays of all sizes come and go with requests, and the heap keeps the holes: some megabytes an hour. Trimming takes
    two or three milliseconds for a few hundred megabytes. Only glibc can.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._trimmed_s = clock()

    def trim_if_due(self) -> None:
        """To be called between steps."""
        now_s = self._clock()
        if self._trim is not None and now_s - self._trimmed_s >= TRIM_S:
            self._trimmed_s = now_s
            self._trim(0)
