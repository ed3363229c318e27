"""Fuzzed requests over HTTP and gRPC, with neighbours that must not notice.

    python -m benchmarks.fuzz [--requests 10000] [--seed 0]

A real server with the bundled model. Eight neighbours stream the same answers again and again, half of them over each
protocol, while so many fuzzed requests go to each protocol: bodies with fields that are of other types, out of bounds,
unknown, missing or torn; bytes that are no HTTP; messages with flipped, torn and inserted bytes. It fails if a request
is answered with an internal error (500, INTERNAL, UNKNOWN), if the server ends, or if an answer of a neighbour changes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from copy import deepcopy
from typing import Any
from urllib.parse import urlsplit

import grpc

from batchserve.demo.prompts import PROMPTS
from batchserve.demo.server_process import running_server
from batchserve.v1 import generation_pb2 as pb
from batchserve.v1 import generation_pb2_grpc
from benchmarks.common import write_results

WORKERS = 8  # for each protocol
NEIGHBOURS = 8
PATIENCE_S = 3.0  # with a fuzzed request; then its client goes away
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 16, 10**6, 2**31, 2**63, 2**64, -(2**70), 0.5, -0.5, 1e308, 1e-320, 3.7),
    *("", "x", "auto", "none", "json_object", "\x00", "\ud800", "é" * 50, "x" * 5000, "{", "1", "<|user|>"),
    *([], [None], [1], ["a"], [[1]], [[]], ["x"] * 300, [1] * 5000, {}, {"a": 1}, {"type": "text"}, {"1": 5}),
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    {"type": "function", "function": {"name": "f"}},
    [{"role": "user", "content": "x"}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
        **{"max_tokens": 3, "temperature": 0.7, "seed": 1, "stop": ["x"], "logprobs": True, "top_logprobs": 2},
        **{"stream": True, "stream_options": {"include_usage": True}, "n": 1, "logit_bias": {"5": 1}},
    },
    "/v1/completions": {
        **{"prompt": "def f():", "max_tokens": 3, "echo": True, "logprobs": 1, "stream": False, "top_k": 5},
        **{
            "references": ["a b c"],
            "speculation": {"drafter": "trie"},
            "draft_scope": "s",
            "guided_choice": ["a", "b"],
        },
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        **{"max_output_tokens": 3, "stream": True, "instructions": "y", "text": {"format": {"type": "text"}}},
    },
    "/tokenize": {"prompt": "a b", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
KNOWN_FIELDS = sorted(
    {name for body in BODIES.values() for name in body}
    | {
        "tools",
        "tool_choice",
        "response_format",
        "prediction",
        "deadline_s",
        "priority",
        "request_id",
        "model",
        "store",
    }
    | {"structured_outputs", "parallel_tool_calls", "prompt_logprobs", "min_tokens", "bad_words", "user", "cache_salt"}
)


def fuzzed_body(draw: random.Random) -> tuple[str, bytes]:
    """A path, and a body that is mostly JSON."""
    path = draw.choice([*BODIES])
    body = json.loads(json.dumps(BODIES[path]))
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        _mutate(draw, body)
    if draw.random() < 0.1:
        body[draw.choice(("foo", "n ", "Messages", "\ud800"))] = deepcopy(draw.choice(VALUES))
    data = json.dumps(body).encode()
    kind = draw.random()
    if kind < 0.08:
        return path, data[: draw.randrange(len(data))]
    if kind < 0.16:
        return path, _torn(draw, data)
    return path, data


def _mutate(draw: random.Random, value: Any) -> None:
    """Changes one place in a JSON value, deep inside or at its top."""
    if isinstance(value, dict):
        key = draw.choice([*value, *KNOWN_FIELDS]) if draw.random() < 0.6 or not value else draw.choice([*value])
        if isinstance(value.get(key), dict | list) and draw.random() < 0.5:
            _mutate(draw, value[key])
        elif draw.random() < 0.15:
            value.pop(key, None)
        else:
            value[key] = deepcopy(draw.choice(VALUES))
    elif value:
        at = draw.randrange(len(value))
        if isinstance(value[at], dict | list) and draw.random() < 0.6:
            _mutate(draw, value[at])
        else:
            value[at] = deepcopy(draw.choice(VALUES))


def _torn(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(changed) + 1)
        kind = draw.randrange(3)
        if kind == 0:
            changed[at:at] = bytes([draw.randrange(256)])
        elif kind == 1:
            del changed[at : at + draw.randrange(1, 9)]
        elif at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
    return bytes(changed)


def fuzzed_http(draw: random.Random) -> bytes:
    """A whole request, mostly sound as HTTP."""
    path, body = fuzzed_body(draw)
    length = len(body) if draw.random() < 0.97 else draw.choice((0, len(body) + 7, -1, 10**12))
    head = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(length),
        "Connection": "close",
    }
    if draw.random() < 0.05:
        head.pop(draw.choice([*head]))
    if draw.random() < 0.03:
        head["Host"] = draw.choice(("attacker.example", "", "[", "localhost:99999"))
    method = "POST" if draw.random() < 0.97 else draw.choice(("GET", "PUT", "OPTIONS", "BREW"))
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    data = f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body
    return _torn(draw, data) if draw.random() < 0.04 else data


METHODS = ("Generate", "StreamGenerate", "StreamGenerate", "GetModelInfo", "Tokenize", "Detokenize", "GetStats")
# What a field of a message may become, by its path.
MUTATIONS: dict[str, tuple[Any, ...]] = {
    "text": ("", "x" * 3000, "\x00", "a" * 200_000),
    "model": ("bundled", "other"),
    "request_id": ("a", "x" * 300, "\n"),
    "priority": (5, -1000, 1001, 2**31 - 1),
    "draft_scope": ("request", "s" * 256, "s" * 257),
    "sampling_params.temperature": (1.0, -1.0, float("nan"), float("inf"), 1e38),
    "sampling_params.top_p": (0.5, 0.0, 2.0),
    "sampling_params.top_k": (5, 2**32 - 1),
    "sampling_params.min_p": (0.5, 1.5),
    "sampling_params.n": (2, 0, 65),
    "sampling_params.repetition_penalty": (1.5, 0.0, 1e9),
    "sampling_params.no_repeat_ngram_size": (2, 2**32 - 1),
    "stop.max_tokens": (1, 0, 2**32 - 1),
    "stop.min_tokens": (2, 2**32 - 1),
    "output.logprobs": (2, 21),
    "output.prompt_logprobs": (1, 21),
    "output.echo": (True,),
    "speculation.drafter": ("trie", "none", "magic"),
    "speculation.max_draft_tokens": (0, 9, 2**32 - 1),
    "speculation.tpot_target_ms": (5.0, -1.0, float("nan")),
    "structured_output.regex": ("[a-z]+", "(", "(?=a)", "a{1,100000}"),
    "structured_output.json_schema": ('{"type": "object"}', "{", '{"type": "strange"}', "[" * 60_000),
    "structured_output.json_object": (True,),
    "chat.chat_template_kwargs": ("{}", "[", '{"tools": 1}'),
}


def fuzzed_message(draw: random.Random) -> tuple[str, bytes]:
    """A method and the bytes of a message, mostly one that parses."""
    request = pb.GenerateRequest(text="def f():", stop=pb.StopConditions(max_tokens=3))
    for path in draw.sample([*MUTATIONS], draw.choice((0, 1, 1, 2, 3))):
        *holders, name = path.split(".")
        holder: Any = request
        for each in holders:
            holder = getattr(holder, each)
        setattr(holder, name, draw.choice(MUTATIONS[path]))
    data = request.SerializeToString()
    return draw.choice(METHODS), _torn(draw, data) if draw.random() < 0.3 else data


async def send_http(url: str, data: bytes) -> str:
    """The status of the answer, "gone" where the client has lost patience, "closed" where there was none."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    status = ""
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(data)
            line = await reader.readline()
            status = line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"
            rest = await reader.read()
            if b'"code": "internal"' in rest or b'"code":"internal"' in rest:
                return "500"
            return status
    except TimeoutError:
        return f"{status} gone".strip()
    except ConnectionError:
        return status or "closed"
    finally:
        writer.close()


