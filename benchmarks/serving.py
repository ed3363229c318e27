"""What streams cost the engine: a server whose engine has a process of its own, over one whose engine is a thread.

    python -m benchmarks.serving [--model bundled | 90m] [--rounds N] [--quick]

Two real servers, otherwise with the same options, and one client over gRPC, all on this machine.
They answer in turn, and every round begins with the other one; who is not asked sleeps. Requests are greedy, go on to
their last token, and draft from themselves alone. Streams, and at the largest number of requests whole answers, too.
A stream's inter-token latency is the median gap between two messages, over the tokens of the second.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

from batchserve.config import EngineConfig
from batchserve.demo.server_process import running_server
from batchserve.server.grpc.client import GenerationClient
from batchserve.v1 import generation_pb2 as pb
from benchmarks.adaptive.driver import median_interval
from benchmarks.adaptive.workloads import VOCAB_SIZE, say
from benchmarks.common import chat_prompts, spread, write_results
from tools.widen_model import random_model, save

MODELS = ("bundled", "90m")
SIZES = (1, 4, 16)
TOKENS = {"bundled": 300, "90m": 60}
THREADS = {"bundled": 1, "90m": 2}  # compute threads, as a start on two cores chooses; the same for both
ROUNDS, QUICK_ROUNDS, QUICK_TOKENS = 12, 1, 8
SERVERS = {"thread": ("--no-engine-process",), "process": ()}
SEED = 5
Cell = tuple[str, int, str]  # speculation, requests, how they are asked


def cells() -> list[Cell]:
    asked = [(size, "stream") for size in SIZES] + [(SIZES[-1], "whole")]
    return [(speculation, size, how) for speculation in ("off", "on") for size, how in asked]


async def answer(client: GenerationClient, request: pb.GenerateRequest, how: str, gaps_s: list[float]) -> int:
    """The number of tokens; gaps_s gets what a stream's tokens took."""
    if how == "whole":
        return len((await client.generate(request)).token_ids)
    num_tokens, before_s = 0, 0.0
    async with aclosing(client.stream(request)) as messages:
        async for message in messages:
            count, now_s = len(message.delta.token_ids), time.perf_counter()
            if count and num_tokens:
                gaps_s += [(now_s - before_s) / count] * count
            num_tokens += count
            before_s = now_s if count else before_s
    return num_tokens


async def run(client: GenerationClient, cell: Cell, prompts: list[list[int]], max_tokens: int) -> dict[str, float]:
    """One run of a cell: all requests at once."""
    speculation, size, how = cell
    mode = pb.SpeculationOptions.MODE_AUTO if speculation == "on" else pb.SpeculationOptions.MODE_OFF
    requests = [
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            draft_scope="request",
            sampling_params=pb.SamplingParams(temperature=0.0),
            stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
            speculation=pb.SpeculationOptions(mode=mode),
        )
        for prompt in prompts[:size]
    ]
    gaps_s: list[float] = []
    started_s = time.perf_counter()
    counts = await asyncio.gather(*(answer(client, request, how, gaps_s) for request in requests))
    seconds = time.perf_counter() - started_s
    latency_ms = statistics.median(gaps_s) * 1e3 if gaps_s else 0.0
    return {"tokens_per_s": sum(counts) / seconds, "inter_token_ms": latency_ms}


async def measure(model: str, folder: str, rounds: int, max_tokens: int) -> list[dict[str, Any]]:
    source = model
    if model != "bundled":
        source = str(Path(folder) / model)
        save(random_model(model, VOCAB_SIZE), Path(source))
    from batchserve.runner.model_folder import resolve_model  # after the thread policy, as torch is
    from batchserve.runner.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model("bundled"), EngineConfig())
    assert tokenizer is not None
    prompts = [tokenizer(prompt)["input_ids"] for prompt in chat_prompts(SIZES[-1], SEED)]
    found: dict[tuple[str, Cell], list[dict[str, float]]] = {}
    async with AsyncExitStack() as stack:
        clients = {}
        for name, flags in SERVERS.items():
            fixed = ("--num-threads", str(THREADS[model]), "--wait-for-drafter")
            options = ("--model", source, *fixed, *flags)
            server = await stack.enter_async_context(running_server(options, say))
            address = server.address
            clients[name] = await stack.enter_async_context(GenerationClient(address))
            await clients[name].wait_until_serving()
            await run(clients[name], cells()[0], prompts, max_tokens)
        for number in range(rounds):
            for cell in cells():
                for name in list(SERVERS)[:: -1 if number % 2 else 1]:
                    one = await run(clients[name], cell, prompts, max_tokens)
                    found.setdefault((name, cell), []).append(one)
    return [compared(cell, found["thread", cell], found["process", cell]) for cell in cells()]


def compared(cell: Cell, thread: list[dict[str, float]], process: list[dict[str, float]]) -> dict[str, Any]:
    """Round by round: the process over the thread."""
    speculation, size, how = cell
    ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(process, thread, strict=True)]
    figures = {
        name: {figure: spread([each[figure] for each in runs]) for figure in runs[0]}
        for name, runs in (("thread", thread), ("process", process))
    }
    about = {"speculation": speculation, "requests": size, "asked": how}
    return {**about, **figures, "process_over_thread": median_interval(ratios)}


def main() -> None:
    started_s = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="only this one (default: all)")
    parser.add_argument("--rounds", type=int, help=f"pairs of runs of each cell (default: {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="a few tokens, to see that it runs; nothing is written")
    args = parser.parse_args()
    rounds = (QUICK_ROUNDS if args.quick else ROUNDS) if args.rounds is None else args.rounds
    if rounds < 1:
        parser.error(f"--rounds {rounds}: must be at least 1")
    results: dict[str, Any] = {}
    for model in (args.model,) if args.model else MODELS:
        max_tokens = QUICK_TOKENS if args.quick else TOKENS[model]
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(measure(model, folder, rounds, max_tokens))
        results[model] = {"max_tokens": max_tokens, "compute_threads": THREADS[model], "cells": found}
        for cell in found:
            rates = [cell[name]["tokens_per_s"]["median"] for name in SERVERS]
            ratio = cell["process_over_thread"]
            shown = f"{rates[0]:.0f} tokens/s, {rates[1]:.0f} with a process of its own: x {ratio['median']:.2f}"
            say(f"{model}, drafts {cell['speculation']}, {cell['requests']} requests, {cell['asked']}: {shown}")
    if not args.quick:
        took_s = round(time.perf_counter() - started_s, 1)
        say(str(write_results("serving", {"rounds": rounds, "took_s": took_s, "models": results})))


if __name__ == "__main__":
    main()
