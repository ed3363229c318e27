"""Messages of the greatest size hold up nobody: what would take long to parse is refused by its bytes."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from google.protobuf.message import Message

from batchserve.errors import InvalidRequestError
from batchserve.server.grpc import wire_sizes
from batchserve.server.grpc.servicer import SERVICE_NAME
from batchserve.server.grpc.wire_sizes import SMALL_MESSAGE_BYTES, check_sizes
from batchserve.server_config import ServerConfig
from batchserve.v1 import generation_pb2 as pb
from tests.server.harness import Served, failure_of, read_all

pytestmark = pytest.mark.faults
MAX_MODEL_LEN = 64
SIZE = ServerConfig().max_receive_bytes - 64
ASK, IDS, REFERENCE, STOP = pb.GenerateRequest.DESCRIPTOR, b"\x1a", b"\x4a", b"\x32"


def varint(value: int) -> bytes:
    low, high = value & 127, value >> 7
    return bytes([low | 128]) + varint(high) if high else bytes([low])


def sized(tag: bytes, content: bytes) -> bytes:
    return tag + varint(len(content)) + content


# name -> (bytes, reason, field)
LARGE = {
    "ids": (sized(IDS, sized(b"\x0a", b"\5" * SIZE)), "PROMPT_TOO_LONG", "token_ids"),
    "ids that are not packed": (sized(IDS, b"\x08\5" * (SIZE // 2)), "PROMPT_TOO_LONG", "token_ids"),
    "empty ids": (b"\x1a\0" * (SIZE // 2), "TOO_MANY_FIELDS", "token_ids"),
    "text": (sized(b"\x12", b"a" * SIZE), "PROMPT_TOO_LONG", "text"),
    "text again and again": (sized(b"\x12", b"a" * 8000) * (SIZE // 8004), "PROMPT_TOO_LONG", "text"),
    "empty references": (b"\x4a\0" * (SIZE // 2), "TOO_MANY_REFERENCES", "references"),
    "ids of a reference": (sized(REFERENCE, sized(b"\x12", sized(b"\x0a", b"\5" * SIZE))), "REFERENCES_TOO_LONG", ""),
    "text of a reference": (sized(REFERENCE, sized(b"\x0a", "é".encode() * (SIZE // 2))), "REFERENCES_TOO_LONG", ""),
    "empty stop strings": (sized(STOP, b"\x12\0" * (SIZE // 2)), "TOO_MANY_STOP_STRINGS", "stop.stop_strings"),
    "a stop string": (sized(STOP, sized(b"\x12", b"a" * SIZE)), "INVALID_STOP_STRING", "stop.stop_strings"),
    "stop ids": (sized(STOP, sized(b"\x1a", b"\5" * SIZE)), "TOO_MANY_STOP_TOKEN_IDS", "stop.stop_token_ids"),
    "a priority again and again": (b"\x58\1" * (SIZE // 2), "TOO_MANY_FIELDS", "priority"),
    "an id": (sized(b"\x0a", b"a" * SIZE), "INVALID_REQUEST_ID", "request_id"),
    "a model": (sized(b"\x22", b"a" * SIZE), "INVALID_MODEL", "model"),
    "unknown fields": (b"\xa0\6\1" * (SIZE // 3), "UNKNOWN_FIELD", "#100"),
    "an unknown field": (sized(b"\x7a", b"a" * SIZE), "UNKNOWN_FIELD", "#15"),
    "unknown groups": (b"\x63\x64" * (SIZE // 2), "UNKNOWN_FIELD", "#12"),
    "a field of another type": (sized(b"\x58", b"a" * SIZE)[:SIZE], "MALFORMED_MESSAGE", "request"),
    "no message": (b"\xff" * SIZE, "MALFORMED_MESSAGE", "request"),
    "a length beyond the end": (b"\x12" + varint(1 << 40) + b"a" * SIZE, "MALFORMED_MESSAGE", "request"),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_takes_long_to_parse_is_refused_by_its_bytes(name: str):
    data, reason, field = LARGE[name]
    with pytest.raises(InvalidRequestError) as caught:
        check_sizes(data, ASK, MAX_MODEL_LEN)
    if name != "a field of another type":  # what follows the wrong type is read as another one
        assert (caught.value.reason, caught.value.field) == (reason, field or "references")


def test_large_requests_that_can_be_served_pass():
    references = [pb.Reference(token_ids=pb.TokenIds(ids=range(2000))) for _ in range(63)]
    request = pb.GenerateRequest(
        text="é" * 30_000,
        references=[*references, pb.Reference(text="x" * 1_048_576)],
        sampling_params=pb.SamplingParams(temperature=0.5, top_p=0.5, top_k=3, seed=2**64 - 1),
        stop=pb.StopConditions(stop_strings=["é" * 1024] * 64, stop_token_ids=range(1024), ignore_eos=True),
        speculation=pb.SpeculationOptions(tpot_target_ms=3.5, drafter="none", max_draft_tokens=0),
        output=pb.OutputOptions(skip_special_tokens=False),
        priority=-5,
    )
    assert request.ByteSize() > SMALL_MESSAGE_BYTES
    check_sizes(request.SerializeToString(), ASK, 1000)
    check_sizes(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1] * 9999)).SerializeToString(), ASK, 10_000)
    check_sizes(pb.GetModelInfoRequest(model="x" * 20_000).SerializeToString(), pb.GetModelInfoRequest.DESCRIPTOR, 1)


def test_every_field_of_the_protocol_is_known(monkeypatch: pytest.MonkeyPatch):
    """A field of a new kind must be given its wire type here."""
    monkeypatch.setattr(wire_sizes, "SMALL_MESSAGE_BYTES", 0)
    for message in every_field(pb.GenerateRequest()):
        check_sizes(message.SerializeToString(), type(message).DESCRIPTOR, MAX_MODEL_LEN)


def every_field(message: Message) -> list[Message]:
    """Messages with one field each, at any depth."""
    found = []
    for field in message.DESCRIPTOR.fields:
        alone = type(message)()
        value = getattr(alone, field.name)
        if field.message_type is None:
            part = 1 if isinstance(value, int | float) else "a"
            value.append("a" if field.type == field.TYPE_STRING else 1) if field.is_repeated else setattr(
                alone, field.name, part
            )
        else:
            inner = value.add() if field.is_repeated else value
            inner.SetInParent()
            found += every_field(type(inner)())
        found.append(alone)
    return found


async def test_calls_of_the_greatest_size_hold_up_the_loop_for_less_than_parsing_one(fake: Served):
    """Parsing millions of tiny fields takes some hundred times as long as to read their sizes."""
    data = LARGE["empty stop strings"][0]  # timed by the processor: the machine may be busy
    started_s = time.thread_time()
    pb.GenerateRequest.FromString(data)
    parse_s = time.thread_time() - started_s
    gaps, is_over = [0.0], asyncio.Event()

    async def tick() -> None:
        times = [time.thread_time()]
        while not is_over.is_set():
            await asyncio.sleep(0)
            times.append(time.thread_time())
            gaps.append(times[-1] - times.pop(0))

    for name in ("empty stop strings", "empty references", "ids", "unknown fields", "text"):
        send = fake.client.channel.unary_unary(f"/{SERVICE_NAME}/Generate")
        ticking = asyncio.create_task(tick())
        failed = await failure_of(send(LARGE[name][0]))
        is_over.set()
        await ticking
        is_over.clear()
        assert failed.reason == LARGE[name][1]
    assert sorted(gaps)[-1] < parse_s / 2


@pytest.mark.parametrize(
    ("content", "reason"), [(b"\x0a\0" * (SIZE // 2), "MESSAGE_TOO_LARGE"), (b"\xff", "MALFORMED_MESSAGE")]
)
@pytest.mark.parametrize(
    "method",
    [
        *("grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch", "grpc.health.v1.Health/List"),
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_other_services_parse_no_large_message(method: str, content: bytes, reason: str, fake: Served):
    call = fake.client.channel.stream_stream(f"/{method}")(iter([content]))
    failed = await failure_of(read_all(call))
    assert (failed.code, failed.reason, failed.field) == (grpc.StatusCode.INVALID_ARGUMENT, reason, "request")
    assert await fake.client.health_of() == "SERVING"
    assert fake.server._calls.failed_calls[reason] == 1
