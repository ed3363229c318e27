"""Files that a command is given, or told to write."""

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
    """The path of an option, its `~` expanded; an empty one would be the current folder.

    Raises argparse.ArgumentTypeError.
    """
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(os.path.expanduser(text))


def bundled_sets() -> dict[str, Path]:
    """The recorded answers that come with the package, by name."""
    folder = Path(str(resources.files("batchserve"))) / "data" / "replay"
    return {path.stem: path for path in sorted(folder.glob("*.jsonl"))}


def parse_recorded(text: str) -> Path:
    """A file of recorded requests, or a bundled one by its name. Raises argparse.ArgumentTypeError."""
    path = parse_path(text)
    return path if path.exists() else bundled_sets().get(text.removesuffix(".jsonl"), path)


def check_readable(path: Path) -> None:
    """For what is read only after something slow. A pipe is not opened. Raises ConfigError."""
    try:
        path.stat()
        if not path.is_fifo():
            path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def check_writable(path: Path, option: str) -> None:
    """For what is written only after something slow. Nothing is left in the folder. Raises ConfigError."""
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
    """What cannot be written is a ConfigError that names the file: the system names none where a disk is full."""
    try:
        yield path
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
