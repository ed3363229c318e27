"""Where Numba keeps compiled kernels between two starts.

Nothing heavy is imported here: it has to be settled before the first module with kernels is imported.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from batchserve.errors import ConfigError

PACKAGE = Path(__file__).parent


def provide_cache_folder() -> None:
    """Numba refuses to load where no folder is writable that it could cache in: give it one that ends with the process.

    So in containers that are read-only and have no home. Raises ConfigError.
    """
    if os.environ.get("NUMBA_CACHE_DIR") or any(map(_is_writable, (PACKAGE / "__pycache__", _user_folder()))):
        return
    try:
        folder = tempfile.mkdtemp(prefix="batchserve-kernels-")
    except OSError as error:
        raise ConfigError(f"no folder is writable that compiled kernels could be kept in: {error}") from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = folder  # here, and in child processes
    if "numba" in sys.modules:  # it has read that already
        sys.modules["numba"].config.CACHE_DIR = folder


def _user_folder() -> Path:
    """Where Numba keeps what it cannot keep beside the sources."""
    usual = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or usual), "numba")


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def forget_stale_kernels(package: Path = PACKAGE) -> None:
    """Remove from Numba's cache beside the sources what was compiled before any of these changed, and what is damaged.

    Numba looks at the file that a kernel is in, not at those whose code went into it: after an upgrade, or an edit, it
    would go on with a mixture of both. Where it has to keep kernels elsewhere nothing is removed.
    """
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    stamp = package / "__pycache__" / "kernels.sha256"
    with suppress(OSError):  # a folder that nobody can write to has no kernels either
        _forget_damaged_kernels(package)
        if stamp.exists() and stamp.read_text() == digest.hexdigest():
            return
        for index in package.rglob("*.nbi"):
            index.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest.hexdigest())


def _forget_damaged_kernels(package: Path) -> None:
    """Numba reads what it has kept without looking at it, and does not compile again what it cannot read.

    Found are files without their beginning or end, as a power cut may leave them; not what is wrong within.
    """
    for kept in (*package.rglob("*.nbi"), *package.rglob("*.nbc")):
        with suppress(OSError):  # another start may have removed it, and the others are looked at all the same
            with kept.open("rb") as file:
                first = file.read(1)
                file.seek(max(0, kept.stat().st_size - 1))
                is_whole = first == pickle.PROTO and file.read(1) == pickle.STOP
            if not is_whole:
                kept.unlink()
