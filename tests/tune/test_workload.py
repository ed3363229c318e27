"""Workload files: what is read, and what is refused by line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchserve.errors import ConfigError
from batchserve.tune.workload import DEFAULT_MAX_TOKENS, load_workload


def count_words(text: str) -> int:
    return len(text.split())


def write(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "work.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_answers_are_as_long_as_asked_for_or_as_the_recorded_ones(tmp_path: Path):
    path = write(
        tmp_path,
        {"prompt": "a", "max_tokens": 7, "response": "one two"},
        {"prompt": "b", "response": "one two three", "reference": ["doc one", "doc two"], "id": 5},
        "",
        {"prompt": "c", "max_tokens": None, "reference": None, "references": ["doc"]},
        {"prompt": "d", "response": "   "},
        {"prompt": "e", "response": ""},
        {"prompt": "never read", "max_tokens": -1},
    )
    requests = load_workload(path, count_words, limit=5)
    assert [request.prompt for request in requests] == ["a", "b", "c", "d", "e"]
    assert [request.max_tokens for request in requests] == [7, 3, DEFAULT_MAX_TOKENS, 1, 1]
    assert [request.has_max_tokens for request in requests] == [True, True, False, True, True]
    assert [request.references for request in requests] == [(), ("doc one", "doc two"), ("doc",), (), ()]
    assert len({request.seed for request in requests}) == 5
    assert requests[2].where.endswith("line 4"), "empty lines count"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([1], "must be a JSON object, is list"),
        ({}, "field 'prompt' is missing"),
        ({"prompt": ""}, "field 'prompt' must be a text that is not empty"),
        ({"prompt": 3}, "field 'prompt' must be a text"),
        ({"prompt": "\ud800"}, "field 'prompt' must be a text"),
        ({"prompt": "x", "response": 0}, "field 'response' must be a text"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens = 0: must be >= 1"),
        ({"prompt": "x", "max_tokens": 2.5}, "max_tokens = 2.5: must be an integer"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens = True: must be an integer"),
        ({"prompt": "x", "reference": 7}, "field 'reference' must be a list of texts"),
        ({"prompt": "x", "references": {"a": 1}}, "field 'references' must be a list of texts"),
        ({"prompt": "x", "reference": ["a"], "references": ["b"]}, "must not both be given"),
        ({"prompt": "x", "reference": [[1, 2]]}, "field 'reference' must be a list of texts"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str):
    path = write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(ConfigError) as caught:
        load_workload(path, count_words, limit=10)
    assert f"{path} line 2: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_requests_is_refused(tmp_path: Path, content: str):
    with pytest.raises(ConfigError, match="holds no requests"):
        load_workload(write(tmp_path, content), count_words, limit=10)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path):
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=r"workload = .*cannot be read"):
            load_workload(path, count_words, limit=10)
