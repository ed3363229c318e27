"""Chooses the folder where Numba keeps compiled kernels between starts; jit.py describes the files.

Nothing heavy is imported here: the folder has to be chosen before the first module with kernels is imported.
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
    """If none of the folders that Numba would use is writable, makes a temporary one that is deleted at exit.

    This is for read-only containers without a home directory, so that a child process can compile for its parent.
    """
    given = os.environ.get("NUMBA_CACHE_DIR")
    if any(map(_is_writable, (*([Path(given)] if given else []), PACKAGE / "__pycache__", _user_folder()))):
        return
    try:
        folder = tempfile.mkdtemp(prefix="batchserve-kernels-")
    except OSError:
        return  # each process compiles for itself and warns about it
    logger.warning("compiled kernels are not kept for the next start: no folder is writable; NUMBA_CACHE_DIR names one")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = folder  # for this process and its children
    if "numba" in sys.modules:  # numba has already read the variable
        sys.modules["numba"].config.CACHE_DIR = folder


def _user_folder() -> Path:
    """Returns the folder that Numba uses if it cannot write next to the sources."""
    usual = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or usual), "numba")


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
