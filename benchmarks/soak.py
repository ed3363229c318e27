"""Memory of a server under a long mixed load: does any of its processes go on growing?

    python -m benchmarks.soak [--minutes 60] [--model bundled] [--users 16] [-- OPTIONS OF serve]
    python -m benchmarks.soak --minutes 10 --scarce 2600 --name soak_scarce

A real server on loopback. Every user asks one request after the other: prompts of one to thousands of tokens, greedy
and sampled, with every drafter, with references, in shared and in private scopes, streamed and whole; some are
cancelled, some run into their deadline, some are refused. How many users ask at once changes every few seconds.

Resident memory of each process is read every few seconds. The slope over the second half, by least squares, must stay
below 1 MB a minute in every process (exit status 1 otherwise): by then caches with a bound have reached it. Nor may a
call end in a fault of the server.

--scarce: each process of the server has so many MiB of address space (`ulimit -v`), and can write no file of more than
4 KB, as on a full disk. Then requests may end in RESOURCE_EXHAUSTED, and the server must go on.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from batchserve.config import DRAFTERS
from batchserve.demo.server_process import running_server
from batchserve.server.grpc.client import GenerationClient, RemoteError
from batchserve.v1 import generation_pb2 as pb
from benchmarks.common import chat_prompts, write_results

BOUND_MB_PER_MINUTE = 1.0
SAMPLE_S = 5.0
LULL_S = 10.0  # for so long the number of users who ask stays the same
CANCELLED, EXPIRED, REFUSED = 0.08, 0.03, 0.03  # shares of the requests
SEED = 48
SMALL_FILE = 4096  # bytes: progress and sockets need files, too
FAULTS = {"INTERNAL", "UNKNOWN", "UNAVAILABLE"}  # statuses that only a server at fault gives
MB = 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--name", default="soak", help="of the JSON under benchmarks/results")
    parser.add_argument("--scarce", type=int, metavar="MIB", help="address space of each process; and a full disk")
    parser.add_argument("options", nargs="*", help="options of serve, after --")
    arguments = parser.parse_args()
    options = ["--model", arguments.model, *arguments.options]
    payload = asyncio.run(run(options, arguments.minutes * 60, arguments.users, arguments.scarce))
    asked = {name: getattr(arguments, name) for name in ("model", "options", "users", "scarce")}
    payload = asked | payload
    path = write_results(arguments.name, payload)
    for process in payload["processes"]:
        print(
            f"{process['name']}: {process['first_mb']:.0f} MB at first, {process['last_mb']:.0f} MB at the end; "
            f"second half {process['slope_mb_per_minute']:+.2f} MB a minute (bound {BOUND_MB_PER_MINUTE:g})"
        )
    print(f"{payload['outcomes']}, {payload['tokens']} tokens; written to {path}")
    has_grown = any(each["slope_mb_per_minute"] >= BOUND_MB_PER_MINUTE for each in payload["processes"])
    return int(has_grown or not FAULTS.isdisjoint(payload["outcomes"]))


async def run(options: list[str], seconds: float, num_users: int, scarce_mib: int | None) -> dict[str, Any]:
    """Start a server and load it."""
    async with AsyncExitStack() as stack:
        with few_resources(scarce_mib):
            server = await stack.enter_async_context(running_server(options, print))
            address = server.address
        async with GenerationClient(address) as client:
            await client.wait_until_serving()
        found = await soak(address, seconds, num_users)
        async with GenerationClient(address) as client, asyncio.timeout(60):
            await client.wait_until_serving()
        return found


@contextmanager
def few_resources(mebibytes: int | None) -> Iterator[None]:
    """Processes that are started inside have so much address space, and a disk that is full."""
    limits = {} if mebibytes is None else {resource.RLIMIT_AS: mebibytes << 20, resource.RLIMIT_FSIZE: SMALL_FILE}
    before = {which: resource.getrlimit(which) for which in limits}
    for which, limit in limits.items():
        resource.setrlimit(which, (limit, before[which][1]))
    try:
        yield
    finally:
        for which, limit_before in before.items():
            resource.setrlimit(which, limit_before)


async def soak(address: str, seconds: float, num_users: int) -> dict[str, Any]:
    """Load and watch for so many seconds; what came of it, for the results."""
    load = Load(num_users)
    series: dict[int, list[tuple[float, float]]] = {}
    async with GenerationClient(address) as client:
        users = [asyncio.create_task(load.ask_forever(client, number)) for number in range(num_users)]
        tide = asyncio.create_task(load.change_number())
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
        for task in (*users, tide):
            task.cancel()
        await asyncio.gather(*users, tide, return_exceptions=True)
    lasting = {pid: points for pid, points in series.items() if points[-1][0] > 0.9 * seconds}
    return {
        "seconds": seconds,
        "outcomes": dict(load.outcomes),
        "tokens": load.num_tokens,
        "processes": [summary(process_name(rank), points) for rank, points in enumerate(lasting.values())],
    }


class Load:
    """What the users ask. `outcomes` counts finish reasons and status codes."""

    def __init__(self, num_users: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.num_tokens = 0
        self._num_users, self._num_asking = num_users, num_users
        self._prompts = chat_prompts(400, SEED)
        self._rng = random.Random(SEED)

    async def change_number(self) -> None:
        while True:
            await asyncio.sleep(LULL_S)
            self._num_asking = self._rng.randint(1, self._num_users)

    async def ask_forever(self, client: GenerationClient, number: int) -> None:
        rng = random.Random(f"{SEED} {number}")
        while True:
            if number >= self._num_asking:
                await asyncio.sleep(1.0)
                continue
            try:
                self.outcomes[await self._ask(client, rng)] += 1
            except RemoteError as error:
                self.outcomes[error.code] += 1

    async def _ask(self, client: GenerationClient, rng: random.Random) -> str:
        request = self._request(rng)
        timeout_s = 0.05 if rng.random() < EXPIRED else None
        if rng.random() < 0.3:
            response = await client.generate(request, timeout_s=timeout_s)
            self.num_tokens += len(response.token_ids)
            return pb.FinishReason.Name(response.finish_reason)
        most = rng.randint(1, 20) if rng.random() < CANCELLED else sys.maxsize
        async with aclosing(client.stream(request, timeout_s=timeout_s)) as messages:
            async for message in messages:
                self.num_tokens += len(message.delta.token_ids)
                most -= 1
                if most <= 0:
                    return "cancelled by the client"
                if message.HasField("finished"):
                    return pb.FinishReason.Name(message.finished.finish_reason)
        return "ended without a reason"

    def _request(self, rng: random.Random) -> pb.GenerateRequest:
        request = pb.GenerateRequest(
            draft_scope=rng.choice(["", "request", f"scope {rng.randrange(50)}"]),
            sampling_params=pb.SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0])),
            stop=pb.StopConditions(max_tokens=rng.randint(1, 300), ignore_eos=rng.random() < 0.3),
            speculation=pb.SpeculationOptions(drafter=rng.choice(["", "", *DRAFTERS])),
            priority=rng.randint(-2, 2),
        )
        if rng.random() < REFUSED:
            request.sampling_params.top_p = 2.0
        if rng.random() < 0.4:
            length = int(2 ** rng.uniform(0, 11.5))
            request.token_ids.ids.extend(rng.randrange(2, 4000) for _ in range(length))
        else:
            request.text = rng.choice(self._prompts)
        if rng.random() < 0.1:
            request.references.add(text=rng.choice(self._prompts))
        return request


def descendants() -> list[int]:
    """Process ids of all processes below this one, each after its parent."""
    found, left = [], [*_children(Path("/proc/self"))]
    while left:
        pid = left.pop(0)
        found.append(pid)
        left += _children(Path(f"/proc/{pid}"))
    return found


def _children(process: Path) -> list[int]:
    try:
        return [int(pid) for file in process.glob("task/*/children") for pid in file.read_text().split()]
    except OSError:  # it has ended
        return []


def resident_bytes(pid: int | str) -> int:
    """0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def process_name(rank: int) -> str:
    return ("server", "engine")[rank] if rank < 2 else f"process {rank}"


def summary(name: str, points: list[tuple[float, float]]) -> dict[str, Any]:
    """A process's figures, and its memory once a minute."""
    times, sizes = np.array(points).T
    second = times >= times[-1] / 2
    slope = float(np.polyfit(times[second] / 60, sizes[second], 1)[0]) if second.sum() > 1 else 0.0
    minutes = {int(at // 60): size for at, size in points}
    return {
        "name": name,
        "first_mb": float(sizes[0]),
        "last_mb": float(sizes[-1]),
        "most_mb": float(sizes.max()),
        "slope_mb_per_minute": slope,
        "mb_by_minute": list(minutes.values()),
    }


if __name__ == "__main__":
    sys.exit(main())
