"""Four times as many requests as the server can answer: does it go on answering as many as it can?

    python -m benchmarks.overload [--seconds 30] [--rounds 3] [--factor 4]
    python -m benchmarks.overload --burn 0.23       # what a process that takes so much of a core costs by itself

A real server with the bundled model, places for 16 requests and 32 that wait. Its peak is measured with 48 callers who
each ask one request after the other, then requests come over HTTP at four times that rate (Poisson arrivals), whether
or not earlier ones were answered. Goodput is what is answered in a second. A request that finds no place is refused at
once; how long that takes is measured at the client, and each refusal must say when to ask again. With --burn there is
no overload: the same 48 callers ask beside a process that has nothing to do with the server. The rounds of both take
turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from batchserve.demo.prompts import PROMPTS
from batchserve.demo.server_process import running_server
from benchmarks.common import spread, write_results
from benchmarks.front_cost import cpu_s

OPTIONS = ["--model", "bundled", "--wait-for-drafter", "--log-level", "error"]
OPTIONS += ["--max-num-seqs", "16", "--max-waiting", "32"]
CALLERS, MAX_TOKENS = 48, 64
BURN_S = 0.0005  # that the other process computes at a stretch
BURN = (
    "import time\nwhile True:\n t = time.perf_counter()\n while time.perf_counter() - t < {0}: pass\n time.sleep({1})"
)
WARM = 0.2  # of a round, before answers are counted


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children, the engine's first."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for file in found for each in file.read_text().split()]


class Calls:
    """What came of the calls of a round."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self.address = place.hostname, place.port
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []  # connections, kept alive
        self.outcomes: Counter[str] = Counter()
        self.answered_s: list[float] = []
        self.refused_s: list[float] = []
        self.without_hint = 0

    async def one(self, i: int) -> None:
        begun_s = time.perf_counter()
        body = {
            "prompt": PROMPTS[i % len(PROMPTS)].text,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        }
        data = json.dumps(body).encode()
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection(*self.address)
        head = "Host: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(answer.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        self.idle.append((reader, writer))
        status = answer.split(b" ", 2)[1].decode()
        self.outcomes[status] += 1
        if status == "200":
            self.answered_s.append(time.perf_counter())
        if status == "429":
            self.refused_s.append(time.perf_counter() - begun_s)
            self.without_hint += b"retry-after" not in answer

    def per_s(self, begun_s: float, seconds: float) -> float:
        """Answers a second, without a round's beginning and its end."""
        first_s, last_s = begun_s + WARM * seconds, begun_s + seconds
        return sum(first_s <= at_s < last_s for at_s in self.answered_s) / (last_s - first_s)


async def closed(url: str, seconds: float) -> float:
    """Answers a second to callers who ask one request after the other."""
    calls, ends_s = Calls(url), time.perf_counter() + seconds

    async def caller(number: int) -> None:
        i = number
        while time.perf_counter() < ends_s:
            await calls.one(i)
            i += CALLERS

    begun_s = time.perf_counter()
    await asyncio.gather(*map(caller, range(CALLERS)))
    return calls.per_s(begun_s, seconds)


async def open_loop(url: str, seconds: float, rate: float, draw: random.Random) -> tuple[float, Calls]:
    """Answers a second to requests that come at this rate, and what came of all."""
    calls, tasks = Calls(url), []
    begun_s = next_s = time.perf_counter()
    i = 0
    while next_s < begun_s + seconds:
        await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
        tasks.append(asyncio.create_task(calls.one(i)))
        i += 1
        next_s += draw.expovariate(rate)
    await asyncio.gather(*tasks)
    return calls.per_s(begun_s, seconds), calls


@asynccontextmanager
async def burning(share: float) -> AsyncIterator[None]:
    """Runs a process that takes this share of a core."""
    code = BURN.format(BURN_S, BURN_S / share - BURN_S)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(0)
    peaks, goodputs, refused_s, outcomes, without_hint = [], [], [], Counter[str](), 0
    used_s: dict[str, list[float]] = {"client": [], "server": [], "engine": []}
    async with running_server(OPTIONS, print) as server:
        await closed(server.url, 5.0)  # warms up
        for _ in range(args.rounds):
            peaks.append(await closed(server.url, args.seconds))
            pids = {"client": os.getpid(), "server": server.pid, "engine": children_of(server.pid)[0]}
            before = {name: cpu_s(pid) for name, pid in pids.items()}
            if args.burn:
                async with burning(args.burn):
                    goodput, calls = await closed(server.url, args.seconds), Calls(server.url)
            else:
                goodput, calls = await open_loop(server.url, args.seconds, args.factor * peaks[-1], draw)
            for name, pid in pids.items():
                used_s[name].append((cpu_s(pid) - before[name]) / args.seconds)
            goodputs.append(goodput)
            refused_s += calls.refused_s
            outcomes += calls.outcomes
            without_hint += calls.without_hint
            print(f"peak {peaks[-1]:.1f}, goodput {goodput:.1f} a second, {dict(calls.outcomes)}", flush=True)
    p50, p99 = np.percentile(refused_s, (50, 99)) * 1e3 if refused_s else (0.0, 0.0)
    return {
        "options": OPTIONS,
        "factor": args.factor,
        "burn": args.burn,
        "peak_per_s": spread(peaks),
        "goodput_per_s": spread(goodputs),
        "goodput_over_peak": spread([good / peak for good, peak in zip(goodputs, peaks, strict=True)]),
        "cores_used_in_overload": {name: spread(each) for name, each in used_s.items()},
        "outcomes": dict(outcomes),
        "refusals_without_hint": without_hint,
        "refusal_p50_ms": float(p50),
        "refusal_p99_ms": float(p99),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--factor", type=float, default=4.0, help="requests that come, over those of the peak")
    parser.add_argument("--burn", type=float, default=0.0, help="instead: the share of a core that a process takes")
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    print(json.dumps(found, indent=1))
    kind = f"_burn_{args.burn:g}" if args.burn else "" if args.factor == 4 else f"_{args.factor:g}"
    print(write_results(f"overload{kind}", found), flush=True)


if __name__ == "__main__":
    main()
