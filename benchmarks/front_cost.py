"""What a streamed delta costs the front process over HTTP, against gRPC.

    python -m benchmarks.front_cost [--streams 16] [--tokens 400] [--rounds 5]

A real server, its engine in a process of its own; drafts off, so that each delta is one token. The clients are in a
process of their own. Rounds of gRPC and HTTP take turns; CPU time is that of the front process between the first and
the last delta of a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from batchserve.demo.server_process import running_server
from benchmarks.common import spread, write_results

CLIENT = Path(__file__).with_name("front_client.py")


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def round_of(kind: str, target: str, pid: int, streams: int, tokens: int) -> dict[str, float]:
    """CPU microseconds of the front a delta, and the median time between two deltas of a stream, in ms."""
    before_s = cpu_s(pid)
    command = [sys.executable, str(CLIENT), kind, target, str(streams), str(tokens)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    used_s = cpu_s(pid) - before_s
    found = json.loads(done.stdout)
    return {"us_per_delta": used_s / found["deltas"] * 1e6, "itl_p50_ms": statistics.median(found["gaps_s"]) * 1e3}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    options = ["--model", args.model, "--decoding-length", "0", "--log-level", "warning"]
    rounds: dict[str, list[dict[str, float]]] = {"grpc": [], "http": []}
    async with running_server(options, print) as server:
        targets = {"grpc": server.address, "http": server.url}
        for i in range(args.rounds + 1):
            for kind, target in targets.items():
                found = await round_of(kind, target, server.pid, args.streams, args.tokens)
                print(kind, found, flush=True)
                if i:  # the first one warms up
                    rounds[kind].append(found)
    pairs = list(zip(rounds["grpc"], rounds["http"], strict=True))
    return {
        "model": args.model,
        "streams": args.streams,
        "tokens": args.tokens,
        **{
            f"{kind}_{name}": spread([each[name] for each in of_kind])
            for kind, of_kind in rounds.items()
            for name in of_kind[0]
        },
        "http_over_grpc": spread([http["us_per_delta"] / grpc["us_per_delta"] for grpc, http in pairs]),
        "itl_p50_added_ms": spread([http["itl_p50_ms"] - grpc["itl_p50_ms"] for grpc, http in pairs]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    found = asyncio.run(measure(parser.parse_args()))
    print(json.dumps(found, indent=1))
    print(write_results("front_cost", found), flush=True)


if __name__ == "__main__":
    main()
