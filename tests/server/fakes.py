"""An engine without a model: tests of the server alone decide what it answers and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any

from batchserve.errors import UnavailableError
from batchserve.metrics import EngineMetrics
from batchserve.types import Delta, FinishReason, GenerateCall, ModelInfo, RequestOutput, Started, Timing, Usage

INFO = ModelInfo(
    name="fake",
    architecture="FakeForCausalLM",
    dtype="float32",
    vocab_size=100,
    max_model_len=64,
    max_num_seqs=4,
    eos_token_ids=(2,),
    attention_backend="none",
    drafter="none",
    decoding_length=0,
    has_tokenizer=False,
)


class FakeEngine:
    """Answers [1, 2] in two deltas; the second one waits for `go_on`. `error` is raised in its place."""

    def __init__(self) -> None:
        self.info = INFO
        self.tokenizer = None
        self.metrics = EngineMetrics()
        self.go_on = asyncio.Event()
        self.error: Exception | None = None
        self.is_cut_short = False
        self.arguments: dict[str, Any] = {}
        self.num_in_flight = 0
        self.shares_by_default = True
        self.is_empty = asyncio.Event()
        self.is_empty.set()
        self.is_shut_down = asyncio.Event()
        self.has_failed = asyncio.Event()

    async def events(self, call: GenerateCall, **options: Any) -> AsyncGenerator[Any, None]:
        prompt = call.prompt
        self.arguments = {field.name: getattr(call, field.name) for field in fields(call)} | options
        self.num_in_flight += 1
        self.is_empty.clear()
        try:
            yield Started("fake-id", len(prompt))
            yield Delta("fake-id", "a", [1])
            waits = [asyncio.ensure_future(event.wait()) for event in (self.go_on, self.is_shut_down)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if self.is_shut_down.is_set():
                raise UnavailableError("shut down")
            if self.error is not None:
                raise self.error
            if not self.is_cut_short:
                usage, timing = Usage(len(prompt), 2, 0, 5, 1), Timing(0.25, 0.5, 1.5)
                yield Delta("fake-id", "b", [2], FinishReason.LENGTH, usage, timing)
        finally:
            self.num_in_flight -= 1
            if self.num_in_flight == 0:
                self.is_empty.set()

    async def answer(self, call: GenerateCall) -> RequestOutput:
        events = [event async for event in self.events(call)]
        last, prompt = events[-1], call.prompt
        return RequestOutput("fake-id", list(prompt), "ab", [1, 2], last.finish_reason, last.usage, last.timing)

    async def drain(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self.is_empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def has_request(self, request_id: str, tenant: str = "") -> bool:
        return False

    def check_room(self) -> None:
        return

    def isolate_default_scope(self) -> None:
        self.shares_by_default = False

    async def ping(self) -> None:
        return

    async def wait_failed(self) -> None:
        await self.has_failed.wait()

    async def shutdown(self) -> None:
        self.is_shut_down.set()
