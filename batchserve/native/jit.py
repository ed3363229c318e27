"""Compiles functions with Numba and caches them on disk for the next start.

Numba reads its own cache without checking it: a flipped bit ends the process or, worse, changes an answer. It also
ignores changes in other files whose code goes into a function. So this module writes its own cache files. Each has a
digest (sealed_files.py), and its name has a hash of all sources that the function's module imports.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from batchserve.sealed_files import UntrustedFileError, read_sealed, write_sealed

logger = logging.getLogger(__name__)
PACKAGE = Path(__file__).parent.parent
IMPORT = re.compile(
    rf"^[ \t]*(?:from ({PACKAGE.name}[\w.]*) import (\([^)]*\)|.*)|import ({PACKAGE.name}[\w.]+))", re.MULTILINE
)
VERSIONS = f"numba {numba.__version__}, llvmlite {llvmlite.__version__}"
NOT_KEPT = "compiled kernels are not kept for the next start"
STAMP_LENGTH = 16  # hash characters in a file name

Function = Callable[..., Any]


def njit(**options: Any) -> Callable[[Function], Any]:
    """Like numba.njit, but cache=True uses this module's cache."""
    is_kept = options.pop("cache", False)

    def decorate(function: Function) -> Any:
        dispatcher = numba.njit(**options)(function)
        _keep(dispatcher, function, is_kept)
        return dispatcher

    return decorate


def cfunc(signature: Any, **options: Any) -> Callable[[Function], Any]:
    """Like numba.cfunc, but cache=True uses this module's cache."""
    is_kept = options.pop("cache", False)

    def decorate(function: Function) -> Any:
        compiled = CFunc(function, normalize_signature(signature), locals={}, options=options)
        _keep(compiled, function, is_kept)
        compiled.compile()
        return compiled

    return decorate


def _keep(compiled: Any, function: Function, is_kept: bool) -> None:
    """Lets a dispatcher or callback load and save its compiled code, if that is possible."""
    if not is_kept:
        return
    try:
        compiled._cache = KernelCache(function)
    except (OSError, RuntimeError) as error:  # Numba raises RuntimeError if no folder is writable
        _note_not_kept(str(error) if isinstance(error, OSError) else "no folder is writable")


class KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of one function, with checked files. Neither loading nor saving raises OSError."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        source = sources_digest(Path(function.__code__.co_filename))
        self._cache_file = KernelFiles(Path(self.cache_path), self._impl.filename_base, source)

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _note_not_kept(str(error))


class KernelFiles:
    """The cache files of one function: one per Numba key, that is, per signature, processor and closure."""

    def __init__(self, folder: Path, name: str, source: str) -> None:
        self._folder, self._name, self._source = folder, name, source

    def load(self, key: object) -> Any:
        """Returns what was saved under the key, or None if there is nothing or it cannot be trusted."""
        label = self._label(key)
        path = self._path(label)
        try:
            content = read_sealed(path, label)
        except UntrustedFileError as error:
            _note_untrusted(self._folder, str(error))
            return None
        return None if content is None else pickle.loads(content)

    def save(self, key: object, data: object) -> None:
        """Saves compiled code and deletes what was compiled from other sources. Raises OSError."""
        label = self._label(key)
        path = self._path(label)
        write_sealed(path, label, dumps(data))
        stamp = f"{self._name}.{self._source[:STAMP_LENGTH]}."
        for kept in self._folder.glob(f"{self._name}.*.nbc"):
            if not kept.name.startswith(stamp):
                kept.unlink(missing_ok=True)

    def flush(self) -> None:
        """Deletes all files of the function."""
        for kept in self._folder.glob(f"{self._name}.*.nbc"):
            kept.unlink(missing_ok=True)

    def _label(self, key: object) -> str:
        return f"{VERSIONS}, {self._name}, {self._source}, {key!r}"

    def _path(self, label: str) -> Path:
        of_key = hashlib.sha256(label.encode()).hexdigest()[:STAMP_LENGTH]
        return self._folder / f"{self._name}.{self._source[:STAMP_LENGTH]}.{of_key}.nbc"


def has_all_kernels(source: Path, label: str = "") -> bool:
    """True if all kernels of a module's current sources have been compiled for this processor, by an earlier start.

    label: as for note_all_kernels.
    """
    return _mark_of(source, label).exists()


def note_all_kernels(source: Path, label: str = "") -> None:
    """Notes for later starts that all kernels of a module are kept. label: which, if a module has several sets."""
    mark = _mark_of(source, label)
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        stamp = f"{source.stem}.{sources_digest(source)[:STAMP_LENGTH]}."
        for other in mark.parent.glob(f"{source.stem}.*.complete"):
            if not other.name.startswith(stamp):
                other.unlink(missing_ok=True)


def _mark_of(source: Path, label: str) -> Path:
    target = f"{VERSIONS} {label} {cpu_target.target_context.codegen().magic_tuple()}"
    digest = hashlib.sha256(target.encode()).hexdigest()[:STAMP_LENGTH]
    folder = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else source.parent / "__pycache__"
    return folder / f"{source.stem}.{sources_digest(source)[:STAMP_LENGTH]}.{digest}.complete"


@functools.cache
def sources_digest(source: Path) -> str:
    """Returns a hash of a file and of all modules of this package that it imports, directly or indirectly."""
    found, unread = {source}, [source]
    while unread:
        new = _imports(unread.pop()) - found
        found |= new
        unread += new
    digest = hashlib.sha256()
    for each in sorted(found):
        digest.update(each.name.encode() + b"\0" + _content(each))
    return digest.hexdigest()


@functools.cache
def _imports(source: Path) -> set[Path]:
    """Returns the files of this package that a file imports, except the package's __init__.py: it has no kernels."""
    modules: set[str] = set()
    for parent, names, module in IMPORT.findall(_content(source).decode()):
        modules |= {module or parent, *(f"{parent}.{name}" for name in re.findall(r"\w+", names) if parent)}
    files = (PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py") for module in modules if "." in module)
    return {file for file in files if file.exists()}


@functools.cache
def _content(source: Path) -> bytes:
    return source.read_bytes()


@functools.cache
def _note_untrusted(folder: Path, why: str) -> None:
    """Warns once per folder and reason."""
    logger.warning("compiled kernels in %s: a file %s, so its kernel is compiled again", folder, why)


@functools.cache
def _note_not_kept(why: str) -> None:
    """Warns once per reason."""
    logger.warning("%s: %s", NOT_KEPT, why)
