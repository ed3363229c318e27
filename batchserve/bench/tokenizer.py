"""Encodes text to token ids, for measurements that need a tokenizer but no model."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from batchserve.errors import ConfigError

Encode = Callable[[str], list[int]]

BUNDLED = "bundled"
MISTRAL_V1 = "mistral-v1"


def load_encoder(name: str) -> Encode:
    """Returns a function that encodes a text to token ids, without adding special tokens such as BOS.

    name: a folder with a tokenizer.json or a tokenizer.model, one of these files, "bundled" for the bundled model's, or
    "mistral-v1" for the 32k SentencePiece model inside mistral-common. Raises ConfigError.
    """
    if name == MISTRAL_V1:
        package = require("mistral_common", f"tokenizer = {name}")
        return _sentencepiece(Path(package.__file__).parent / "data" / "tokenizer.model.v1")
    bundled = Path(str(resources.files("batchserve"))) / "data" / "bundled"
    path = bundled if name == BUNDLED else Path(os.path.expanduser(name))
    if path.is_dir():
        folder = path
        path = next((p for p in (folder / "tokenizer.json", folder / "tokenizer.model") if p.is_file()), folder)
        if path == folder:
            raise ConfigError(f"tokenizer = {name!r}: the folder has neither a tokenizer.json nor a tokenizer.model")
    if not path.is_file():
        raise ConfigError(f"tokenizer = {name!r}: no such file or folder")
    return _hugging_face(path) if path.suffix == ".json" else _sentencepiece(path)


def require(package: str, needed_for: str) -> Any:
    """Imports a module of the extra `bench`. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{needed_for}: needs {package.partition('.')[0]}, which is not installed: pip install 'batchserve[bench]'"
        ) from error


def _hugging_face(path: Path) -> Encode:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError(f"tokenizer = {str(path)!r}: is not a tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _sentencepiece(path: Path) -> Encode:
    library = require("sentencepiece", f"tokenizer = {str(path)!r}")
    processor = library.SentencePieceProcessor()
    try:
        processor.Load(str(path))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"tokenizer = {str(path)!r}: is not a SentencePiece model: {error}") from error
    return lambda text: list(processor.encode(text))
