"""Allocates arrays in memory pages of their own, which return to the system as soon as the array is freed.

On the heap, large arrays of all sizes and lifetimes would leave holes between the allocations of each step, and the
process would grow to a multiple of what it uses. An array's untouched part could take up memory there, too.
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
MIN_BYTES = 1 << 16  # smaller arrays go on the heap: most of their last page would be wasted


def zeros(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """Like np.zeros, but pages that are never written take no memory. Raises MemoryError."""
    shape = (shape,) if isinstance(shape, int) else shape
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < MIN_BYTES:
        return np.zeros(shape, dtype)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error.strerror}") from error
    return np.frombuffer(pages, dtype).reshape(shape)


class HeapTrimmer:
    """Returns free memory inside the heap to the system, once a minute.

    Arrays of all sizes come and go with requests and leave holes on the heap: some megabytes an hour. Trimming takes
    two or three milliseconds for a few hundred megabytes. Only glibc supports it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._trimmed_s = clock()

    def trim_if_due(self) -> None:
        """Trims the heap if a minute has passed. Call it between steps."""
        now_s = self._clock()
        if self._trim is not None and now_s - self._trimmed_s >= TRIM_S:
            self._trimmed_s = now_s
            self._trim(0)
