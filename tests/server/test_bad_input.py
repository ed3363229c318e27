"""Every bad request gets its own typed error, and the other requests of the batch are unharmed."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest

from batchserve.server.grpc import wire
from batchserve.server.grpc.servicer import SERVICE_NAME
from batchserve.v1 import generation_pb2 as pb
from tests.server.fakes import FakeEngine
from tests.server.harness import Served, ask, failure_of, read_all, serving, tokens_of, until
from tests.tiny_models import VOCAB_SIZE

CONTEXT = 512
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


def _sampling(**fields: Any) -> pb.GenerateRequest:
    return ask(sampling_params=pb.SamplingParams(**fields))


# name -> (request, code, reason, field, the value and the bound as parts of the message)
BAD: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str, str, str, str]] = {
    "no input": (pb.GenerateRequest(), INVALID, "MISSING_INPUT", "input", "None", "text, token_ids or chat"),
    "empty prompt": (
        pb.GenerateRequest(token_ids=pb.TokenIds()),
        *(INVALID, "EMPTY_PROMPT", "token_ids", "[]", "at least one token"),
    ),
    "text without a tokenizer": (pb.GenerateRequest(text="hi"), INVALID, "NO_TOKENIZER", "text", "'hi'", "token_ids"),
    "token id out of range": (
        ask(5, VOCAB_SIZE),
        *(INVALID, "TOKEN_ID_OUT_OF_RANGE", "token_ids[1]", str(VOCAB_SIZE), f"0..{VOCAB_SIZE - 1}"),
    ),
    "prompt longer than the context": (
        ask(*[5] * CONTEXT, max_tokens=None),
        *(INVALID, "PROMPT_TOO_LONG", "token_ids", f"{CONTEXT} tokens", f"at most {CONTEXT - 1} tokens"),
    ),
    "a prompt of 5 MB": (
        ask(*[5] * 5_000_000, max_tokens=None),
        *(INVALID, "PROMPT_TOO_LONG", "token_ids", "5000000 tokens", f"at most {CONTEXT - 1} tokens"),
    ),
    "prompt + max_tokens over the context": (
        ask(*[5] * 500, max_tokens=13),
        *(INVALID, "CONTEXT_EXCEEDED", "stop.max_tokens", "13", "at most 12"),
    ),
    "max_tokens 0": (ask(max_tokens=0), INVALID, "INVALID_MAX_TOKENS", "stop.max_tokens", "0", ">= 1"),
    "temperature -1": (
        _sampling(temperature=-1),
        *(INVALID, "INVALID_TEMPERATURE", "sampling_params.temperature", "-1.0", ">= 0"),
    ),
    "temperature NaN": (
        _sampling(temperature=math.nan),
        *(INVALID, "INVALID_TEMPERATURE", "sampling_params.temperature", "nan", "finite"),
    ),
    "temperature infinite": (
        _sampling(temperature=math.inf),
        *(INVALID, "INVALID_TEMPERATURE", "sampling_params.temperature", "inf", "finite"),
    ),
    "top_p 2": (_sampling(top_p=2), INVALID, "INVALID_TOP_P", "sampling_params.top_p", "2.0", "in (0, 1]"),
    "top_p NaN": (_sampling(top_p=math.nan), INVALID, "INVALID_TOP_P", "sampling_params.top_p", "nan", "in (0, 1]"),
    "top_k beyond the vocabulary": (
        _sampling(top_k=VOCAB_SIZE + 1),
        *(INVALID, "INVALID_TOP_K", "sampling_params.top_k", str(VOCAB_SIZE + 1), f"at most {VOCAB_SIZE}"),
    ),
    "stop token id out of range": (
        ask(stop=pb.StopConditions(stop_token_ids=[1, 999])),
        *(INVALID, "TOKEN_ID_OUT_OF_RANGE", "stop.stop_token_ids[1]", "999", f"0..{VOCAB_SIZE - 1}"),
    ),
    "empty stop string": (
        ask(stop=pb.StopConditions(stop_strings=["x", ""])),
        *(INVALID, "INVALID_STOP_STRING", "stop.stop_strings[1]", "''", "1..1024 characters"),
    ),
    "long stop string": (
        ask(stop=pb.StopConditions(stop_strings=["x" * 1025])),
        *(INVALID, "INVALID_STOP_STRING", "stop.stop_strings[0]", "(1025 characters)", "1..1024 characters"),
    ),
    "too many stop strings": (
        ask(stop=pb.StopConditions(stop_strings=["x"] * 65)),
        *(INVALID, "TOO_MANY_STOP_STRINGS", "stop.stop_strings", "65", "at most 64"),
    ),
    "long request id": (
        ask(request_id="i" * 257),
        *(INVALID, "INVALID_REQUEST_ID", "request_id", "iii", "at most 256"),
    ),
    "unknown mode": (
        ask(speculation=pb.SpeculationOptions(mode=7)),
        *(INVALID, "UNKNOWN_ENUM_VALUE", "speculation.mode", "7", "MODE_OFF"),
    ),
    "unknown drafter": (
        ask(speculation=pb.SpeculationOptions(drafter="oracle")),
        *(INVALID, "UNKNOWN_DRAFTER", "speculation.drafter", "'oracle'", "mixture, trie, reference, jacobi, none"),
    ),
    "branch length 0": (
        ask(speculation=pb.SpeculationOptions(branch_length=0)),
        *(INVALID, "INVALID_BRANCH_LENGTH", "speculation.branch_length", "0", ">= 1"),
    ),
    "latency target nan": (
        ask(speculation=pb.SpeculationOptions(tpot_target_ms=math.nan)),
        *(INVALID, "INVALID_TPOT_TARGET_MS", "speculation.tpot_target_ms", "nan", "finite and > 0"),
    ),
    "long draft scope": (
        ask(draft_scope="s" * 257),
        *(INVALID, "INVALID_DRAFT_SCOPE", "draft_scope", "sss", "1..256 characters"),
    ),
    "too many references": (
        ask(references=[pb.Reference(text="x")] * 65),
        *(INVALID, "TOO_MANY_REFERENCES", "references", "65", "at most 64"),
    ),
    "an empty reference": (
        ask(references=[pb.Reference()]),
        *(INVALID, "MISSING_CONTENT", "references[0].content", "None", "either text or token_ids"),
    ),
    "references of 5 MB": (
        ask(references=[pb.Reference(token_ids=pb.TokenIds(ids=[5] * 5_000_000))]),
        *(INVALID, "REFERENCES_TOO_LONG", "references", "5000000 tokens", "at most 131072 tokens"),
    ),
    "a reference's token id out of range": (
        ask(references=[pb.Reference(token_ids=pb.TokenIds(ids=[5, VOCAB_SIZE]))]),
        *(INVALID, "TOKEN_ID_OUT_OF_RANGE", "references[0].token_ids[1]", str(VOCAB_SIZE), f"0..{VOCAB_SIZE - 1}"),
    ),
    "a reference in text without a tokenizer": (
        ask(references=[pb.Reference(text="hi")]),
        *(INVALID, "NO_TOKENIZER", "references[0].text", "'hi'", "token_ids"),
    ),
    "a parameter that does not exist": (
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5]), sampling_params=pb.SamplingParams.FromString(b"\x7d\0\0\0\x3f")
        ),
        *(INVALID, "UNKNOWN_FIELD", "sampling_params.#15", "wire type 5", "batchserve.v1.SamplingParams"),
    ),
    **{
        f"{name} out of bounds": (
            ask(sampling_params=pb.SamplingParams(**{name: value})),
            *(INVALID, f"INVALID_{name.upper()}", f"sampling_params.{name}", str(value), bound),
        )
        for name, value, bound in (
            ("min_p", 1.5, "in [0, 1]"),
            ("presence_penalty", -2.5, "in [-2, 2]"),
            ("frequency_penalty", 3.0, "in [-2, 2]"),
            ("repetition_penalty", 0.0, "in [0.01, 100]"),
        )
    },
    "a bias for no token": (
        ask(sampling_params=pb.SamplingParams(logit_bias=pb.LogitBias(token_ids=[5], biases=[]))),
        *(INVALID, "INVALID_LOGIT_BIAS", "sampling_params.logit_bias", "1 token_ids and 0 biases", "a bias for each"),
    ),
    "a bias too large": (
        ask(sampling_params=pb.SamplingParams(logit_bias=pb.LogitBias(token_ids=[5], biases=[200.0]))),
        *(INVALID, "INVALID_LOGIT_BIAS", "sampling_params.logit_bias", "200.0 for token 5", "in [-100, 100]"),
    ),
    "a bias for a token out of range": (
        ask(sampling_params=pb.SamplingParams(logit_bias=pb.LogitBias(token_ids=[VOCAB_SIZE], biases=[1.0]))),
        *(INVALID, "TOKEN_ID_OUT_OF_RANGE", "sampling_params.logit_bias", str(VOCAB_SIZE), f"0..{VOCAB_SIZE - 1}"),
    ),
    "an allowed token out of range": (
        ask(sampling_params=pb.SamplingParams(allowed_token_ids=[5, VOCAB_SIZE])),
        *(INVALID, "TOKEN_ID_OUT_OF_RANGE", "sampling_params.allowed_token_ids[1]", str(VOCAB_SIZE)),
        f"0..{VOCAB_SIZE - 1}",
    ),
    "more allowed tokens than there may be": (
        ask(sampling_params=pb.SamplingParams(allowed_token_ids=[5] * 70_000)),
        *(INVALID, "TOO_MANY_ALLOWED_TOKEN_IDS", "sampling_params.allowed_token_ids", "70000", "at most 65536"),
    ),
    "bad words without a tokenizer": (
        ask(sampling_params=pb.SamplingParams(bad_words=["x"])),
        *(INVALID, "NO_TOKENIZER", "sampling_params.bad_words[0]", "'x'", "token_ids"),
    ),
    "too many bad words": (
        ask(sampling_params=pb.SamplingParams(bad_words=["x"] * 300)),
        *(INVALID, "TOO_MANY_BAD_WORDS", "sampling_params.bad_words", "300", "at most 256"),
    ),
    "more tokens at least than at most": (
        ask(stop=pb.StopConditions(max_tokens=4, min_tokens=5)),
        *(INVALID, "INVALID_MIN_TOKENS", "stop.min_tokens", "5", "at most max_tokens (4)"),
    ),
    "unknown model": (ask(model="gpt-5"), NOT_FOUND, "UNKNOWN_MODEL", "", "'gpt-5'", "the model being served is"),
}


async def test_every_bad_request_has_its_own_error_and_the_rest_of_the_batch_is_unharmed(tiny: Served):
    good = ask(9, 8, 7, max_tokens=300)
    alone = tokens_of(await tiny.client.stream(good))
    is_over = asyncio.Event()

    async def keep_asking() -> list[list[int]]:
        answers = []
        while not is_over.is_set():
            answers.append(tokens_of(await tiny.client.stream(good)))
        return answers

    beside = [asyncio.create_task(keep_asking()) for _ in range(3)]
    for name, (request, code, reason, field, value, bound) in BAD.items():
        for call in (tiny.client.generate(request), tiny.client.stream(request)):
            failed = await failure_of(call)
            assert (failed.code, failed.reason, failed.domain) == (code, reason, "batchserve"), (name, failed)
            assert failed.field == field, name
            assert value in failed.message, (name, failed.message)
            assert bound in failed.message, (name, failed.message)
            if code is INVALID:
                assert failed.violations == ((field, failed.message),), name
                assert failed.value, name
                assert failed.bound, name
    is_over.set()
    for answers in await asyncio.gather(*beside):
        assert answers == [alone] * len(answers)


async def test_duplicate_id_in_flight_is_refused_and_free_again_afterwards(tiny: Served):
    request = ask(max_tokens=CONTEXT - 16, request_id="twice")
    call = aiter(tiny.client.stub.StreamGenerate(request))
    assert (await anext(call)).started.request_id == "twice"
    for second in (tiny.client.generate(request), tiny.client.stream(request)):
        failed = await failure_of(second)
        assert (failed.code, failed.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
        assert "'twice'" in failed.message
    assert [message async for message in call][-1].WhichOneof("event") == "finished"
    assert (await tiny.client.generate(request)).request_id == "twice"


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate", "GetModelInfo"])
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xff" * 64, id="no tag"),
        pytest.param(b"\x0a\x7f\x41", id="a length beyond the end"),
        pytest.param(b"\x0a\x02\xff\xfe", id="not UTF-8"),
        pytest.param(b"\x1a\x03\x0a\x02\x80", id="token_ids end inside a varint"),
        pytest.param(bytes(range(256)), id="all bytes"),
    ],
)
async def test_bytes_that_are_no_message_get_a_status(fake: Served, method: str, data: bytes):
    make = fake.client.channel.unary_stream if method == "StreamGenerate" else fake.client.channel.unary_unary
    call = make(f"/{SERVICE_NAME}/{method}")  # no serializer: the bytes go out as they are
    failed = await failure_of(call(data).read() if method == "StreamGenerate" else call(data))
    if method == "GetModelInfo" and data.startswith(b"\x1a"):
        assert failed.reason == "UNKNOWN_FIELD"  # a well-formed field that this message does not have
    else:
        assert failed.reason == "MALFORMED_MESSAGE"
    assert failed.code is INVALID
    assert await fake.client.health_of() == "SERVING"
    fake.engine.go_on.set()
    assert len((await fake.client.generate(ask())).token_ids) == 2


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate", "GetModelInfo"])
async def test_a_call_without_any_message_gets_a_status(fake: Served, method: str):
    """What a bare POST sends; gRPC alone would leave it unanswered for as long as the connection lasts."""
    call = fake.client.channel.stream_stream(f"/{SERVICE_NAME}/{method}")(iter(()))
    async with asyncio.timeout(20):
        failed = await failure_of(read_all(call))
    assert (failed.code, failed.reason, failed.field) == (INVALID, "MISSING_MESSAGE", "request")


async def test_a_message_is_not_waited_for_without_end(fake: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "MESSAGE_TIMEOUT_S", 0.2)
    call = fake.client.channel.stream_stream(f"/{SERVICE_NAME}/StreamGenerate")()  # nor half-closed
    async with asyncio.timeout(20):
        failed = await failure_of(read_all(call))
    assert (failed.code, failed.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")


async def test_an_unknown_method_is_unimplemented(fake: Served):
    failed = await failure_of(fake.client.channel.unary_unary(f"/{SERVICE_NAME}/Chat")(b""))
    assert failed.code is grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_no_http2_leave_the_server_serving(tiny: Served):
    host, port = tiny.address.rsplit(":", 1)
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1024, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 512):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(junk)
        async with asyncio.timeout(10):
            await reader.read()  # to the end: the server hangs up
        writer.close()
    assert len((await tiny.client.generate(ask())).token_ids) == 8


@pytest.mark.parametrize(("size", "is_accepted"), [(8_500, True), (15_000, True), (17_000, False)])
async def test_metadata_is_refused_beyond_16_kib_and_never_below(tiny: Served, size: int, is_accepted: bool):
    for _ in range(20):
        call = tiny.client.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=(("x", "y" * size),))
        if is_accepted:
            assert (await call).max_model_len == CONTEXT
        else:
            assert (await failure_of(call)).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len((await tiny.client.generate(ask())).token_ids) == 8


async def test_a_message_beyond_the_receive_limit_is_refused_by_the_transport(tiny: Served):
    big = pb.GenerateRequest(text="x" * (17 << 20))
    assert (await failure_of(tiny.client.generate(big))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len((await tiny.client.generate(ask())).token_ids) == 8


async def test_the_messages_that_are_read_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "MIN_READING", 1)
    monkeypatch.setattr(wire, "MAX_READING_BYTES", 1)
    engine: Any = FakeEngine()
    engine.go_on.set()
    made: list[wire.MalformedRequestInterceptor] = []
    own = wire.MalformedRequestInterceptor.__init__

    def noted(self: wire.MalformedRequestInterceptor, *arguments: Any) -> None:
        own(self, *arguments)
        made.append(self)

    monkeypatch.setattr(wire.MalformedRequestInterceptor, "__init__", noted)

    def locked() -> bool:
        return made[0]._reading[""].places.locked()

    async with serving(engine) as served:
        silent = served.client.channel.stream_stream(f"/{SERVICE_NAME}/Generate")()
        await until(locked, 60)
        assert (await failure_of(served.client.generate(ask(), timeout=0.2))).code is grpc.StatusCode.DEADLINE_EXCEEDED
        monkeypatch.setattr(wire, "HURRIED_S", 0.1)  # who says nothing gives way
        assert (await served.client.generate(ask())).text == "ab"
        assert (await failure_of(read_all(silent))).code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await served.client.generate(ask())).text == "ab"
        assert not locked()
