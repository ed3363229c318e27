"""Recorded requests are read as they are, or refused with file, line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchserve.bench.records import load_records, split_warm
from batchserve.bench.replay import ReplayRecord
from batchserve.errors import ConfigError

GOOD = {"id": "a/0", "prompt": "ab", "reference": ["c", ""], "response": "de", "source": "s", "license": "l"}


def encode(text: str) -> list[int]:
    """One token a character; blanks are none."""
    return [ord(character) for character in text if character != " "]


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "some.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


def test_records_keep_the_files_order_and_need_only_prompt_and_response(tmp_path: Path):
    path = write(tmp_path, GOOD, "", {"prompt": "x", "response": "é\n"}, "  ", {**GOOD, "response": "z"})
    records = load_records(path, encode)
    assert records[0] == ReplayRecord([97, 98], [100, 101], [[99], []])
    assert records[1] == ReplayRecord([120], [233, 10], [])
    assert records[2].response_token_ids == [122]
    assert load_records(path, encode, limit=2) == records[:2]
    assert load_records(path, encode, limit=99) == records


def test_what_is_behind_the_limit_is_not_read(tmp_path: Path):
    path = write(tmp_path, GOOD, "broken")
    assert len(load_records(path, encode, limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2: is not JSON"),
        ("[" * 100_000, "line 2: is not JSON"),
        ([1], "line 2: must be a JSON object, is list"),
        (without("prompt"), "line 2: field 'prompt' is missing"),
        (without("response"), "line 2: field 'response' is missing"),
        ({**GOOD, "prompt": 5}, "line 2: field 'prompt' must be a text"),
        ({**GOOD, "response": None}, "line 2: field 'response' must be a text"),
        ({**GOOD, "response": "\ud800"}, "line 2: field 'response' must be a text"),
        ({**GOOD, "reference": "text"}, "line 2: field 'reference' must be a list of texts"),
        ({**GOOD, "reference": None, "references": "text"}, "line 2: field 'references' must be a list of texts"),
        ({**GOOD, "references": ["c"]}, "line 2: fields 'reference' and 'references' must not both be given"),
        ({**GOOD, "reference": ["a", 1]}, "line 2: field 'reference' must be a list of texts"),
    ],
)
def test_malformed_records_are_named(tmp_path: Path, line: Any, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        load_records(write(tmp_path, GOOD, line, GOOD), encode)
    assert "some.jsonl" in str(caught.value)


def test_other_ways_to_write_a_record(tmp_path: Path):
    """References under their name on the wire, or none; and a model that said nothing."""
    plain = {"prompt": "", "response": ""}
    path = write(tmp_path, {**plain, "references": ["c", "d"]}, {**plain, "reference": None}, plain)
    assert load_records(path, encode) == [
        ReplayRecord([], [], [encode("c"), encode("d")]),
        *[ReplayRecord([], [], [])] * 2,
    ]


def test_text_that_is_not_utf8_is_refused(tmp_path: Path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9", "response": "a"}\n')
    with pytest.raises(ConfigError, match="line 1: is not JSON"):
        load_records(path, encode)


def test_files_that_hold_nothing(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read: No such file"):
        load_records(tmp_path / "none.jsonl", encode)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_records(tmp_path, encode)
    with pytest.raises(ConfigError, match="holds no requests"):
        load_records(write(tmp_path, "", " "), encode)
    with pytest.raises(ConfigError, match="limit = 0: must be at least 1"):
        load_records(write(tmp_path, GOOD), encode, limit=0)


def test_the_first_share_of_the_file_is_warm():
    records = [ReplayRecord([i], [i, i], []) for i in range(100)]
    for share, count in ((0.6, 60), (0.29, 29), (0.595, 59), (0.99, 99)):
        warm, rest = split_warm(records, share)
        assert warm == records[:count]
        assert rest == records[count:]
    for share in (0.0, 1.0, -1.0, float("nan"), 2.0):
        with pytest.raises(ConfigError, match="must be between 0 and 1"):
            split_warm(records, share)
    with pytest.raises(ConfigError, match="of 3 requests it is none"):
        split_warm(records[:3], 0.3)
