"""Memory in huge pages: steps that read all weights wait less for the processor to look up where they lie.

Where huge pages are for those who ask (`transparent_hugepage=madvise`, what most distributions have), torch's weights
and Python's objects lie in pages of 4 KiB, far more of them than a processor keeps in its TLB. Asking beforehand would
be up to their allocators; MADV_COLLAPSE (Linux 6.1) moves what is there already, whoever allocated it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

MADV_COLLAPSE = 25
LEAST_RESIDENT = 0.9  # filling up a mapping that is mostly untouched, as a thread's stack is, would take memory
CHUNK_BYTES = 64 << 20  # of one call: the kernel gives a call up where it finds no free huge page
REASONS = {
    errno.EINVAL: "the kernel does not move it (Linux 6.1 is the first that can)",
    errno.ENOMEM: "there are no more free huge pages",
    errno.EAGAIN: "some of it was in use by the kernel",
    errno.EBUSY: "the memory limit of this control group is reached",
}
_SMAPS = Path("/proc/self/smaps")
_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of addresses as the kernel describes it; `resident` and `huge` are bytes of it."""

    start: int
    end: int
    permissions: str
    name: str
    resident: int
    huge: int


@dataclass(frozen=True, slots=True)
class HugePages:
    """What collapse() came to: bytes that could lie in huge pages, those that do, and why not the others."""

    wanted: int = 0
    held: int = 0
    reason: str = ""

    @property
    def has_most(self) -> bool:
        return self.held > self.wanted // 2

    def __str__(self) -> str:
        part = "" if self.held == self.wanted else f"{self.held >> 20} of "
        shown = f"{part}{self.wanted >> 20} MiB of memory that steps read" if self.held else "none"
        return f"{shown}: {self.reason}" if self.reason else shown


def collapse() -> HugePages:
    """Move this process's memory into huge pages as far as it is dense and the kernel can; its contents stay.

    Other threads may go on meanwhile. Takes about two seconds a GiB, and next to nothing for what lies in them already.
    Where the system has no huge pages, or refuses them, that is the reason given: nothing is raised.
    """
    if sys.platform != "linux":
        return HugePages(reason="they are for Linux")
    try:
        page = int(_PAGE_SIZE.read_text())
        mappings = dense(read_mappings(), page)
        errors = _advise_all(mappings, page)
        # The kernel goes on behind some of what it refuses, so what was moved is seen only afterwards.
        after = dense(read_mappings(), page)
    except OSError as error:
        return HugePages(reason=f"not on this system: {error}")
    wanted = sum(len(aligned(mapping, page)) for mapping in mappings)
    held = min(wanted, sum(mapping.huge for mapping in after))
    if held == wanted:
        return HugePages(wanted, held)
    return HugePages(wanted, held, "; ".join(REASONS.get(number, os.strerror(number)) for number in errors))


def read_mappings() -> list[Mapping]:
    """This process's; raises OSError where there is no such list."""
    return parse_smaps(_SMAPS.read_text(errors="replace"))  # files may have any name


def parse_smaps(text: str) -> list[Mapping]:
    """The mappings of /proc/PID/smaps."""
    return [_parse_mapping(block) for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text) if block]


def dense(mappings: list[Mapping], page: int) -> list[Mapping]:
    """Those of private memory, no file's and nobody's stack, that are in use and have room for a page of such size."""
    return [
        mapping
        for mapping in mappings
        if mapping.permissions == "rw-p"
        and (mapping.name in ("", "[heap]") or mapping.name.startswith("[anon:"))
        and mapping.resident >= LEAST_RESIDENT * (mapping.end - mapping.start)
        and aligned(mapping, page)
    ]


def aligned(mapping: Mapping, page: int) -> range:
    """The addresses of the whole pages in it."""
    return range(-(-mapping.start // page) * page, mapping.end // page * page)


def _parse_mapping(block: str) -> Mapping:
    head, fields = block.split("\n", 1)
    addresses, permissions, _, _, _, *name = head.split(maxsplit=5)
    start, end = (int(address, 16) for address in addresses.split("-"))
    resident, huge = (
        int(found[1]) << 10 if (found := re.search(rf"^{field}: +(\d+) kB", fields, re.MULTILINE)) else 0
        for field in ("Rss", "AnonHugePages")
    )
    return Mapping(start, end, permissions, "".join(name), resident, huge)


def _advise_all(mappings: list[Mapping], page: int) -> list[int]:
    """The numbers of the errors there were, each once."""
    errors: dict[int, None] = {}
    for mapping in mappings:
        addresses = aligned(mapping, page)
        for start in addresses[:: max(CHUNK_BYTES, page)]:
            if number := _advise(start, min(max(CHUNK_BYTES, page), addresses.stop - start)):
                errors[number] = None
    return list(errors)


def _advise(start: int, num_bytes: int) -> int:
    """0, or the number of the error."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), MADV_COLLAPSE)
    return ctypes.get_errno() if failed else 0
