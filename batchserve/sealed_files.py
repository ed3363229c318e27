"""Files that this program writes for itself. Each begins with a digest; files of other users are not trusted."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

MAGIC = b"batchserve sealed file 1\n"
DIGEST_SIZE = 32


class UntrustedFileError(Exception):
    """A file is not what write_sealed wrote. The message says why, in words that can follow the file's name."""


def read_sealed(path: Path, label: str) -> bytes | None:
    """Returns the content that write_sealed wrote under this label, or None if there is no file.

    Raises UntrustedFileError if the file is damaged, has another label, or could have been written by another user.
    """
    try:
        with open_own(path) as file:
            begin, content = file.read(len(MAGIC) + DIGEST_SIZE), file.read()
    except FileNotFoundError:
        return None
    except (OSError, MemoryError) as error:
        raise UntrustedFileError(f"cannot be read ({getattr(error, 'strerror', error)})") from error
    if begin != MAGIC + _digest(label, content):
        raise UntrustedFileError("is damaged (its digest is wrong)")
    return content


def open_own(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError, and UntrustedFileError if another user could have written it."""
    # A symbolic link could lead anywhere, and opening a pipe would wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_owner(os.fstat(descriptor))
        return open(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def write_sealed(path: Path, label: str, content: bytes) -> None:
    """Writes the whole file or nothing. Other processes may write it at the same time. Raises OSError."""
    with replacing(path) as file:
        file.write(MAGIC + _digest(label, content))
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file that replaces `path` at the end, or leaves nothing behind on failure. Raises OSError.

    Other users cannot read it.
    """
    descriptor, partial = tempfile.mkstemp(prefix=f"{path.name[:50]}.", suffix=".partial", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def _check_owner(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedFileError("is not a regular file")
    if status.st_uid != os.geteuid():
        raise UntrustedFileError(f"belongs to another user ({status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFileError(f"can be written by other users (mode {stat.S_IMODE(status.st_mode):o})")


def _digest(label: str, content: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
    digest.update(f"{len(label)} {label}\n".encode())
    digest.update(content)
    return digest.digest()
