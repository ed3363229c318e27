"""The examples of the documentation run as they stand, and show what they say they show."""

from __future__ import annotations

import re
import runpy
from functools import partialmethod
from pathlib import Path

import pytest

from batchserve.llm import LLM
from batchserve.metrics import AGE, CALIBRATION, COUNTERS, EDGES, FAILED_CALLS, FAULTS, GAUGES, HISTOGRAMS, LOAD

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
    assert "INVALID_TOP_P: sampling_params.top_p = 1.5" in shown


def test_the_metrics_that_are_named_exist() -> None:
    table = (EXAMPLES.parent / "serving.md").read_text().split("## Watch")[1].split("## Choose")[0]
    named = {name for name in re.findall(r"`([a-z_]+)`", table) if "_" in name}
    known = {*COUNTERS, *FAILED_CALLS, *FAULTS, *GAUGES, *AGE, *LOAD, *EDGES, *CALIBRATION, *HISTOGRAMS}
    assert len(named) > 20
    assert named <= known


def test_earlier_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert tokens_per_step("earlier_turns", capsys)[1] > 2
