"""The clients of benchmarks/front_cost.py: front_client.py grpc|http TARGET STREAMS TOKENS. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from itertools import pairwise
from urllib.parse import urlsplit

PROMPT = "def f(x):\n    total = {}\n"


async def over_grpc(target: str, streams: int, tokens: int) -> list[list[float]]:
    import grpc

    from batchserve.v1 import generation_pb2 as pb
    from batchserve.v1 import generation_pb2_grpc

    async def one(i: int) -> list[float]:
        request = pb.GenerateRequest(text=PROMPT.format(i), stop=pb.StopConditions(max_tokens=tokens, ignore_eos=True))
        return [
            time.perf_counter()
            async for message in stub.StreamGenerate(request)
            if message.WhichOneof("event") == "delta"
        ]

    async with grpc.aio.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return await asyncio.gather(*map(one, range(streams)))


async def over_http(target: str, streams: int, tokens: int) -> list[list[float]]:
    url = urlsplit(target)

    async def one(i: int) -> list[float]:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        asked = {"prompt": PROMPT.format(i), "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        head = "Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}".encode() + body)
        times = [time.perf_counter() async for line in reader if line.startswith(b"data: {")]
        writer.close()
        return times

    return await asyncio.gather(*map(one, range(streams)))


def main() -> None:
    kind, target, streams, tokens = sys.argv[1:]
    run = over_grpc if kind == "grpc" else over_http
    found = asyncio.run(run(target, int(streams), int(tokens)))
    gaps = [after - before for times in found for before, after in pairwise(times)]
    print(json.dumps({"deltas": sum(map(len, found)), "gaps_s": gaps}))


if __name__ == "__main__":
    main()
