"""Messages to domain types and back; what cannot be said in the domain is refused."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from batchserve.errors import InvalidRequestError
from batchserve.sampling_params import GRAMMAR_FIELDS
from batchserve.server.grpc.answers import from_stream_response, to_stream_responses
from batchserve.server.grpc.convert import (
    MAX_STOP_TOKEN_IDS,
    from_generate_request,
    refuse_unknown_fields,
    to_generate_request,
    with_path,
)
from batchserve.server.grpc.servicer import GenerationServicer
from batchserve.types import (
    MAX_REQUEST_ID_CHARS,
    Chat,
    Delta,
    FinishReason,
    GenerateCall,
    SamplingParams,
    SpeculationParams,
    Started,
    Timing,
    Usage,
)
from batchserve.v1 import generation_pb2 as pb

MAX_MODEL_LEN = 64
TOO_LONG = ("REFERENCES_TOO_LONG", "references")
UNKNOWN_VARINT = bytes([(100 << 3) & 0x7F | 0x80, (100 << 3) >> 7, 1])  # field 100 = 1


def fields(message: Message) -> Iterator[str]:
    """What is set in a message, at any depth."""
    for descriptor, value in message.ListFields():
        yield descriptor.full_name
        if descriptor.message_type is not None:
            for each in value if descriptor.is_repeated else [value]:
                yield from fields(each)


def all_fields(descriptor: Descriptor) -> Iterator[str]:
    for field in descriptor.fields:
        yield field.full_name
        if field.message_type is not None:
            yield from all_fields(field.message_type)


def test_request_round_trip_keeps_every_field():
    params = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=2**64 - 1,
        max_tokens=3,
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        ignore_eos=True,
        skip_special_tokens=False,
        min_p=0.125,
        presence_penalty=-0.5,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        no_repeat_ngram_size=3,
        min_tokens=2,
        logit_bias={3: -1.5, 9: 100.0},
        allowed_token_ids=(3, 9, 10),
        bad_words=("bad", "worse words"),
        logprobs=3,
        include_stop_str_in_output=True,
        n=3,
        prompt_logprobs=2,
        echo=True,
        choice=("one", "two"),
    )
    speculation = SpeculationParams(
        is_enabled=False,
        max_draft_tokens=0,
        drafter="jacobi",
        branch_length=3,
        draft_scope="team 7",
        references=("a text", (5, 6), "", ()),
        tpot_target_ms=12.3,
    )
    request = to_generate_request([1, 2, 3], params, speculation, -7)
    request.request_id, request.model = "id", "m"
    parsed = from_generate_request(pb.GenerateRequest.FromString(request.SerializeToString()), MAX_MODEL_LEN)
    assert parsed == GenerateCall([1, 2, 3], params, "id", "m", speculation, priority=-7)
    left = set(all_fields(pb.GenerateRequest.DESCRIPTOR)) - set(fields(request))
    other_grammars = {f"batchserve.v1.StructuredOutput.{name}" for name in GRAMMAR_FIELDS if name != "choice"}
    chats = {"batchserve.v1.GenerateRequest.chat", *all_fields(pb.Chat.DESCRIPTOR)}
    assert left == {"batchserve.v1.GenerateRequest.text", *chats, *other_grammars}, "other kinds of prompt and grammar"


def test_a_chat_round_trip_keeps_every_field():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "ü"]}}}
    messages = [
        {"role": "user", "content": "hi", "name": "jo"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "tool_call_id": "1",
        },
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "I"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = Chat(messages, tools, None, True, {"enable_thinking": False})
    request = to_generate_request(chat, SamplingParams(), SpeculationParams())
    parsed = from_generate_request(pb.GenerateRequest.FromString(request.SerializeToString()), MAX_MODEL_LEN)
    assert parsed.prompt == chat
    assert set(all_fields(pb.Chat.DESCRIPTOR)) == set(fields(request.chat)) | {
        "batchserve.v1.Chat.add_generation_prompt"
    }


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"json_schema": '{"type": "object"}'},
        {"json_object": True},
        {"regex": "[a-z]+"},
        {"ebnf": 'root ::= "a"'},
        {"choice": ("a", "b")},
    ],
)
def test_one_kind_of_grammar_at_most(given: dict[str, Any]):
    request = to_generate_request("x", SamplingParams(**given), SpeculationParams())
    assert request.HasField("structured_output") == bool(given)
    assert from_generate_request(request, MAX_MODEL_LEN).params == SamplingParams(**given)


def test_a_schema_is_sent_as_text():
    params = SamplingParams(json_schema={"type": "object", "title": "ü"})
    assert (
        to_generate_request("x", params, SpeculationParams()).structured_output.json_schema
        == '{"type": "object", "title": "ü"}'
    )


def test_unset_differs_from_zero():
    unset = from_generate_request(pb.GenerateRequest(text="hi"), MAX_MODEL_LEN)
    assert unset == GenerateCall("hi", SamplingParams(), speculation=SpeculationParams())
    zero = pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(temperature=0, top_k=0, seed=0))
    assert from_generate_request(zero, MAX_MODEL_LEN).params == SamplingParams(temperature=0, top_k=0, seed=0)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("#100", pb.GenerateRequest),
        ("token_ids.#100", pb.TokenIds),
        ("sampling_params.#100", pb.SamplingParams),
        ("stop.#100", pb.StopConditions),
        ("output.#100", pb.OutputOptions),
        ("speculation.#100", pb.SpeculationOptions),
        ("structured_output.#100", pb.StructuredOutput),
        ("chat.#100", pb.Chat),
        ("references[1].#100", pb.Reference),
    ],
)
def test_unknown_field_is_refused_wherever_it_is(path, part):
    with_unknown = part.FromString(UNKNOWN_VARINT)
    name = path.split(".")[0]
    if part is pb.Reference:
        request = pb.GenerateRequest(references=[pb.Reference(text="x"), with_unknown])
    else:
        request = with_unknown if part is pb.GenerateRequest else pb.GenerateRequest(**{name: with_unknown})
    with pytest.raises(InvalidRequestError) as caught:
        refuse_unknown_fields(request)
    assert (caught.value.reason, caught.value.field) == ("UNKNOWN_FIELD", path)


def test_known_field_with_the_wrong_wire_type_is_refused():
    # temperature as a varint instead of a fixed32
    with pytest.raises(InvalidRequestError, match="#1"):
        refuse_unknown_fields(pb.SamplingParams.FromString(b"\x08\x01"))


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (pb.GenerateRequest(), "MISSING_INPUT", "input"),
        (pb.GenerateRequest(text="x", request_id="i" * (MAX_REQUEST_ID_CHARS + 1)), "INVALID_REQUEST_ID", "request_id"),
        (pb.GenerateRequest(text="x", request_id="a\nb"), "INVALID_REQUEST_ID", "request_id"),
        (
            pb.GenerateRequest(text="x", speculation=pb.SpeculationOptions(mode=9)),
            "UNKNOWN_ENUM_VALUE",
            "speculation.mode",
        ),
        (
            pb.GenerateRequest(text="x", stop=pb.StopConditions(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1))),
            "TOO_MANY_STOP_TOKEN_IDS",
            "stop.stop_token_ids",
        ),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * MAX_MODEL_LEN)), "PROMPT_TOO_LONG", "token_ids"),
        (
            pb.GenerateRequest(text="x", speculation=pb.SpeculationOptions(drafter="oracle")),
            "UNKNOWN_DRAFTER",
            "speculation.drafter",
        ),
        (
            pb.GenerateRequest(text="x", speculation=pb.SpeculationOptions(branch_length=0)),
            "INVALID_BRANCH_LENGTH",
            "speculation.branch_length",
        ),
        (
            pb.GenerateRequest(text="x", speculation=pb.SpeculationOptions(tpot_target_ms=0)),
            "INVALID_TPOT_TARGET_MS",
            "speculation.tpot_target_ms",
        ),
        (pb.GenerateRequest(text="x", draft_scope="s" * 257), "INVALID_DRAFT_SCOPE", "draft_scope"),
        (pb.GenerateRequest(text="x", priority=1001), "INVALID_PRIORITY", "priority"),
        (pb.GenerateRequest(text="x", priority=-(2**31)), "INVALID_PRIORITY", "priority"),
        (
            pb.GenerateRequest(text="x", references=[pb.Reference(text="a"), pb.Reference()]),
            "MISSING_CONTENT",
            "references[1].content",
        ),
        (pb.GenerateRequest(text="x", references=[pb.Reference(text="a")] * 65), "TOO_MANY_REFERENCES", "references"),
        (
            pb.GenerateRequest(text="x", references=[pb.Reference(token_ids=pb.TokenIds(ids=[1] * 70_000))] * 2),
            *TOO_LONG,
        ),
        (pb.GenerateRequest(text="x", references=[pb.Reference(text="a" * 600_000)] * 2), *TOO_LONG),
    ],
)
def test_refused(request_, reason, field):
    with pytest.raises(InvalidRequestError) as caught:
        from_generate_request(request_, MAX_MODEL_LEN)
    told = with_path(caught.value, request_)
    assert (told.reason, told.field) == (reason, field)
    assert str(told).startswith(f"{field} = ")


# A value that is refused for every field of what a Python caller gives.
BAD_SAMPLING: dict[str, Any] = {
    "temperature": -1.0,
    "top_p": 2.0,
    "top_k": -1,
    "seed": -1,
    "max_tokens": 0,
    "stop": ("ok", ""),
    "stop_token_ids": (1, "2"),
    "ignore_eos": 1,
    "skip_special_tokens": "no",
    "min_p": 1.5,
    "presence_penalty": 2.5,
    "frequency_penalty": -3,
    "repetition_penalty": 0,
    "no_repeat_ngram_size": -1,
    "min_tokens": -1,
    "logit_bias": {3: 1000.0},
    "allowed_token_ids": (1, "2"),
    "bad_words": ("ok", ""),
    "logprobs": 21,
    "include_stop_str_in_output": 1,
    "n": 0,
    "prompt_logprobs": -1,
    "echo": "yes",
    "json_schema": 5,
    "json_object": "yes",
    "regex": "",
    "ebnf": "a" * 65537,
    "choice": ("ok", ""),
}
BAD_SPECULATION: dict[str, Any] = {
    "is_enabled": "no",
    "max_draft_tokens": -1,
    "drafter": "oracle",
    "branch_length": 0,
    "draft_scope": "s" * 257,
    "references": ("a text", (5, "6")),
    "tpot_target_ms": 0,
}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("kind", "name", "bad"),
    [
        *((SamplingParams, *each) for each in BAD_SAMPLING.items()),
        *((SpeculationParams, *each) for each in BAD_SPECULATION.items()),
    ],
)
def test_an_error_names_the_argument_in_python_and_the_path_on_the_wire(kind: Any, name: str, bad: Any):
    with pytest.raises(InvalidRequestError) as caught:
        kind(**{name: bad})
    error = caught.value
    assert error.field.partition("[")[0] == name
    assert str(error).startswith(name)
    told = with_path(error, pb.GenerateRequest(text="x"))
    assert (told.reason, told.value) == (error.reason, error.value)
    assert_is_a_path(told.field)


def assert_is_a_path(path: str) -> None:
    """Of a field in a GenerateRequest; places in lists where there are lists."""
    descriptor = pb.GenerateRequest.DESCRIPTOR
    for part in path.split("."):
        name, bracket, _ = part.partition("[")
        found = {field.name: field for field in descriptor.fields}
        if name == "token_ids":  # a message with a list in it, which paths leave out
            assert "token_ids" in found
            return
        field = found[name]
        assert not bracket or field.is_repeated
        descriptor = field.message_type


@pytest.mark.faults
def test_no_argument_is_forgotten():
    in_python_only = {"logits_processors"}
    assert set(BAD_SAMPLING) | in_python_only == {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(BAD_SPECULATION) == {field.name for field in dataclasses.fields(SpeculationParams)}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("field", "request_", "path"),
    [
        ("prompt", pb.GenerateRequest(text="x"), "text"),
        ("prompt", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])), "token_ids"),
        ("prompt[7]", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])), "token_ids[7]"),
        ("references[3]", pb.GenerateRequest(text="x"), "references[3].text"),
        ("references[3][4]", pb.GenerateRequest(text="x"), "references[3].token_ids[4]"),
        ("references", pb.GenerateRequest(text="x"), "references"),
        ("references[1].content", pb.GenerateRequest(text="x"), "references[1].content"),
        ("stop[2]", pb.GenerateRequest(text="x"), "stop.stop_strings[2]"),
        ("stop_token_ids[2]", pb.GenerateRequest(text="x"), "stop.stop_token_ids[2]"),
        ("request_id", pb.GenerateRequest(text="x"), "request_id"),
        ("priority", pb.GenerateRequest(text="x"), "priority"),
        ("input", pb.GenerateRequest(), "input"),
        ("sampling_params.#9", pb.GenerateRequest(), "sampling_params.#9"),
        ("#100", pb.GetModelInfoRequest(), "#100"),
    ],
)
def test_where_a_field_is_on_the_wire(field, request_, path):
    assert with_path(InvalidRequestError("R", field, 1, "b"), request_).field == path


@pytest.mark.parametrize(
    ("params", "speculation", "field"),
    [
        ({"top_k": 2**32}, {}, "top_k"),
        ({"max_tokens": 2**32}, {}, "max_tokens"),
        ({}, {"max_draft_tokens": 2**32}, "max_draft_tokens"),
        ({}, {"branch_length": 2**32}, "branch_length"),
    ],
)
def test_a_client_is_told_of_a_count_that_the_wire_has_no_room_for(params, speculation, field):
    with pytest.raises(InvalidRequestError, match=f"^{field} = {2**32}: must be at most {2**32 - 1}"):
        to_generate_request("x", SamplingParams(**params), SpeculationParams(**speculation))


def test_a_client_is_told_of_a_priority_out_of_its_bounds():
    with pytest.raises(InvalidRequestError, match=r"priority = 2147483648: must be an integer in -1000..1000"):
        to_generate_request("x", SamplingParams(), SpeculationParams(), 2**31)


def test_a_hundred_thousand_references_are_refused_by_their_number():
    with pytest.raises(InvalidRequestError, match="references = 100000: must be at most 64"):
        from_generate_request(pb.GenerateRequest(text="x", references=[pb.Reference()] * 100_000), MAX_MODEL_LEN)


@pytest.mark.parametrize("unknown", [b"\x60\x00", b"\x63\x64"])  # numbers, groups
@pytest.mark.parametrize("part", [pb.GenerateRequest, pb.Reference])
def test_millions_of_unknown_fields_are_refused_without_an_object_for_each(unknown, part):
    request = part.FromString(unknown * 4_000_000)
    if part is pb.Reference:
        request = pb.GenerateRequest(text="x", references=[pb.Reference(text="y"), request])
    path = "#12" if part is pb.GenerateRequest else "references[1].#12"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            refuse_unknown_fields(request)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (caught.value.reason, caught.value.field) == ("UNKNOWN_FIELD", path)
    assert most < 4 * 8_000_000  # bytes; as many objects would take ten times that


def test_last_delta_becomes_a_delta_and_a_finished():
    usage, timing = Usage(3, 2, 1, 5, 4), Timing(0.25, 0.5, 1.0)
    last = Delta("id", "t", [7], FinishReason.STOP, usage, timing)
    delta, finished = to_stream_responses(last)
    assert from_stream_response(delta) == Delta("", "t", [7])
    assert from_stream_response(finished) == Delta("", "", [], FinishReason.STOP, usage, timing)
    (only,) = to_stream_responses(Delta("id", "", [], FinishReason.LENGTH, usage, timing))
    assert only.finished.finish_reason == pb.FINISH_REASON_LENGTH


def test_started_and_an_empty_delta():
    (started,) = to_stream_responses(Started("id", 3))
    assert from_stream_response(started) == Started("id", 3)
    assert list(to_stream_responses(Delta("id"))) == []


def test_every_method_of_the_contract_is_answered_by_the_servicer_itself() -> None:
    """Nothing stands in for one that it lacks: a caller would meet it."""
    service = pb.DESCRIPTOR.services_by_name["GenerationService"]
    assert {method.name for method in service.methods} <= set(vars(GenerationServicer))
