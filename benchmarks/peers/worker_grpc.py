"""A batchserve server, asked over gRPC from this process for whole answers. Drafts are asked for by each round."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from batchserve.demo.server_process import running_server
from batchserve.interpreter import available_cores
from batchserve.server.grpc.client import GenerationClient
from batchserve.v1 import generation_pb2 as pb
from benchmarks.peers.processes import tree
from benchmarks.peers.protocol import Prompts, serve
from benchmarks.peers.worker_batchserve import PRIVATE, SHARED


class OwnServer:
    """A client of a server that this process has started."""

    def __init__(self, runner: asyncio.Runner, client: GenerationClient, pid: int) -> None:
        self._runner, self._client, self._pid = runner, client, pid

    @property
    def pid(self) -> int:
        return self._pid

    def answer(self, prompts: Prompts, max_tokens: int, drafts: bool) -> list[list[int]]:
        mode = pb.SpeculationOptions.MODE_AUTO if drafts else pb.SpeculationOptions.MODE_OFF
        requests = [
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt),
                draft_scope=SHARED if drafts else PRIVATE,
                sampling_params=pb.SamplingParams(temperature=0.0),
                stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
                speculation=pb.SpeculationOptions(mode=mode),
            )
            for prompt in prompts
        ]

        async def all_at_once() -> list[list[int]]:
            answers = await asyncio.gather(*(self._client.generate(request) for request in requests))
            return [list(each.token_ids) for each in answers]

        return self._runner.run(all_at_once())


@contextmanager
def load(message: dict[str, Any]) -> Iterator[OwnServer]:
    options = (
        *("--model", message["model"], "--wait-for-drafter", "--no-prefix-cache"),
        *("--max-num-seqs", str(message["max_requests"])),
        *("--max-num-batched-tokens", str(message["most_batched_tokens"])),
        *("--num-threads", str(available_cores())),  # as the others, however busy the machine is while these are loaded
    )

    async def start(stack: AsyncExitStack) -> GenerationClient:
        server = await stack.enter_async_context(running_server(options, lambda line: print(line, file=sys.stderr)))
        address = server.address
        client = await stack.enter_async_context(GenerationClient(address))
        await client.wait_until_serving()
        return client

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            client = runner.run(start(stack))
            _, server, *_ = sorted(tree(os.getpid()), key=lambda pid: pid != os.getpid())
            yield OwnServer(runner, client, server)
        finally:
            runner.run(stack.aclose())


if __name__ == "__main__":
    serve(load)
