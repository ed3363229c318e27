"""Keeps native programs on disk with all that serving them takes, so that a later start needs neither torch nor
transformers.

A program is found by what it was made from: the model's files (name, size and time), the options that change it, the
processor's instructions, and the versions of this package and of the libraries that made it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchserve.array_files import ArrayFile, write_arrays
from batchserve.attention.base import LayerShape
from batchserve.config import MiB
from batchserve.native.vector_code import features, kernel_level
from batchserve.program.image_file import complete_tables, parts_of, program_of
from batchserve.program.model import NativeModel
from batchserve.runner.compiled_tokenizer import CompiledTokenizer
from batchserve.runner.served_model import ServedModel
from batchserve.sealed_files import UntrustedFileError

if TYPE_CHECKING:
    from batchserve.config import EngineConfig
    from batchserve.runner.loader import LoadedModel

logger = logging.getLogger(__name__)
FORMAT = 1
ENDING = ".program"
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "numba", "llvmlite", "safetensors", "mistral-common")
OPTIONS = ("dtype", "max_model_len", "trust_remote_code", "tokenizer_end_tokens")
SPARE_BYTES = 1 << 30  # that are left free on the disk
ABANDONED_S = 3600.0  # the age of a file whose writer must have been killed
GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")  # dxg: Linux on Windows
PACKAGE = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True, slots=True)
class KeptModel:
    """A model as an earlier start has left it."""

    facts: ServedModel
    tokenizer: CompiledTokenizer | None
    native: NativeModel


class KeptPrograms:
    """The kept program of one model, found by what it depends on. Made before the model's files are read."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._key = program_key(config, folder)
        self._path = programs_folder(config) / file_name(self._key)

    def open(self, num_threads: int) -> KeptModel | None:
        """Returns the kept model, or None. Logs why one that is there cannot be used."""
        try:
            with closing(ArrayFile(self._path)) as file:
                found = file.description
                if found["key"] != self._key:
                    raise UntrustedFileError("is another model's")
                arrays = file.map(num_threads) if self._config.share_weights else file.read(num_threads)
        except FileNotFoundError:
            return None
        except (UntrustedFileError, MemoryError) as error:
            logger.warning("the model is prepared again: %s %s", self._path, error)
            return None
        with suppress(OSError):
            os.utime(self._path)  # the least recently used one goes first
        for note in found["notes"]:
            logger.warning("%s", note)
        facts = found["facts"] | {"name": self._config.served_model_name or self._config.model}
        facts["layers"] = [LayerShape(*layer) for layer in facts["layers"]]
        facts["eos_token_ids"] = tuple(facts["eos_token_ids"])
        native = NativeModel(*program_of(found["program"], arrays))
        return KeptModel(ServedModel(**facts), _tokenizer_of(found), native)

    def keep(self, loaded: LoadedModel, served: int, notes: Sequence[str]) -> None:
        """Writes a model's program, in a thread, if it can be kept.

        served: the number of positions that are served. notes: warnings about the model, which a later start repeats.
        """
        native, tokenizer = loaded.native, loaded.tokenizer
        if native is None or native.image.torch_calls or not isinstance(tokenizer, CompiledTokenizer | None):
            return
        # Another start may serve longer requests, unless the tables hold for this length alone (LongRoPE).
        is_own_length = loaded.served_length.is_needed
        longest = min(self._config.max_model_len or loaded.max_model_len, loaded.max_model_len)
        length = served if is_own_length else longest
        tables = complete_tables(native.tables, loaded.limit_model_len, length, is_own_length=is_own_length)
        loaded.limit_model_len(served)
        program, arrays = parts_of(native.image, tables)
        facts = dataclasses.asdict(loaded.plain())
        facts["layers"] = [dataclasses.astuple(layer) for layer in loaded.layers]
        content = {
            "key": self._key,
            "model": self._config.model,
            "facts": facts,
            "tokenizer": None if tokenizer is None else tokenizer.as_json(),
            "notes": list(notes),
            "program": program,
        }
        arguments = self._path, self._folder, content, arrays, self._config.max_kept_bytes
        # Not a daemon: a program that ends after one answer must leave it, too.
        threading.Thread(target=_write, args=arguments, name="keep program").start()


def _tokenizer_of(description: dict[str, Any]) -> CompiledTokenizer | None:
    kept = description["tokenizer"]
    return None if kept is None else CompiledTokenizer.from_json(kept)


def may_be_native(config: EngineConfig) -> bool:
    """Returns whether a model could run as a native program, as far as can be told without torch."""
    is_for_cpu = config.device == "cpu" or config.attention_backend == "cpu"
    has_gpu = any(Path(device).exists() for device in GPU_DEVICES)
    is_possible = config.custom_kernels and config.attention_backend in ("auto", "cpu") and config.device != "cuda"
    return is_possible and config.dtype != "float16" and (is_for_cpu or not has_gpu)


def programs_folder(config: EngineConfig) -> Path:
    return Path(config.cache_dir) / "programs"


def _write(path: Path, folder: Path, content: dict[str, Any], arrays: Sequence[Any], max_bytes: int) -> None:
    size = sum(array.nbytes for array in arrays)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if size > max_bytes:
            logger.info("the model's program is not kept: it has %d MiB, max_kept_bytes = %d", size >> 20, max_bytes)
            return
        make_room(path.parent, max_bytes - size)
        free = shutil.disk_usage(path.parent).free
        if free < size + SPARE_BYTES:
            logger.warning("the model's program is not kept for the next start: it takes %d MiB, and %d MiB of the "
                           "disk are free", size // MiB, free // MiB)  # fmt: skip
            return
        content["weights"] = {file.name: _digest(file) for file in sorted(folder.glob("*.safetensors"))}
        write_arrays(path, content, arrays)
    except OSError as error:
        logger.warning("the model's program is not kept for the next start: %s", error)


def make_room(folder: Path, max_bytes: int) -> None:
    """Deletes the programs that were used least recently until the others have at most max_bytes. Raises OSError."""
    for partial in folder.glob("*.partial"):
        with suppress(OSError):
            if time.time() - partial.stat().st_mtime > ABANDONED_S:
                partial.unlink()
    kept = sorted(folder.glob(f"*{ENDING}"), key=lambda file: file.stat().st_mtime, reverse=True)
    total = 0
    for file in kept:
        total += file.stat().st_size
        if total > max_bytes:
            file.unlink(missing_ok=True)


def program_key(config: EngineConfig, folder: Path) -> dict[str, Any]:
    """Returns all that a program depends on, as JSON."""
    files = []
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts):
            status = file.stat()
            files.append([str(file.relative_to(folder)), status.st_size, status.st_mtime_ns])
    return {
        "format": FORMAT,
        "folder": str(folder.resolve()),
        "files": files,
        "options": {name: getattr(config, name) for name in OPTIONS},
        "processor": [kernel_level(), sorted(features())],
        "sources": sources_digest(),
        "libraries": {name: _version(name) for name in LIBRARIES},
    }


def file_name(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + ENDING


@functools.cache
def sources_digest() -> str:
    """Returns a digest of this package's sources."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(source.relative_to(PACKAGE)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


@functools.cache
def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


def _digest(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
