"""Reads and checks the files of a model's folder: config.json, the weight files and the headers of their tensors."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from batchserve.errors import ConfigError

# As transformers has them.
CONFIG_NAME, SAFE_WEIGHTS_NAME = "config.json", "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
READ_SUFFIXES = frozenset({".json", ".jinja", ".model", ".safetensors", ".tiktoken", ".txt"})
WEIGHT_SUFFIXES = frozenset(
    ".bin .ckpt .gguf .ggml .h5 .incomplete .msgpack .onnx .ot .part .pt .pth .safetensors".split()
)
EXPECTED = f"expected {CONFIG_NAME}, {SAFE_WEIGHTS_NAME} (or shards and their index) and the tokenizer's files"
MAX_NAMES = 4
EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's dtype and shape, from the header of its safetensors file."""

    dtype: str
    shape: tuple[int, ...]


def check_path(path: Path, named: str) -> None:
    """Raises ConfigError if `path` is not a folder. A weight file alone has neither an architecture nor a tokenizer."""
    if path.is_dir():
        return
    if not path.exists():
        raise ConfigError(f"{named}: must be a folder that exists, a hub id or 'bundled'")
    kind = {".gguf": "a GGUF file", ".safetensors": "a file of weights"}.get(path.suffix, "a file")
    raise ConfigError(f"{named}: must be a folder that exists, a hub id or 'bundled', and is {kind}; {EXPECTED}")


def check_filled(folder: Path, named: str) -> None:
    """Raises ConfigError if the folder cannot be read, or if a file in it is a dangling link or a Git LFS pointer."""
    try:
        for file in sorted(folder.iterdir()):
            if not _is_read(file):
                continue
            if file.is_symlink() and not file.exists():
                raise ConfigError(f"{named}: {file.name} is a link to a file that is absent: finish the download")
            if file.is_file() and _is_pointer(file):
                raise ConfigError(
                    f"{named}: {file.name} is a Git LFS pointer, not the file itself: run 'git lfs pull' in the folder"
                )
    except OSError as error:
        raise ConfigError(f"{named}: cannot be read: {error}") from error


def read_config(folder: Path, named: str) -> dict[str, Any]:
    """Returns the content of config.json. Raises ConfigError if it is absent or damaged, or if there is an adapter."""
    if (folder / "adapter_config.json").exists():  # without peft, transformers would silently load the base model
        raise ConfigError(
            f"{named}: has an adapter (adapter_config.json); merge it into its base model's weights first"
        )
    if not (folder / CONFIG_NAME).exists():
        raise ConfigError(f"{named}: has no {CONFIG_NAME}; {_what_is_there(folder)}; {EXPECTED}")
    return _read_object(folder / CONFIG_NAME, named)


def read_tensors(folder: Path, config: dict[str, Any], named: str) -> dict[str, TensorInfo]:
    """Returns the tensors that will be loaded, by name. Raises ConfigError if weights are absent or cut short."""
    tensors: dict[str, TensorInfo] = {}
    for file in _weight_files(folder, config, named):
        tensors |= _read_header(file, named)
    _check_experts(tensors, named)
    return tensors


def _is_read(file: Path) -> bool:
    """True if a model may be loaded from the file. The maker's own weights may lie next to the Hugging Face ones."""
    is_known = file.suffix in READ_SUFFIXES or file.name.startswith("tokenizer.model")
    return is_known and not file.name.startswith("consolidated")


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as content:
        return content.read(len(LFS_POINTER)) == LFS_POINTER


def read_json(file: Path, named: str) -> Any:
    """Parses a JSON file. Raises ConfigError if it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{named}: {file.name} cannot be read: {error}") from error


def _read_object(file: Path, named: str) -> dict[str, Any]:
    content = read_json(file, named)
    if not isinstance(content, dict):
        raise ConfigError(f"{named}: {file.name} must hold an object, not {type(content).__name__}")
    return content


def _what_is_there(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    if not names:
        return "the folder is empty"
    there = f"there {'is' if len(names) == 1 else 'are'} {_listed(names)}"
    if (folder / "model_index.json").exists():
        return f"{there}: a diffusion pipeline, not a language model"
    if any(name.endswith(".gguf") for name in names):
        return f"{there}: GGUF is not supported, use the checkpoint that it was made from"
    if (folder / "params.json").exists():
        return f"{there}: its maker's own format, use the checkpoint in Hugging Face's format"
    if inner := next(chain(folder.glob(f"*/{CONFIG_NAME}"), folder.glob(f"*/*/{CONFIG_NAME}")), None):
        return f"{there}; perhaps {inner.parent} is meant"
    return there


def _listed(names: list[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _weight_files(folder: Path, config: dict[str, Any], named: str) -> list[Path]:
    """Returns the weight files that transformers would choose."""
    chosen = config.get("transformers_weights")
    names = [chosen] if isinstance(chosen, str) else [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME]
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        others = sorted(each.name for each in folder.iterdir() if each.suffix in WEIGHT_SUFFIXES)
        there = f"there {'is' if len(others) == 1 else 'are'} {_listed(others)}" if others else "no weights are there"
        hint = "; GGUF is not supported" if any(name.endswith(".gguf") for name in others) else ""
        raise ConfigError(f"{named}: has no {' and no '.join(names)}; {there}{hint}: safetensors are expected")
    if file.suffix != ".json":
        return [file]
    weight_map = _read_object(file, named).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(shard, str) for shard in weight_map.values())
    ):
        raise ConfigError(f"{named}: {file.name} has no weight_map of tensors to files")
    shards = sorted(set(weight_map.values()))
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        unfinished = sorted(each.name for each in islice(folder.rglob("*.incomplete"), MAX_NAMES))
        raise ConfigError(
            f"{named}: {file.name} names {len(shards)} files, of which {len(absent)} are absent: {_listed(absent)}"
            f"{f' ({_listed(unfinished)} is there)' if unfinished else ''}: finish the download"
        )
    return [folder / shard for shard in shards]


def _read_header(file: Path, named: str) -> dict[str, TensorInfo]:
    """Reads a file's header. The format: the header's length (8 bytes), the header (JSON), the tensors' bytes."""
    size = file.stat().st_size
    try:
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            if length > size - 8:
                raise ValueError("its header is cut short")
            header = json.loads(content.read(length))
            if not isinstance(header, dict):
                raise ValueError("its header is not an object")
            header.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            tensors = {name: TensorInfo(str(e["dtype"]), tuple(e["shape"])) for name, e in header.items()}
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{named}: {file.name} ({size} bytes) is not a whole safetensors file: {error}: download it again"
        ) from error
    if end != size:
        raise ConfigError(
            f"{named}: {file.name} has {size} bytes, and by its header must have {end}: download it again"
        )
    return tensors


def _check_experts(tensors: dict[str, TensorInfo], named: str) -> None:
    """Raises ConfigError if an expert is missing. Experts are stacked in order, so others would take its place."""
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in tensors:
        if match := EXPERT.fullmatch(name):
            found[match[1]][match[3]].add(int(match[2]))
    for prefix, parts in found.items():
        wanted = {*range(1 + max(map(max, parts.values())))}
        absent = [f"{prefix}.{number}.{part}" for part, numbers in parts.items() for number in wanted - numbers]
        if absent:
            raise ConfigError(f"{named}: its files lack {len(absent)} weights, {min(absent)} among them")