async def send_grpc(channel: grpc.aio.Channel, method: str, data: bytes) -> str:
    call = channel.unary_stream(f"/batchserve.v1.GenerationService/{method}")
    try:
        async for _ in call(data, timeout=PATIENCE_S):
            pass
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


class Neighbour:
    """Asks the same again and again, and compares."""

    def __init__(self, i: int, url: str, channel: grpc.aio.Channel) -> None:
        self.text, self.is_http = PROMPTS[i % len(PROMPTS)].text, i % 2 == 0
        self.url, self.channel = url, channel
        self.expected = ""
        self.num_answers, self.faults = 0, Counter[str]()

    async def ask(self) -> str:
        if self.is_http:
            body = {"prompt": self.text, "max_tokens": 200, "temperature": 0, "stream": True}
            data = json.dumps(body).encode()
            place = urlsplit(self.url)
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            head = "Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            head += f"Content-Length: {len(data)}\r\n"
            writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + data)
            events = [json.loads(line[6:]) async for line in reader if line.startswith(b"data: {")]
            writer.close()
            assert events[-1]["choices"][0]["finish_reason"], events[-1]
            return "".join(event["choices"][0]["text"] for event in events)
        stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        request = pb.GenerateRequest(
            text=self.text, sampling_params=pb.SamplingParams(temperature=0), stop=pb.StopConditions(max_tokens=200)
        )
        return "".join([message.delta.text async for message in stub.StreamGenerate(request)])

    async def run(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            try:
                found = await self.ask()
                self.faults["changed"] += found != self.expected
                self.num_answers += 1
            except Exception as error:
                self.faults[f"{type(error).__name__}: {error}"[:200]] += 1


async def fuzz(url: str, address: str, num_requests: int, seed: int) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        neighbours = [Neighbour(i, url, channel) for i in range(NEIGHBOURS)]
        for neighbour in neighbours:
            neighbour.expected = await neighbour.ask()
        is_over = asyncio.Event()
        running = [asyncio.create_task(neighbour.run(is_over)) for neighbour in neighbours]
        statuses: dict[str, Counter[str]] = {"http": Counter(), "grpc": Counter()}
        bad: list[str] = []
        draw = random.Random(seed)
        numbers = {kind: iter(range(num_requests)) for kind in statuses}

        async def work(kind: str) -> None:
            for i in numbers[kind]:
                if kind == "http":
                    data = fuzzed_http(draw)
                    status = await send_http(url, data)
                else:
                    method, data = fuzzed_message(draw)
                    status = await send_grpc(channel, method, data)
                statuses[kind][status] += 1
                if status in ("500", "INTERNAL", "UNKNOWN"):
                    bad.append(f"{kind} {i}: {status}: {data[:2000]!r}")
                if i % 1000 == 999:
                    print(kind, i + 1, dict(statuses[kind]), flush=True)

        await asyncio.gather(*(work(kind) for kind in statuses for _ in range(WORKERS)))
        is_over.set()
        await asyncio.gather(*running)
        faults: Counter[str] = sum((neighbour.faults for neighbour in neighbours), Counter())
        return {
            "requests": num_requests,
            "seed": seed,
            "statuses": {kind: dict(sorted(each.items())) for kind, each in statuses.items()},
            "internal_errors": bad,
            "neighbours": NEIGHBOURS,
            "neighbours_answers": sum(neighbour.num_answers for neighbour in neighbours),
            "neighbours_faults": {name: count for name, count in faults.items() if count},
        }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    options = ["--model", "bundled", "--wait-for-drafter", "--log-level", "error", "--dtype", "float32"]
    async with running_server(options, print) as server:
        return await fuzz(server.url, server.address, args.requests, args.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    print(json.dumps(found, indent=1))
    if args.requests >= 10_000:
        print(write_results("fuzz", found), flush=True)
    if found["internal_errors"] or found["neighbours_faults"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
