"""Reads the input of a batch: one request a line, all of them checked before any is asked."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.errors import ConfigError, shortened
from batchserve.jsonl import read_lines, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from batchserve.jsonl import Line

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request: its id in the batch, its route, and its body as JSON."""

    custom_id: str
    url: str
    body: bytes


def read_requests(path: Path) -> list[BatchRequest]:
    """Reads all requests. Raises ConfigError, which names the file and the line."""
    requests: list[BatchRequest] = []
    seen: dict[str, str] = {}
    with closing(read_lines(path)) as lines:
        for line in lines:
            request = _request(line)
            first = seen.setdefault(request.custom_id, line.where)
            if first != line.where:
                raise ConfigError(f"{line.where}: custom_id {shortened(request.custom_id)} is that of {first}, too")
            requests.append(request)
    if not requests:
        raise ConfigError(f"{path}: holds no requests")
    return requests


def _request(line: Line) -> BatchRequest:
    for name in line.fields:
        if name not in FIELDS:
            raise ConfigError(f"{line.where}: field {shortened(name)} is not known: must be one of {', '.join(FIELDS)}")
    custom_id, method, url = (text_of(line, name) for name in FIELDS[:3])
    if not custom_id:
        raise ConfigError(f"{line.where}: field 'custom_id' must not be empty")
    if method != "POST":
        raise ConfigError(f"{line.where}: field 'method' must be 'POST', is {shortened(method)}")
    if url not in URLS:
        raise ConfigError(f"{line.where}: field 'url' must be one of {', '.join(URLS)}, is {shortened(url)}")
    body = line.fields.get("body")
    if not isinstance(body, dict):
        raise ConfigError(f"{line.where}: field 'body' must be an object")
    if body.get("stream"):
        raise ConfigError(f"{line.where}: field 'body' must not ask for a stream")
    return BatchRequest(custom_id, url, json.dumps(body, separators=(",", ":")).encode())
