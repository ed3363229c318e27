"""Reads the requests to tune for from JSONL and checks them before any model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from batchserve.errors import ConfigError, InvalidRequestError
from batchserve.jsonl import Line, read_lines, references_of, text_of
from batchserve.types import SamplingParams, SpeculationParams

DEFAULT_MAX_TOKENS = 128
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request, sampled with the model's defaults and its own seed. `where` names it in messages."""

    where: str
    prompt: str
    max_tokens: int
    references: tuple[str, ...]
    seed: int
    has_max_tokens: bool = True  # False: max_tokens is DEFAULT_MAX_TOKENS

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, seed=self.seed)


def load_workload(path: Path, count_tokens: Count, limit: int) -> list[WorkloadRequest]:
    """Reads the first `limit` requests of a file.

    A line is {"prompt": str, "max_tokens": int, "response": str, "reference": [str, ...], ...}. "references" is also
    accepted. Only the prompt is required. max_tokens defaults to the length of the response, or to DEFAULT_MAX_TOKENS
    without a response. Other fields belong to recorded answers and are ignored.
    Raises ConfigError naming file, line and field.
    """
    with closing(read_lines(path, "workload")) as lines:
        requests = [_request(line, count_tokens, seed) for seed, line in enumerate(islice(lines, limit))]
    if not requests:
        raise ConfigError(f"workload = {str(path)!r}: holds no requests")
    return requests


def _request(line: Line, count_tokens: Count, seed: int) -> WorkloadRequest:
    prompt = _some_text(line, "prompt")
    try:
        references = SpeculationParams(references=tuple(references_of(line))).references
        max_tokens = SamplingParams(max_tokens=_max_tokens(line, count_tokens)).max_tokens
    except InvalidRequestError as error:
        raise ConfigError(f"{line.where}: {error}") from error
    most, has_its_own = max_tokens or DEFAULT_MAX_TOKENS, max_tokens is not None
    return WorkloadRequest(line.where, prompt, most, tuple(map(str, references)), seed, has_its_own)


def _max_tokens(line: Line, count_tokens: Count) -> Any:
    if line.fields.get("max_tokens") is not None:
        return line.fields["max_tokens"]
    if line.fields.get("response") is None:
        return None
    if line.fields["response"] == "":  # a model may have given an empty answer
        return 1
    return max(1, count_tokens(_some_text(line, "response")))


def _some_text(line: Line, name: str) -> str:
    text = text_of(line, name)
    if not text:
        raise ConfigError(f"{line.where}: field {name!r} must be a text that is not empty")
    return text
