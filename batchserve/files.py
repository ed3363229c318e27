"""Paths of the files that a command reads or writes, and checks of them."""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from batchserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


def parse_path(text: str) -> Path:
    """Returns the path of an option with `~` expanded. An empty one is refused: it would be the current folder.

    Raises argparse.ArgumentTypeError.
    """
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(os.path.expanduser(text))


def bundled_sets() -> dict[str, Path]:
    """Returns the files of recorded answers that come with the package, by name."""
    folder = Path(str(resources.files("batchserve"))) / "data" / "replay"
    return {path.stem: path for path in sorted(folder.glob("*.jsonl"))}


def parse_recorded(text: str) -> Path:
    """Returns a file of recorded requests, or a bundled one by its name. Raises argparse.ArgumentTypeError."""
    path = parse_path(text)
    return path if path.exists() else bundled_sets().get(text.removesuffix(".jsonl"), path)


def check_readable(path: Path) -> None:
    """Checks that a file can be read, before slow work that precedes it. A pipe is not opened. Raises ConfigError."""
    try:
        path.stat()
        if not path.is_fifo():
            path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def check_writable(path: Path, option: str) -> None:
    """Checks that a file can be written, before slow work that precedes it. Leaves no file. Raises ConfigError."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{option} = {str(path)!r}: must be a file in a folder that exists")
    try:
        if path.exists():
            if not os.access(path, os.W_OK):
                raise PermissionError(0, "no permission")
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"{option} = {str(path)!r}: cannot be written: {error.strerror}") from error


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Turns an OSError into a ConfigError that names the file. The system does not name it if a disk is full."""
    try:
        yield path
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
