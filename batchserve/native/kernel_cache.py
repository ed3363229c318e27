"""Where Numba keeps compiled kernels between two starts; native.py says in what form.

Nothing heavy is imported here: it has to be settled before the first module with kernels is imported.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)
PACKAGE = Path(__file__).parent.parent


def provide_cache_folder() -> None:
    """Where no folder is writable that Numba would use, give it one that ends with the process.

    So in containers that are read-only and have no home: a child process can then compile for its parent all the same.
    """
    given = os.environ.get("NUMBA_CACHE_DIR")
    if any(map(_is_writable, (*([Path(given)] if given else []), PACKAGE / "__pycache__", _user_folder()))):
        return
    try:
        folder = tempfile.mkdtemp(prefix="batchserve-kernels-")
    except OSError:
        return  # each process compiles for itself, and says so
    logger.warning("compiled kernels are not kept for the next start: no folder is writable; NUMBA_CACHE_DIR names one")
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
