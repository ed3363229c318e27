"""Compiled kernels are kept where that can be."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numba
import pytest

from batchserve.native.kernel_cache import provide_cache_folder

READ_ONLY = """
import sys, tempfile
right = tempfile.TemporaryFile
def read_only(*args, dir=None, **options):
    if dir is not None and not str(dir).startswith(sys.argv[1]):
        raise OSError(30, "Read-only file system", dir)
    return right(*args, dir=dir, **options)
tempfile.TemporaryFile, tempfile.tempdir = read_only, sys.argv[1]
from batchserve import LLM
import numba
print(numba.config.CACHE_DIR)
"""


def never_compiled() -> None:
    """For Numba to look for a place to cache it in."""


def test_numba_is_given_a_folder_where_none_is_writable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A read-only installation without a home: Numba writes a file wherever it might cache, and fails."""
    right = tempfile.TemporaryFile

    def read_only(*args: Any, dir: str | None = None, **options: Any) -> Any:
        if dir is not None and not str(dir).startswith(str(tmp_path)):
            raise OSError(30, "Read-only file system", dir)
        return right(*args, dir=dir, **options)

    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    provide_cache_folder()
    assert numba.config.CACHE_DIR == "", "nothing is changed where caching works"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(never_compiled)
    provide_cache_folder()
    assert Path(numba.config.CACHE_DIR).parent == tmp_path
    assert os.environ["NUMBA_CACHE_DIR"] == numba.config.CACHE_DIR
    numba.njit(cache=True)(never_compiled)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: read_only(dir="/"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    provide_cache_folder()
    assert numba.config.CACHE_DIR == "", "there is none to give"


def test_the_engine_is_imported_where_nothing_can_be_cached(tmp_path: Path) -> None:
    """Every module with kernels asks Numba for a folder when it is imported, so it has to be there before."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    command = [sys.executable, "-c", READ_ONLY, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == tmp_path
