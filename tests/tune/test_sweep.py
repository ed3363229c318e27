"""The closed load, against an engine that gives one token each time the loop comes round."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from batchserve.config import PRIVATE_SCOPE
from batchserve.errors import ConfigError, InvalidRequestError, UnavailableError
from batchserve.metrics import EngineMetrics
from batchserve.tune.sweep import SCOPE, Setting, _check, _ClosedLoad, _no_interrupt_lost
from batchserve.tune.workload import WorkloadRequest
from batchserve.types import Delta, FinishReason, SamplingParams, SpeculationParams, Started, Timing, Usage

TPOT_S = {SCOPE: 0.01, PRIVATE_SCOPE: 99.0}  # what is sent again, to keep the load up, is not to be measured


class Engine:
    """Keeps books of who asked what under which load."""

    def __init__(self, fails_at: str = "") -> None:
        self.metrics = EngineMetrics()
        self.in_flight = 0
        self.loads: list[int] = []  # when a measured request ends
        self.asked: list[tuple[str, SpeculationParams]] = []
        self.fails_at = fails_at

    async def stream(
        self, prompt: str, params: SamplingParams, *, speculation: SpeculationParams
    ) -> AsyncGenerator[Any, None]:
        self.asked.append((prompt, speculation))
        count, scope = params.max_tokens or 1, speculation.draft_scope
        self.in_flight += 1
        try:
            yield Started(prompt, 1)
            if prompt == self.fails_at:
                raise UnavailableError("gone")
            for i in range(count):
                await asyncio.sleep(0)
                if i < count - 1:
                    yield Delta(prompt, token_ids=[i])
            if scope == SCOPE:
                self.loads.append(self.in_flight)
            timing = Timing(0.0, 0.5, 0.5 + TPOT_S[scope] * (count - 1))
            yield Delta(prompt, "", [0], FinishReason.LENGTH, Usage(1, count), timing)
        finally:
            self.in_flight -= 1


def make_requests(*max_tokens: int) -> list[WorkloadRequest]:
    return [WorkloadRequest(f"line {i}", str(i), count, (f"doc {i}",), i) for i, count in enumerate(max_tokens)]


async def run(engine: Any, setting: Setting, requests: list[WorkloadRequest]) -> Any:
    done: list[None] = []
    load = _ClosedLoad(engine, requests, setting, SCOPE, lambda: done.append(None))
    measured = await asyncio.wait_for(load.run(), 30)
    assert len(done) == len(requests)
    return load, measured


@pytest.mark.parametrize("is_adaptive", [False, True])
async def test_the_load_is_the_same_from_the_first_to_the_last_measured_request(is_adaptive):
    engine, requests = Engine(), make_requests(5, 40, 3, 1, 8, 60, 2)
    load, measured = await run(engine, Setting(1, 3, is_adaptive), requests)
    assert engine.loads == [3] * len(requests)
    assert engine.in_flight == 0, "what kept the load up has been aborted"
    own = [prompt for prompt, speculation in engine.asked if speculation.draft_scope == SCOPE]
    again = [prompt for prompt, speculation in engine.asked if speculation.draft_scope == PRIVATE_SCOPE]
    assert sorted(own) == [request.prompt for request in requests], "each once"
    assert again, "60 tokens are more than all others have left"
    assert all(speculation.is_enabled == is_adaptive for _, speculation in engine.asked)
    assert all(speculation.references == (f"doc {prompt}",) for prompt, speculation in engine.asked)
    assert load.tpot_s == pytest.approx([TPOT_S[SCOPE]] * 6), "one of the seven has a single token"
    assert measured.p50_tpot_s == measured.p99_tpot_s == pytest.approx(TPOT_S[SCOPE])
    assert measured.p50_ttft_s == 0.5
    assert measured.tokens_per_s * measured.seconds >= sum(request.max_tokens for request in requests)


async def test_one_failure_ends_it_all():
    engine = Engine(fails_at="2")
    with pytest.raises(UnavailableError, match="gone"):
        await run(engine, Setting(1, 2, True), make_requests(50, 4, 4))
    assert engine.in_flight == 0


@pytest.mark.parametrize(("has_max_tokens", "said"), [(True, ""), (False, "no max_tokens is given, and the default")])
def test_what_the_engine_would_refuse_is_named_by_its_line_and_a_default_as_such(has_max_tokens: bool, said: str):
    def refuse(*arguments: Any) -> None:
        raise InvalidRequestError("TOO_LONG", "stop.max_tokens", 128, "at most 95")

    processor = SimpleNamespace(tokenize=lambda text: [1], make_request=refuse)
    request = WorkloadRequest("line 7", "x", 128, (), 0, has_max_tokens)
    with pytest.raises(ConfigError) as caught:
        _check(SimpleNamespace(processor=processor), [request])  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"line 7: {said}")
    assert "stop.max_tokens = 128: must be at most 95" in str(caught.value)
    assert ("default" in str(caught.value)) is not has_max_tokens


class _Freed:
    """Ctrl-C comes while it is being freed."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_destructor_is_not_lost():
    before = signal.getsignal(signal.SIGINT)
    freed: list[str] = []

    def load() -> None:
        with _no_interrupt_lost():
            _Freed()
            freed.append("Python went on behind it")

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load()
        assert freed
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
