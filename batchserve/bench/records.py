"""Recorded requests: read from JSONL, checked, tokenised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from batchserve.bench.replay import ReplayRecord
from batchserve.bench.tokenizer import Encode
from batchserve.errors import ConfigError


def load_records(path: Path, encode: Encode, limit: int | None = None) -> list[ReplayRecord]:
    """The first `limit` requests of a file, in its order; every text is tokenised by itself, without special tokens.

    A line is {"prompt": str, "response": str, "reference": [str, ...] (optional; also "references"), ...}; empty lines
    are skipped. A model may have answered nothing: such a request counts no steps.
    Raises ConfigError naming file, line and field.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit = {limit}: must be at least 1")
    records: list[ReplayRecord] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(records) == limit:
                    break
                if line.strip():
                    records.append(_record(line, encode, f"{path} line {number}"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if not records:
        raise ConfigError(f"{path}: holds no requests")
    return records


def split_warm(records: list[ReplayRecord], share: float) -> tuple[list[ReplayRecord], list[ReplayRecord]]:
    """(the first `share` of the requests, rounded down; the rest). Raises ConfigError if one of them is empty."""
    if not 0 < share < 1:
        raise ConfigError(f"warm_share = {share}: must be between 0 and 1")
    count = int(share * len(records) + 1e-9)  # 0.29 * 100 is a little less than 29
    if count == 0:
        raise ConfigError(f"warm_share = {share}: of {len(records)} requests it is none")
    return records[:count], records[count:]


def _record(line: bytes, encode: Encode, where: str) -> ReplayRecord:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: must be a JSON object, is {type(fields).__name__}")
    prompt, response = _text(fields, "prompt", where), _text(fields, "response", where)
    given = [name for name in ("reference", "references") if fields.get(name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{where}: fields 'reference' and 'references' must not both be given")
    references = fields[given[0]] if given else []
    if not isinstance(references, list) or not all(_is_text(text) for text in references):
        raise ConfigError(f"{where}: field {given[0]!r} must be a list of texts")
    return ReplayRecord(encode(prompt), encode(response), [encode(text) for text in references])


def _text(fields: dict[str, Any], name: str, where: str) -> str:
    if name not in fields:
        raise ConfigError(f"{where}: field {name!r} is missing")
    value = fields[name]
    if not _is_text(value):
        raise ConfigError(f"{where}: field {name!r} must be a text")
    return value


def _is_text(value: object) -> TypeGuard[str]:
    """JSON can also write half a character (a lone surrogate), which no tokenizer takes."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
