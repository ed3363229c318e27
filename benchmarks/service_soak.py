"""A long mixed load over HTTP and gRPC, with keys: nothing lost or malformed, no growth, all memory given back.

    python -m benchmarks.service_soak [--minutes 60] [--users 16] [-- OPTIONS OF serve]

A real server with keys of four tenants. Every user asks one request after the other, over HTTP or gRPC: chats and
prompts, whole and streamed, greedy and sampled, with JSON schemas, with tools that must be called, with predictions, in
scopes and without; some are cancelled, some run into their deadline, some are refused, some wait for their tenant's
limit. Each answer is checked: the shape of its stream, its counts, JSON where that was asked for, and that a greedy
answer is the same each time, over both protocols and with every drafter.

Exit status 1 if an answer was lost or malformed, if a process grew by 1 MB a minute or more after the first quarter,
or if K/V memory is in use at the end. Drafts are bounded so that they reach their bound in the first quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np

from batchserve.config import DRAFTERS
from batchserve.demo.server_process import RunningServer, running_server
from batchserve.server.keys import add_key
from batchserve.v1 import generation_pb2 as pb
from batchserve.v1 import generation_pb2_grpc
from benchmarks.common import chat_prompts, write_results
from benchmarks.soak import MB, SAMPLE_S, descendants, process_name, resident_bytes

BOUND_MB_PER_MINUTE = 1.0
WARM = 0.25  # of the time, before memory is looked at
CANCELLED, EXPIRED, REFUSED = 0.08, 0.04, 0.04
SEED = 53
OPTIONS = ["--dtype", "float32", "--max-scope-bytes", "256KiB", "--max-draft-bytes", "2MiB", "--log-level", "error"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "store", "parameters": SCHEMA}}


class Malformed(Exception):
    """An answer that is not as it should be."""


class Load:
    """What the users ask. outcomes: finish reasons, statuses and what else an answer may end in."""

    def __init__(self, server: RunningServer, keys: list[str]) -> None:
        self.server, self.keys = server, keys
        self.outcomes: Counter[str] = Counter()
        self.malformed: list[str] = []
        self.num_tokens = 0
        self.prompts = chat_prompts(200, SEED)
        self.greedy: dict[tuple[str, int], str] = {}
        self.channel = grpc.aio.insecure_channel(server.address, options=[("grpc.enable_http_proxy", 0)])
        self.stub: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)  # type: ignore[no-untyped-call]

    async def ask_forever(self, number: int) -> None:
        draw = random.Random(f"{SEED} {number}")
        while True:
            key = draw.choice(self.keys)
            try:
                ask = self._over_http if draw.random() < 0.5 else self._over_grpc
                self.outcomes[await ask(draw, key)] += 1
            except (Malformed, ConnectionError, ValueError, KeyError, IndexError, AssertionError) as error:
                self.outcomes["malformed"] += 1
                self.malformed.append(f"{type(error).__name__}: {error}"[:500])

    def _same_each_time(self, prompt: str, most: int, text: str) -> None:
        if self.greedy.setdefault((prompt, most), text) != text:
            raise Malformed(f"a greedy answer has changed: {text[:200]!r}")

    async def _over_grpc(self, draw: random.Random, key: str) -> str:
        prompt, most = draw.choice(self.prompts), draw.choice((20, 60, 200))
        is_greedy = draw.random() < 0.6
        request = pb.GenerateRequest(
            text=prompt,
            draft_scope=draw.choice(("", "request", f"scope {draw.randrange(20)}")),
            sampling_params=pb.SamplingParams(temperature=0.0 if is_greedy else 0.9),
            stop=pb.StopConditions(max_tokens=most),
            speculation=pb.SpeculationOptions(drafter=draw.choice(["", "", *DRAFTERS])),
        )
        has_schema = not is_greedy and draw.random() < 0.3
        if has_schema:
            request.structured_output.json_schema = json.dumps(SCHEMA)
        if is_refused := draw.random() < REFUSED:
            request.sampling_params.top_p = 2.0
        metadata = (("authorization", f"Bearer {key}"),)
        timeout = draw.uniform(0.001, 0.1) if draw.random() < EXPIRED else None
        cancel_after = draw.randint(1, 10) if draw.random() < CANCELLED else None
        call = self.stub.StreamGenerate(request, metadata=metadata, timeout=timeout)
        text, count, finished = "", 0, None
        try:
            async for message in call:
                text += message.delta.text
                count += len(message.delta.token_ids)
                if message.HasField("finished"):
                    finished = message.finished
                if cancel_after is not None and (cancel_after := cancel_after - 1) == 0:
                    call.cancel()
                    return "cancelled by the client"
        except grpc.aio.AioRpcError as error:
            code = str(error.code().name)
            expected = {"INVALID_ARGUMENT"} if is_refused else {"RESOURCE_EXHAUSTED"}
            if timeout is not None:
                expected.add("DEADLINE_EXCEEDED")
            if code not in expected:
                raise Malformed(f"grpc {code}: {error.details()}") from None
            return code
        finally:
            self.num_tokens += count
        if finished is None or finished.usage.completion_tokens != count:
            raise Malformed(f"grpc: {count} tokens, finished {finished}")
        reason = pb.FinishReason.Name(finished.finish_reason)
        if is_greedy:
            self._same_each_time(prompt, most, text) if request.sampling_params.top_p != 2.0 else None
        if has_schema and finished.finish_reason == pb.FINISH_REASON_STOP:
            json.loads(text)
        return reason

    async def _over_http(self, draw: random.Random, key: str) -> str:
        prompt, most = draw.choice(self.prompts), draw.choice((20, 60, 200))
        kind = draw.choice(("completion", "completion", "sampled", "schema", "tool", "prediction"))
        body: dict[str, Any] = {"max_tokens": most, "temperature": 0, "return_token_ids": True}
        body["draft_scope"] = draw.choice((None, "request", f"scope {draw.randrange(20)}"))
        body["speculation"] = {"drafter": draw.choice(["", *DRAFTERS])}
        if is_streaming := draw.random() < 0.7:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "/v1/chat/completions"
        if kind in ("completion", "prediction"):
            path, body["prompt"] = "/v1/completions", prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt[:500]}]
        if kind == "prediction":
            body["prediction"] = {"type": "content", "content": self.greedy.get((prompt, most), "") or prompt}
        elif kind == "sampled":
            body["temperature"] = 0.9
        elif kind == "schema":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        elif kind == "tool":
            body |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 300}
        if is_refused := draw.random() < REFUSED:
            body["top_p"] = 2.0
        if has_deadline := draw.random() < EXPIRED:
            body["deadline_s"] = draw.uniform(0.001, 0.1)
        cancel_after = draw.randint(1, 10) if draw.random() < CANCELLED else None
        status, events = await self._send(path, body, key, cancel_after)
        if events is None:
            return "cancelled by the client"
        if status != 200 or "error" in events[-1]:
            code = events[-1]["error"]["code"]
            expected = {"invalid_top_p"} if is_refused else {"quota_exceeded"}
            if code not in expected and not (has_deadline and code == "deadline_exceeded"):
                raise Malformed(f"http {status}: {events[-1]}")
            return str(code)
        text, calls, reason, count, usage = _joined(path, events, is_streaming)
        self.num_tokens += count
        if reason is None or usage["completion_tokens"] != count:
            raise Malformed(f"http: {count} tokens, {reason}, {usage}")
        if path == "/v1/completions":
            self._same_each_time(prompt, most, text)
        elif kind == "schema" and reason == "stop":
            json.loads(text)
        elif kind == "tool" and reason == "tool_calls":
            for arguments in calls:
                json.loads(arguments)
        return str(reason)

    async def _send(
        self, path: str, body: dict[str, Any], key: str, cancel_after: int | None
    ) -> tuple[int, list[dict[str, Any]] | None]:
        """Returns the status, and the events of a stream or the whole body as the only one; None if cancelled."""
        place, data = urlsplit(self.server.url), json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            head = "Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            head += f"Authorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(f"POST {path} HTTP/1.1\r\n{head}".encode() + data)
            if cancel_after is not None and not body.get("stream"):
                await asyncio.sleep(0.002 * cancel_after)
                return 0, None
            status = int((await reader.readline()).split()[1])
            is_stream = False
            while (line := await reader.readline()) not in (b"\r\n", b""):
                is_stream = is_stream or line.lower().startswith(b"content-type: text/event-stream")
            if not is_stream:
                return status, [json.loads(await reader.read())]
            events = []
            async for line in reader:
                if line.startswith(b"data: [DONE]"):
                    return status, events
                if line.startswith(b"data: "):
                    events.append(json.loads(line[6:]))
                    if cancel_after is not None and (cancel_after := cancel_after - 1) == 0:
                        return status, None
            raise Malformed(f"a stream without an end: {events[-1:]}")
        finally:
            writer.close()


def _joined(path: str, events: list[dict[str, Any]], is_streaming: bool) -> tuple[str, list[str], Any, int, Any]:
    """Returns text, arguments of calls, finish reason, number of tokens and usage of an answer."""
    text, calls, reason, count = "", dict[int, str](), None, 0
    for event in events:
        for choice in event["choices"]:
            message = choice if path == "/v1/completions" else choice["delta" if is_streaming else "message"]
            text += message.get("text" if path == "/v1/completions" else "content") or ""
            for i, call in enumerate(message.get("tool_calls") or ()):
                at = call.get("index", i)
                calls[at] = calls.get(at, "") + call["function"].get("arguments", "")
            count += len(choice.get("token_ids") or ())
            reason = choice["finish_reason"] or reason
    return text, [*calls.values()], reason, count, events[-1]["usage"]


async def soak(server: RunningServer, keys: list[str], admin: str, seconds: float, num_users: int) -> dict[str, Any]:
    """Loads and watches for so many seconds."""
    load = Load(server, keys)
    series: dict[int, list[tuple[float, float]]] = {}
    users = [asyncio.create_task(load.ask_forever(number)) for number in range(num_users)]
    began_s = time.monotonic()
    while (now_s := time.monotonic() - began_s) < seconds:
        for pid in descendants():
            if rss := resident_bytes(pid):
                series.setdefault(pid, []).append((now_s, rss / MB))
        if now_s // 60 > (now_s - SAMPLE_S) // 60:
            sizes = [f"{points[-1][1]:.0f}" for points in series.values()]
            print(f"minute {now_s // 60:.0f}: {', '.join(sizes)} MB, {load.num_tokens} tokens", flush=True)
        if failed := next((each for each in users if each.done()), None):
            await failed
        await asyncio.sleep(SAMPLE_S)
    for task in users:
        task.cancel()
    await asyncio.gather(*users, return_exceptions=True)
    metadata = (("authorization", f"Bearer {admin}"),)
    async with asyncio.timeout(60):
        while True:
            stats = await load.stub.GetStats(pb.GetStatsRequest(), metadata=metadata)
            if stats.requests_running == stats.requests_waiting == 0:
                break
            await asyncio.sleep(0.1)
    await load.channel.close()
    lasting = [points for points in series.values() if points[-1][0] > 0.9 * seconds]
    return {
        "seconds": seconds,
        "outcomes": dict(sorted(load.outcomes.items())),
        "malformed": load.malformed,
        "tokens": load.num_tokens,
        "greedy_answers_compared": len(load.greedy),
        "kv_used_tokens_at_the_end": stats.kv_used_tokens,
        "processes": [_summary(process_name(rank), points) for rank, points in enumerate(lasting)],
    }


def _summary(name: str, points: list[tuple[float, float]]) -> dict[str, Any]:
    times, sizes = np.array(points).T
    late = times >= WARM * times[-1]
    slope = float(np.polyfit(times[late] / 60, sizes[late], 1)[0]) if late.sum() > 1 else 0.0
    minutes = [round(float(sizes[times // 60 == minute].mean()), 1) for minute in np.unique(times // 60)]
    return {"name": name, "slope_mb_per_minute": slope, "mb_each_minute": minutes}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.yaml"
        keys = [add_key(path, tenant=name) for name in ("a", "b", "c")]
        keys.append(add_key(path, tenant="few", max_in_flight=2, max_queued=1))
        admin = add_key(path, tenant="house", is_admin=True)
        options = ["--model", "bundled", "--wait-for-drafter", "--keys", str(path), *OPTIONS, *args.options]
        async with running_server(options, print) as server:
            found = await soak(server, keys, admin, args.minutes * 60, args.users)
        return {"users": args.users, "options": [*OPTIONS, *args.options], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("options", nargs="*", help="options of serve, after --")
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    print(json.dumps(found, indent=1))
    if args.minutes >= 60:
        print(write_results("service_soak", found), flush=True)
    has_grown = any(each["slope_mb_per_minute"] >= BOUND_MB_PER_MINUTE for each in found["processes"])
    if found["malformed"] or has_grown or found["kv_used_tokens_at_the_end"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
