"""Workloads from JSONL: what is read, how often it is sent, and what is refused, by line and field."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from batchserve.errors import ConfigError
from batchserve.v1 import generation_pb2 as pb
from load_tests.workload_file import FileWorkload, load_workload
from load_tests.workloads import Item

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def read(tmp_path, *lines) -> FileWorkload:
    path = tmp_path / "work.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return FileWorkload(path)


def test_the_forms_of_a_line(tmp_path):
    workload = read(
        tmp_path,
        {"prompt": "p", "max_tokens": 7},
        {"messages": MESSAGES, "json_schema": SCHEMA},
        {"prompt": "p", "response_format": {"type": "json_object"}},
        {"prompt": "p", "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"prompt": "p", "response_format": {"type": "text"}},
    )
    plain, chat, anything, named, text = workload.items
    request = plain.grpc_request(True, 128)
    assert (request.text, request.stop.max_tokens) == ("p", 7)
    assert not request.HasField("structured_output")
    assert (plain.http_path, plain.http_body(True, 128)["max_tokens"]) == ("/v1/completions", 7)
    request = chat.grpc_request(False, 128)
    assert [(each.role, each.text) for each in request.chat.messages] == [("system", "s"), ("user", "u")]
    assert json.loads(request.structured_output.json_schema) == SCHEMA
    assert request.speculation.mode == pb.SpeculationOptions.MODE_OFF
    body = chat.http_body(False, 128)
    assert (chat.http_path, body["messages"], body["max_tokens"]) == ("/v1/chat/completions", MESSAGES, 128)
    assert body["response_format"] == {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert body["speculation"] == {"is_enabled": False}
    assert anything.grpc_request(True, 1).structured_output.json_object
    assert json.loads(named.grpc_request(True, 1).structured_output.json_schema) == SCHEMA
    assert not text.grpc_request(True, 1).HasField("structured_output")


def test_weights_say_how_often_and_seeds_say_which(tmp_path):
    workload = read(tmp_path, {"prompt": "a", "weight": 3}, {"prompt": "b"}, {"prompt": "c", "weight": 1e-9})
    found = Counter(workload.item(str(seed)).prompt for seed in range(2000))
    assert found["a"] == pytest.approx(1500, abs=100)
    assert found["b"] == pytest.approx(500, abs=100)
    assert workload.item("7") == workload.item("7")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2: is not JSON"),
        ({"prompt": "x", "temperature": 1}, "line 2: temperature = 1: must be absent: known are prompt, messages"),
        ({}, "line 2: must have one of the fields 'prompt' and 'messages'"),
        ({"prompt": "x", "messages": MESSAGES}, "must have one of the fields"),
        ({"prompt": ""}, "prompt = : must be a text that is not empty"),
        ({"messages": []}, 'messages = []: must be a list of {"role": TEXT, "content": TEXT}'),
        ({"messages": [{"role": "user"}]}, "messages = [{'role': 'user'}]: must be a list"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "must be a list"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens = 0: must be an integer of at least 1"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens = True: must be an integer"),
        ({"prompt": "x", "weight": 0}, "weight = 0: must be a finite number above 0"),
        ('{"prompt": "x", "weight": Infinity}', "weight = inf: must be a finite number above 0"),
        ({"prompt": "x", "json_schema": 1}, "json_schema = 1: must be an object, the schema"),
        ({"prompt": "x", "json_schema": {}, "response_format": {"type": "text"}}, "json_schema = {}: must be absent"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, 'must be an object whose "type" is one of text'),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, '"json_schema" if that is its type'),
        ({"prompt": "x", "response_format": {"type": "text", "more": 1}}, 'must be an object with "type"'),
        ({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {}}}, 'has an object "schema"'),
    ],
)
def test_what_is_not_known_is_refused_by_line_and_field(tmp_path, line, message):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, {"prompt": "good"}, line)
    assert message in str(caught.value)


def test_a_file_without_requests_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no requests"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_workload(str(tmp_path / "nothing.jsonl"))


def test_the_bundled_models_requests_have_a_form_for_each_protocol():
    item = load_workload("").item("1")
    assert item == load_workload("").item("1")
    assert item != load_workload("").item("2")
    assert item.prompt == f"<|user|>{item.messages[0]['content']}<|assistant|>"
    assert item.grpc_request(True, 5).text == item.prompt
    assert item.http_path == "/v1/chat/completions"


def test_only_the_protocol_that_needs_it_gets_a_form():
    assert Item("x").http_body(True, 5)["prompt"] == "x"
    assert Item(None, (MESSAGES[1],)).grpc_request(True, 5).WhichOneof("input") == "chat"
