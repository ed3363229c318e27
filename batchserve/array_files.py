"""Files of large arrays that this program writes for itself, which can be read into memory or mapped.

A file has a sealed description (JSON), and arrays that begin at whole pages. Each block of the arrays has a checksum,
so that damage is found without a slow digest of everything. A file is written once and never changed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from batchserve.sealed_files import UntrustedFileError, open_own, replacing

MAGIC = b"batchserve array file 1\n"
HEAD = struct.Struct("<QQ32s")  # bytes of the description and of the checksums, and the digest of both
PAGE = 4096
BLOCK = 8 << 20  # bytes of arrays that have a checksum
HUGE_PAGE = 1 << 21


def write_arrays(path: Path, description: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Writes the whole file or nothing. The description must be JSON. Raises OSError."""
    places, end = [], 0
    for array in arrays:
        places.append({"dtype": array.dtype.str, "shape": array.shape, "start": end})
        end += -(-array.nbytes // PAGE) * PAGE
    text = json.dumps({"description": description, "arrays": places, "size": end}).encode()
    blocks = _Blocks()
    with replacing(path) as file:
        start = _data_start(len(text), -(-end // BLOCK))
        file.truncate(start + end)
        file.seek(start)
        for array in arrays:
            data = _bytes_of(np.ascontiguousarray(array).reshape(-1))
            for first in range(0, len(data), BLOCK):
                file.write(data[first : first + BLOCK])
                blocks.add(data[first : first + BLOCK])
            padding = bytes(-len(data) % PAGE)
            file.write(padding)
            blocks.add(padding)
        checksums = blocks.finish()
        file.seek(0)
        digest = hashlib.blake2b(text + checksums, digest_size=32).digest()
        file.write(MAGIC + HEAD.pack(len(text), len(checksums), digest) + text + checksums)
        os.fchmod(file.fileno(), 0o400)
        file.flush()
        os.fsync(file.fileno())  # a crash of the machine must not leave a file of the right size without content


def _bytes_of(array: np.ndarray) -> memoryview[int]:
    flat: Any = array.view(np.uint8)
    return memoryview(flat)


class _Blocks:
    """Checksums of a stream, block by block."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._sum, self._filled = 0, 0

    def add(self, data: bytes | memoryview) -> None:
        while len(data):
            piece = data[: BLOCK - self._filled]
            self._sum = zlib.crc32(piece, self._sum)
            self._filled += len(piece)
            data = data[len(piece) :]
            if self._filled == BLOCK:
                self._close()

    def _close(self) -> None:
        self._found.append(self._sum)
        self._sum, self._filled = 0, 0

    def finish(self) -> bytes:
        if self._filled:
            self._close()
        return np.array(self._found, "<u4").tobytes()


def _data_start(text_bytes: int, num_blocks: int) -> int:
    return -(-(len(MAGIC) + HEAD.size + text_bytes + 4 * num_blocks) // PAGE) * PAGE


class ArrayFile:
    """An open file. Raises FileNotFoundError, and UntrustedFileError if it is damaged or could be another user's."""

    def __init__(self, path: Path) -> None:
        self._file = _opened(path)
        try:
            self._read_head()
        except BaseException:
            self._file.close()
            raise

    def _read_head(self) -> None:
        head = self._file.read(len(MAGIC) + HEAD.size)
        if len(head) != len(MAGIC) + HEAD.size or not head.startswith(MAGIC):
            raise UntrustedFileError("is damaged (its head is missing)")
        text_bytes, sum_bytes, digest = HEAD.unpack(head[len(MAGIC) :])
        size = os.fstat(self._file.fileno()).st_size
        if text_bytes + sum_bytes > size:
            raise UntrustedFileError("is damaged (its head is wrong)")
        content = self._file.read(text_bytes + sum_bytes)
        if hashlib.blake2b(content, digest_size=32).digest() != digest:
            raise UntrustedFileError("is damaged (its digest is wrong)")
        head = json.loads(content[:text_bytes])
        self.description: dict[str, Any] = head["description"]
        self._places, self._size = head["arrays"], int(head["size"])
        self._checksums = np.frombuffer(content[text_bytes:], "<u4")
        self._start = _data_start(text_bytes, len(self._checksums))
        if size < self._start + self._size:
            raise UntrustedFileError(f"is damaged (it has {size} bytes of {self._start + self._size})")

    def close(self) -> None:
        self._file.close()

    def read(self, num_threads: int) -> list[np.ndarray]:
        """Reads all arrays into huge pages if the system has them, and checks them. Raises UntrustedFileError."""
        memory = huge_pages(self._size)
        self._check_blocks(lambda block, start: self._read_block(memory[start : start + BLOCK], start), num_threads)
        memory.flags.writeable = False
        return self._arrays(memory)

    def map(self, num_threads: int) -> list[np.ndarray]:
        """Maps the file, whose memory other processes then share, and checks all arrays. Raises UntrustedFileError."""
        if not self._size:
            return self._arrays(np.zeros(0, np.uint8))
        mapped = mmap.mmap(self._file.fileno(), self._start + self._size, mmap.MAP_SHARED, mmap.PROT_READ)
        memory = np.frombuffer(mapped, np.uint8)[self._start :]
        self._check_blocks(lambda block, start: memory[start : start + BLOCK], num_threads)
        return self._arrays(memory)

    def verify(self) -> None:
        """Checks all arrays without keeping them. Raises UntrustedFileError."""
        piece = np.empty(BLOCK, np.uint8)
        self._check_blocks(
            lambda block, start: self._read_block(piece[: min(BLOCK, self._size - start)], start), num_threads=1
        )

    def _read_block(self, piece: np.ndarray, start: int) -> np.ndarray:
        done = 0
        while done < len(piece):
            count = os.preadv(self._file.fileno(), [_bytes_of(piece)[done:]], self._start + start + done)
            if count <= 0:
                raise UntrustedFileError("is damaged (it ends too early)")
            done += count
        return piece

    def _check_blocks(self, content: Callable[[int, int], np.ndarray], num_threads: int) -> None:
        def check(block: int) -> None:
            if zlib.crc32(_bytes_of(content(block, block * BLOCK))) != self._checksums[block]:
                raise UntrustedFileError(f"is damaged (the checksum of block {block} is wrong)")

        with ThreadPoolExecutor(num_threads) as threads:
            try:
                for _ in threads.map(check, range(len(self._checksums))):
                    pass
            except OSError as error:
                raise UntrustedFileError(f"cannot be read ({error})") from error

    def _arrays(self, memory: np.ndarray) -> list[np.ndarray]:
        found = []
        for place in self._places:
            dtype, shape, start = np.dtype(place["dtype"]), tuple(place["shape"]), int(place["start"])
            size = int(np.prod(shape)) * dtype.itemsize
            found.append(memory[start : start + size].view(dtype).reshape(shape))
        return found


def _opened(path: Path) -> BinaryIO:
    try:
        return open_own(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UntrustedFileError(f"cannot be read ({error.strerror})") from error


def huge_pages(size: int) -> np.ndarray:
    """Returns uint8 [size] in huge pages if the system has them: a step reads all weights and looks up each page.

    Raises MemoryError.
    """
    try:
        pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of weights: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + size]
