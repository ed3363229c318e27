"""`batchserve cache`: lists, verifies and deletes what earlier starts have kept for later ones."""

from __future__ import annotations

import argparse
import hashlib
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchserve.config import MiB, default_cache_dir
from batchserve.option_checks import expanded_path

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAMS, STEP_TIMES = "programs", "step_time"


def add_cache_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command with its actions."""
    parser = commands.add_parser("cache", help="list, verify or delete kept programs and step times")
    parser.add_argument("action", choices=("list", "verify", "clear"))
    parser.add_argument(
        "--cache-dir", default=default_cache_dir(), metavar="PATH", help="as for serve (default: the user's)"
    )
    parser.set_defaults(run=run_cache_command)


def run_cache_command(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a kept program is damaged. Raises ConfigError, OSError."""
    folder = Path(expanded_path("cache_dir", arguments.cache_dir))
    if arguments.action == "clear":
        return _clear(folder)
    is_whole = True
    for path in _programs(folder):
        is_whole = _show(path, is_verifying=arguments.action == "verify") and is_whole
    if arguments.action == "list":
        tables = [*(folder / STEP_TIMES).glob("*.table")]
        print(f"{len(tables)} tables of step times in {folder / STEP_TIMES}")
    return 0 if is_whole else 1


def _programs(folder: Path) -> Iterator[Path]:
    return iter(sorted((folder / PROGRAMS).glob("*.program")))


def _show(path: Path, *, is_verifying: bool) -> bool:
    """Prints one program's line. Returns False if it is damaged."""
    from batchserve.array_files import ArrayFile
    from batchserve.sealed_files import UntrustedFileError

    try:
        status = path.stat()
        with closing(ArrayFile(path)) as file:
            if is_verifying:
                file.verify()
            found = file.description
    except (UntrustedFileError, OSError) as error:
        print(f"{path}: {error}")
        return False
    line = f"{found['model']}: {found['facts']['architecture']} in {found['facts']['dtype']}"
    line += f", {status.st_size / MiB:.0f} MiB, used {_ago(time.time() - status.st_mtime)}"
    if is_verifying:
        line += f": whole{_weights_note(found)}"
    print(f"{line} ({path})")
    return True


def _weights_note(found: dict[str, Any]) -> str:
    """Says whether the model's weights are still those that were packed."""
    for name, digest in found["weights"].items():
        try:
            with open(Path(found["key"]["folder"]) / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return f", but the model's {name} has changed since, so it is not used"
        except OSError as error:
            return f"; the model's {name} cannot be read ({error.strerror})"
    return ", and the model's weights are those that it was made from"


def _clear(folder: Path) -> int:
    num_bytes, num_files = 0, 0
    for path in [*_programs(folder), *(folder / PROGRAMS).glob("*.partial"), *(folder / STEP_TIMES).glob("*.table")]:
        with suppress(FileNotFoundError):
            num_bytes += path.stat().st_size
            path.unlink()  # a program that has opened it keeps it
            num_files += 1
    print(f"deleted {num_files} files of {num_bytes / MiB:.0f} MiB in {folder}")
    return 0


def _ago(seconds: float) -> str:
    for name, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name} ago"
    return "just now"
