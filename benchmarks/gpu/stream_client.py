"""The clients of gap.py, in a process of their own: streams of one server, read as fast as they come.

Reads one JSON object from stdin, {"address", "method", "requests": [hex, ...]}, starts a stream for each request, and
writes {"messages": n, "errors": [...]} when all have ended. It knows nothing of the messages. Imports only grpc.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc


async def read_all(task: dict[str, Any]) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(task["address"]) as channel:
        call = channel.unary_stream(task["method"])  # without serializers: bytes

        async def read(request: str) -> int:
            return len([message async for message in call(bytes.fromhex(request))])

        done = await asyncio.gather(*(read(request) for request in task["requests"]), return_exceptions=True)
    errors = [repr(each)[:300] for each in done if isinstance(each, BaseException)]
    return {"messages": sum(each for each in done if isinstance(each, int)), "errors": errors}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(read_all(json.loads(sys.stdin.readline())))))
