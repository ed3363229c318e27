"""The examples of the documentation run as they stand, and show what they say they show."""

from __future__ import annotations

import asyncio
import re
import runpy
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from batchserve.llm import LLM
from batchserve.metrics import AGE, CALIBRATION, COUNTERS, EDGES, FAILED_CALLS, FAULTS, GAUGES, HISTOGRAMS, LOAD
from batchserve.types import FinishReason, RequestOutput, Timing, Usage
from tests.server.fakes import FakeEngine
from tests.server.harness import serving

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.fixture(autouse=True)
def fixed_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much adaptive drafts is up to the time that steps take, which a busy machine takes more of."""
    monkeypatch.setattr(LLM, "__init__", partialmethod(LLM.__init__, adaptive=False))


def tokens_per_step(example: str, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """Run an example; what it prints as tokens a step, in its order."""
    runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    return [float(number) for number in re.findall(r": ([\d.]+) tokens a step", capsys.readouterr().out)]


def test_retrieved_documents(capsys: pytest.CaptureFixture[str]) -> None:
    documents, without, with_reference = tokens_per_step("retrieved_documents", capsys)
    assert documents > 1.5
    assert with_reference > without


def test_cached_answers(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third, elsewhere = tokens_per_step("cached_answers", capsys)
    assert min(second, third) > 2 * max(first, elsewhere)


def test_async_engine(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "async_engine.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert len(re.findall(r"\d+ tokens, \d+ from drafts", shown)) == 2
    assert "name: socket reader" in shown
    assert "name: stream writer" in shown
    assert "INVALID_TOP_P: top_p = 1.5" in shown


@pytest.mark.faults
@pytest.mark.parametrize("example", ["cached_answers", "earlier_turns", "retrieved_documents"])
def test_tokens_a_step_of_the_shortest_answers(example: str) -> None:
    count = runpy.run_path(str(EXAMPLES / f"{example}.py"))["tokens_per_step"]
    # Where all of the prompt but its last token was cached, even the first token may have been drafted.
    for completion, accepted, expected in ((0, 0, 0), (1, 0, 1), (1, 1, 1), (5, 5, 5), (9, 6, 3)):
        usage = Usage(completion_tokens=completion, draft_tokens=8, accepted_draft_tokens=accepted)
        assert count(RequestOutput("id", [1], "", [], FinishReason.LENGTH, usage, Timing())) == expected


@pytest.mark.faults
async def test_the_grpc_client(capsys: pytest.CaptureFixture[str]) -> None:
    client = runpy.run_path(str(EXAMPLES / "grpc_client.py"))["main"]
    engine: Any = FakeEngine()
    engine.go_on.set()
    async with serving(engine) as served:
        assert await asyncio.to_thread(client, served.address) == 0
    shown = capsys.readouterr().out
    assert "2 tokens, 1 of them from drafts" in shown
    assert "INVALID_ARGUMENT: sampling_params.top_p = 1.5" in shown
    assert await asyncio.to_thread(client, "127.0.0.1:1") == 1
    assert capsys.readouterr().out.startswith("UNAVAILABLE: ")


def test_the_metrics_that_are_named_exist() -> None:
    table = (EXAMPLES.parent / "serving.md").read_text().split("## Watch")[1].split("\n##")[0]
    named = {name for name in re.findall(r"`([a-z_]+)`", table) if "_" in name}
    known = {*COUNTERS, *FAILED_CALLS, *FAULTS, *GAUGES, *AGE, *LOAD, *EDGES, *CALIBRATION, *HISTOGRAMS}
    assert len(named) > 20
    assert named <= known


def test_earlier_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert tokens_per_step("earlier_turns", capsys)[1] > 2
