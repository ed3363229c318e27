"""What one greedy request passes: files, functions and, in a step, Python calls of batchserve.

    python -m benchmarks.request_path [--requests 1] [--max-tokens 64]

A server, its engine and its client run in this process. Calls are counted by Python's own profiler hook, so what
compiled code does is not in them. Functions of generated code are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import batchserve
from batchserve.config import EngineConfig
from batchserve.engine.async_engine import AsyncEngine
from batchserve.engine.engine_core import EngineCore
from batchserve.server.lifecycle import GenerationServer
from batchserve.server_config import ServerConfig
from batchserve.v1 import generation_pb2 as pb
from benchmarks.common import chat_prompts, write_results

PACKAGE = str(Path(batchserve.__file__).parent) + "/"
GENERATED = PACKAGE + "v1/"
STEP = EngineCore.step.__code__


class CallCounter:
    """Counts calls of this package's functions, in all threads that begin while it is installed."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.num_steps = 0
        self.step_calls: list[int] = []  # of each step
        self._depth = threading.local()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.is_on or not code.co_filename.startswith(PACKAGE) or code.co_filename.startswith(GENERATED):
            return
        is_in_step = getattr(self._depth, "is_in_step", False)
        if event == "call":
            self.calls[code] += 1
            if code is STEP:
                self._depth.is_in_step = True
                self.step_calls.append(0)
            elif is_in_step:
                self.step_calls[-1] += 1
        elif event == "return" and code is STEP:
            self._depth.is_in_step = False


async def count(num_requests: int, max_tokens: int) -> dict[str, Any]:
    import grpc

    from batchserve.v1 import generation_pb2_grpc

    counter = CallCounter()
    threading.setprofile(counter)
    engine = await AsyncEngine.start(EngineConfig(model="bundled", wait_for_drafter=True))
    server = GenerationServer(ServerConfig(port=0, http_port=0), "0")
    address = await server.bind()
    await server.open(engine)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def ask(prompt: str) -> None:
            request = pb.GenerateRequest(
                text=prompt,
                sampling_params=pb.SamplingParams(temperature=0.0),
                stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
            )
            async for _ in stub.StreamGenerate(request):
                pass

        prompts = chat_prompts(2 * num_requests, 5)
        await asyncio.gather(*map(ask, prompts[:num_requests]))
        sys.setprofile(counter)
        counter.is_on = True
        await asyncio.gather(*map(ask, prompts[num_requests:]))
        counter.is_on = False
        sys.setprofile(None)
    threading.setprofile(None)
    await server.drain()
    await engine.shutdown()
    steps = sorted(counter.step_calls)
    return {
        "requests": num_requests,
        "files": len({code.co_filename for code in counter.calls}),
        "functions": len(counter.calls),
        "steps": len(steps),
        "calls_a_step": steps[len(steps) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    cells = [asyncio.run(count(number, args.max_tokens)) for number in args.requests]
    for cell in cells:
        print(cell)
    print(f"written to {write_results('request_path', {'cells': cells})}")


if __name__ == "__main__":
    main()
