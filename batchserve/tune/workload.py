"""The requests to tune for: read from JSONL, checked before any model is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchserve.errors import ConfigError, InvalidRequestError
from batchserve.types import SamplingParams, SpeculationParams

DEFAULT_MAX_TOKENS = 128
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request; `where` names it in messages. Sampled as the model's defaults say, each with a seed of its own."""

    where: str
    prompt: str
    max_tokens: int
    references: tuple[str, ...]
    seed: int

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, seed=self.seed)


def load_workload(path: Path, count_tokens: Count, limit: int) -> list[WorkloadRequest]:
    """The first `limit` requests of a file.

    A line is {"prompt": str, "max_tokens": int, "response": str, "reference": [str, ...], ...}; "references" will do,
    too. Only the prompt must be there: without max_tokens an answer may be as long as the response, and without that
    DEFAULT_MAX_TOKENS tokens. Other fields are those of recorded answers, and say nothing here.
    Raises ConfigError naming file, line and field.
    """
    requests: list[WorkloadRequest] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if len(requests) == limit:
                    break
                if line.strip():
                    requests.append(_request(line, count_tokens, f"{path} line {number}", len(requests)))
    except OSError as error:
        raise ConfigError(f"workload = {str(path)!r}: cannot be read: {error.strerror}") from error
    if not requests:
        raise ConfigError(f"workload = {str(path)!r}: holds no requests")
    return requests


def _request(line: bytes, count_tokens: Count, where: str, seed: int) -> WorkloadRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: must be a JSON object, is {type(fields).__name__}")
    prompt = _text(fields, "prompt", where)
    given = [name for name in ("reference", "references") if fields.get(name) is not None]
    if len(given) == 2:
        raise ConfigError(f"{where}: fields 'reference' and 'references' must not both be given")
    references = fields[given[0]] if given else []
    if not isinstance(references, list):
        raise ConfigError(f"{where}: field {given[0]!r} must be a list of texts")
    try:
        checked = SpeculationParams(references=tuple(references)).references
        max_tokens = SamplingParams(max_tokens=_max_tokens(fields, count_tokens, where)).max_tokens
    except InvalidRequestError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not all(isinstance(reference, str) for reference in checked):
        raise ConfigError(f"{where}: field 'reference' must be a list of texts")
    return WorkloadRequest(where, prompt, max_tokens or DEFAULT_MAX_TOKENS, tuple(map(str, checked)), seed)


def _max_tokens(fields: dict[str, Any], count_tokens: Count, where: str) -> Any:
    if fields.get("max_tokens") is not None:
        return fields["max_tokens"]
    if fields.get("response") is None:
        return None
    if fields["response"] == "":  # a model may have answered nothing
        return 1
    return max(1, count_tokens(_text(fields, "response", where)))


def _text(fields: dict[str, Any], name: str, where: str) -> str:
    if name not in fields:
        raise ConfigError(f"{where}: field {name!r} is missing")
    value = fields[name]
    # JSON can also write half a character (a lone surrogate), which no tokenizer takes.
    if not isinstance(value, str) or not value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{where}: field {name!r} must be a text that is not empty")
    return value
