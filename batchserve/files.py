"""Files that a command is given, or told to write."""

from __future__ import annotations

import argparse
import os
from contextlib import contextmanager
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


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """What cannot be written is a ConfigError that names the file: the system names none where a disk is full."""
    try:
        yield path
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
