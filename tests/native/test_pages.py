from __future__ import annotations

import mmap
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from batchserve.native import pages
from batchserve.native.pages import HeapTrimmer
from benchmarks.soak import resident_bytes

MB = 1 << 20


@pytest.mark.parametrize("shape", [0, 7, (3, 0), (5, 4), (1 << 10, 1 << 7)])
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, "i2"])
def test_they_are_zeros_that_can_be_written(shape: int | tuple[int, ...], dtype: object) -> None:
    array = pages.zeros(shape, dtype)
    expected = np.zeros(shape, dtype)
    assert array.shape == expected.shape
    assert array.dtype == expected.dtype
    assert not array.any()
    array[...] = 3
    assert (array == 3).all()


@pytest.mark.faults
def test_pages_are_memory_only_while_they_are_used() -> None:
    """In a process of its own: other tests' memory may go meanwhile."""
    code = "from tests.native.test_pages import check_that_pages_go; check_that_pages_go()"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)


def check_that_pages_go() -> None:
    """Arrays of all sizes, of which every other one goes: on the heap the holes would stay."""
    before = resident_bytes("self")
    arrays = [pages.zeros((1 + i % 50) * MB // 25, np.uint8) for i in range(200)]
    assert resident_bytes("self") - before < 10 * MB  # nothing was written
    for array in arrays:
        array[:] = 1
    used = sum(array.nbytes for array in arrays)
    assert resident_bytes("self") - before > 0.9 * used
    del arrays[::2], array
    assert resident_bytes("self") - before < 0.6 * used


@pytest.mark.faults
def test_a_system_without_memory_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="1048576 bytes: Cannot allocate memory"):
        pages.zeros(MB, np.uint8)


@pytest.mark.faults
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc trims its heap")
def test_holes_in_the_heap_are_given_back_once_a_minute() -> None:
    now_s = 0.0
    trimmer = HeapTrimmer(lambda: now_s)
    arrays = [np.ones(60_000, np.uint8) for _ in range(2000)]
    full = resident_bytes("self")
    del arrays[::2]  # what is left keeps the heap from shrinking by itself
    now_s = 59.0
    trimmer.trim_if_due()
    assert resident_bytes("self") > full - 30 * MB
    now_s = 60.0
    trimmer.trim_if_due()
    assert resident_bytes("self") < full - 30 * MB
    assert all(array.all() for array in arrays)
