"""Stores the mixture drafter's scopes in a file: NumPy's format without pickle, written atomically."""

from __future__ import annotations

import json
import os
import tokenize
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from batchserve.draft.mixture_kernels import initial_weights
from batchserve.draft.text_index import START
from batchserve.errors import ConfigError
from batchserve.request import DraftScope
from batchserve.sealed_files import replacing

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMAT, VERSION = "batchserve-drafts", 1
MAX_HEADER_BYTES = 16 << 20  # room for the names of thousands of scopes
MOST_SEEN = 1 << 40  # no server reaches this, and the sum over all weights does not overflow
# Exceptions that NumPy, zipfile and json raise for contents that they did not write.
UNREADABLE = (
    *(ValueError, LookupError, TypeError, AttributeError, EOFError, RuntimeError, MemoryError, OverflowError),
    *(SyntaxError, zipfile.BadZipFile, tokenize.TokenError),
)


class SavedScope(NamedTuple):
    """The saved state of one scope: its text (int32, oldest token first), its mixing weights (float64), and the number
    of updates of each weight (int64).
    """

    key: DraftScope
    text: np.ndarray
    weights: np.ndarray
    seen: np.ndarray


def write_scopes(path: Path, fingerprint: str, scopes: Sequence[SavedScope]) -> None:
    """Writes the scopes atomically to a file that other users cannot read. If path is a link, its target is replaced.

    Raises OSError.
    """
    keys = [[scope.key.tenant, scope.key.name] for scope in scopes]
    header = {"format": FORMAT, "version": VERSION, "fingerprint": fingerprint, "scopes": keys}
    arrays: dict[str, Any] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
    for i, scope in enumerate(scopes):
        arrays |= {f"text{i}": scope.text, f"weights{i}": scope.weights, f"seen{i}": scope.seen}
    with replacing(Path(os.path.realpath(path))) as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())


def read_scopes(path: Path, fingerprint: str, vocab_size: int, most_bytes: int) -> list[SavedScope]:
    """Reads a file that write_scopes wrote. Raises ConfigError for anything else."""

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"draft_cache = {str(path)!r}: {reason}; remove it to start without")

    try:
        if path.exists() and not path.is_file():  # opening a pipe would block forever
            raise ConfigError(f"draft_cache = {str(path)!r}: must be a file, and is not a file")
        if path.stat().st_size > most_bytes:
            raise refuse(f"it has {path.stat().st_size} bytes, and the drafter may keep {most_bytes}")
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if any(member.compress_type != zipfile.ZIP_STORED for member in arrays.zip.infolist()):
                raise ValueError("compressed, so there is no telling how large it is")
            if arrays.zip.getinfo("header.npy").file_size > MAX_HEADER_BYTES:
                raise ValueError("a header of that size takes many times as much when it is read")
            header = json.loads(arrays["header"].tobytes())
            if header["format"] != FORMAT or header["version"] != VERSION:
                raise refuse(f"format {header['format']!r} version {header['version']!r} is not {FORMAT!r} {VERSION}")
            if header["fingerprint"] != fingerprint:
                raise refuse("it was written with another tokenizer")
            return [_read_scope(arrays, vocab_size, i, *key) for i, key in enumerate(header["scopes"])]
    except OSError as error:
        raise refuse(f"cannot be read ({error})") from error
    except UNREADABLE as error:
        raise refuse("it is damaged or no draft cache") from error


def _read_scope(arrays: Any, vocab_size: int, i: int, tenant: str, name: str) -> SavedScope:
    """Reads scope i. Raises ValueError if it is invalid, and whatever reading its arrays raises."""
    text, seen, weights = arrays[f"text{i}"], arrays[f"seen{i}"], arrays[f"weights{i}"]
    shape = initial_weights().shape
    is_right = (
        isinstance(tenant, str)
        and isinstance(name, str)
        and (text.dtype, seen.dtype, weights.dtype) == (np.int32, np.int64, np.float64)
        and (text.ndim, seen.shape, weights.shape) == (1, shape, shape)
        and START <= text.min(initial=0) <= text.max(initial=0) < vocab_size
        and 0 <= seen.min() <= seen.max() <= MOST_SEEN
        and bool(((weights > 0) & (weights < 1)).all())
    )
    if not is_right:
        raise ValueError(f"scope {i} is not what was written")
    return SavedScope(DraftScope(tenant, name), text, weights, seen)
