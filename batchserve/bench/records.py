"""Reads recorded requests from JSONL, checks them and tokenises them."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path

from batchserve.bench.replay import ReplayRecord
from batchserve.bench.tokenizer import Encode
from batchserve.errors import ConfigError
from batchserve.jsonl import Line, read_lines, references_of, text_of


def load_records(path: Path, encode: Encode, limit: int | None = None) -> list[ReplayRecord]:
    """Reads the first `limit` requests of a file, in order. Each text is tokenised separately, without special tokens.

    A line is {"prompt": str, "response": str, "reference": [str, ...] (optional; also "references"), ...}. Empty lines
    are skipped. A request with an empty response counts no steps.
    Raises ConfigError naming file, line and field.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit = {limit}: must be at least 1")
    with closing(read_lines(path)) as lines:
        records = [_record(line, encode) for line in islice(lines, limit)]
    if not records:
        raise ConfigError(f"{path}: holds no requests")
    return records


def split_warm(records: list[ReplayRecord], share: float) -> tuple[list[ReplayRecord], list[ReplayRecord]]:
    """Returns (the first `share` of the requests, rounded down; the rest). Raises ConfigError if one is empty."""
    if not 0 < share < 1:
        raise ConfigError(f"warm_share = {share}: must be between 0 and 1")
    count = int(share * len(records) + 1e-9)  # in floating point 0.29 * 100 is slightly less than 29
    if count == 0:
        raise ConfigError(f"warm_share = {share}: of {len(records)} requests it is none")
    return records[:count], records[count:]


def _record(line: Line, encode: Encode) -> ReplayRecord:
    prompt, response = text_of(line, "prompt"), text_of(line, "response")
    return ReplayRecord(encode(prompt), encode(response), [encode(text) for text in references_of(line)])
