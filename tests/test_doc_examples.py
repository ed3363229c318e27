"""The examples of the documentation run as they stand, and show what they say they show."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


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


def test_earlier_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert tokens_per_step("earlier_turns", capsys)[1] > 2
