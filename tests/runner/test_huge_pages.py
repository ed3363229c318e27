"""What is asked for in huge pages, what becomes of it, and that nobody notices where there are none."""

from __future__ import annotations

import errno
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from batchserve.runner import huge_pages
from batchserve.runner.huge_pages import HugePages, Mapping, aligned, collapse, dense, parse_smaps

PAGE = 2 << 20
BASE = 0x7F0000000000
NEEDS_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc/self/smaps")


def smaps(
    name: str, kib: int = 8192, *, start: int = BASE, rss: int | None = None, permissions: str = "rw-p", huge: int = 0
) -> str:
    """A mapping as the kernel shows it; Rss is all of it where none is given."""
    return (
        f"{start:x}-{start + (kib << 10):x} {permissions} 00000000 00:00 0 {name}\n"
        f"Size:           {kib:8} kB\nKernelPageSize:        4 kB\nRss:            {kib if rss is None else rss:8} kB\n"
        f"Pss:                   4 kB\nAnonHugePages:  {huge:8} kB\nTHPeligible:    1\nVmFlags: rd wr mr mw me ac sd\n"
    )


def test_smaps_are_read() -> None:
    text = smaps("", 4096, start=0x1000, rss=12, huge=2048) + smaps("/tmp/a file (deleted)", permissions="r-xs")
    assert parse_smaps(text) == [
        Mapping(0x1000, 0x1000 + (4 << 20), "rw-p", "", 12 << 10, 2 << 20),
        Mapping(BASE, BASE + (8 << 20), "r-xs", "/tmp/a file (deleted)", 8 << 20, 0),
    ]
    assert parse_smaps("") == []


@pytest.mark.parametrize(
    ("text", "is_wanted"),
    [
        (smaps(""), True),
        (smaps("[heap]"), True),
        (smaps("[anon: glibc: malloc arena]"), True),
        (smaps("", rss=7500), True),
        (smaps("", rss=7000), False),  # of 8192
        (smaps("[stack]"), False),
        (smaps("[vvar]"), False),
        (smaps("[anon_shmem:x]"), False),
        (smaps("/usr/lib/libc.so.6"), False),
        (smaps("", permissions="r--p"), False),
        (smaps("", permissions="rwxp"), False),
        (smaps("", permissions="rw-s"), False),
        (smaps("", 1024), False),
        (smaps("", 3072, start=BASE + 4096), False),  # has 2 MiB, but none that begin where a page does
    ],
    ids=lambda value: value.split("\n")[0] if isinstance(value, str) else None,
)
def test_dense_private_memory_is_wanted(text: str, is_wanted: bool) -> None:
    assert bool(dense(parse_smaps(text), PAGE)) is is_wanted


def test_only_whole_pages_are_asked_for() -> None:
    mapping = Mapping(BASE + 4096, BASE + 4 * PAGE - 4096, "rw-p", "", 0, 0)
    assert aligned(mapping, PAGE) == range(BASE + PAGE, BASE + 3 * PAGE)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up one: 160 MiB of memory, 128 MiB of it in huge pages already; returns its smaps."""
    (tmp_path / "size").write_text(f"{PAGE}\n")
    path = tmp_path / "smaps"
    path.write_text(smaps("", 163840, huge=131072) + smaps("[stack]", start=BASE << 1))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(huge_pages, "_PAGE_SIZE", tmp_path / "size")
    monkeypatch.setattr(huge_pages, "_SMAPS", path)
    return path


def test_a_refused_chunk_does_not_lose_the_others(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def advise(start: int, num_bytes: int) -> int:
        asked.append((start - BASE, num_bytes >> 20))
        return errno.ENOMEM if len(asked) == 2 else 0

    monkeypatch.setattr(huge_pages, "_advise", advise)
    found = collapse()
    assert asked == [(0, 64), (64 << 20, 64), (128 << 20, 32)]
    assert found == HugePages(160 << 20, 128 << 20, "there are no more free huge pages")
    assert found.has_most
    assert str(found) == "128 of 160 MiB of memory that steps read: there are no more free huge pages"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EAGAIN, errno.EBUSY, errno.EPERM], ids=errno.errorcode.get)
def test_a_kernel_that_refuses_says_why(system: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    system.write_text(smaps(""))
    monkeypatch.setattr(huge_pages, "_advise", lambda start, num_bytes: number)
    found = collapse()
    assert (found.wanted, found.held, found.has_most) == (8 << 20, 0, False)
    assert found.reason
    assert str(found) == f"none: {found.reason}"


def test_all_that_was_moved_needs_no_reason(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system.write_text(smaps("", huge=8192))
    monkeypatch.setattr(huge_pages, "_advise", lambda start, num_bytes: errno.EAGAIN)
    assert str(collapse()) == "8 MiB of memory that steps read"


@pytest.mark.parametrize("missing", ["_PAGE_SIZE", "_SMAPS"])
def test_a_kernel_without_them_says_so(
    system: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    monkeypatch.setattr(huge_pages, missing, tmp_path / "missing")
    found = collapse()
    assert not found.has_most
    assert str(found).startswith("none: not on this system: ")


def test_elsewhere_than_on_linux_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(huge_pages, "ctypes")
    assert collapse() == HugePages(reason="they are for Linux")


@NEEDS_LINUX
def test_contents_stay_what_they_are() -> None:
    size = 64 << 20
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # or the kernel would make it one with its neighbour, which may be sparse
    array = np.frombuffer(memory, np.uint64)
    array[:] = np.random.default_rng(0).integers(1 << 63, size=len(array), dtype=np.uint64)
    kept, address = array.copy(), array.ctypes.data
    found = collapse()
    assert np.array_equal(array, kept)
    held = sum(each.huge for each in huge_pages.read_mappings() if each.start == address)
    print(f"{held >> 20} of 64 MiB; the process: {found}")
    assert held >= size - PAGE or found.reason
