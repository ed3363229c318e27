"""Processors in Python: what they see, the same answers with drafts as without, and faults that end one request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchserve.engine.engine_core import Event
from batchserve.errors import BatchserveError, InvalidRequestError
from batchserve.types import Delta, SamplingParams, SpeculationParams
from tests.drafters import OracleDrafter
from tests.equivalence.harness import BuiltEngine, Coverage, Job, build, run
from tests.tiny_models import VOCAB_SIZE

PROMPT = [5, 9, 11, 40]
PLAIN = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


class Watch:
    """Bans the token before the last one, and keeps what it was called with."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        self.seen.append([*token_ids])
        logits[token_ids[-2]] = -np.inf
        return logits


def params(*processors: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logits_processors=processors)


def test_they_see_the_tokens_before_each_row_and_drafts_change_nothing(tiny_model: dict[str, Path]) -> None:
    off, on = Watch(), Watch()
    model, plain = tiny_model["llama"], SpeculationParams(is_enabled=False)
    expected = run(build(model), [Job(PROMPT, params(off), speculation=plain)], Coverage())[0].token_ids
    assert off.seen == [PROMPT + expected[:count] for count in range(24)]
    assert expected != run(build(model), [Job(PROMPT, PLAIN)], Coverage())[0].token_ids
    drafter, coverage = OracleDrafter(VOCAB_SIZE, 3, {tuple(PROMPT): expected}), Coverage()
    jobs = [Job(PROMPT, params(on)), Job([7, 8], PLAIN)]
    assert run(build(model, drafter), jobs, coverage)[0].token_ids == expected
    assert coverage.accepted > 0
    assert {tuple(each) for each in on.seen} >= {tuple(each) for each in off.seen}


def answers(engine: BuiltEngine, asked: list[SamplingParams]) -> list[list[int] | BatchserveError]:
    found: list[Any] = [[] for _ in asked]

    def collect(events: list[Event]) -> None:
        for request, event in events:
            place = int(request.request_id)
            if isinstance(event, Delta):
                found[place] += event.token_ids
            else:
                found[place] = event

    engine.core.emit = collect
    for place, each in enumerate(asked):
        engine.core.add(engine.processor.make_request(str(place), PROMPT, each, SpeculationParams(), 0.0))
    while engine.core.has_work:
        engine.core.step()
        engine.core.check_integrity()
    return found


def raising(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    if len(token_ids) > 8:
        raise ValueError("no more")
    return logits


def ending(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    raise SystemExit(3)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def unspeakable(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    raise Unspeakable


def test_what_is_raised_after_an_answers_end_or_later_takes_nothing_from_it(tiny_model: dict[str, Path]) -> None:
    """With drafts it is called for rows that the answer may not reach."""
    model, plain = tiny_model["llama"], SpeculationParams(is_enabled=False)
    truth = run(build(model), [Job(PROMPT, PLAIN, speculation=plain)], Coverage())[0].token_ids
    stop = truth[4]

    def strict(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        assert stop not in token_ids[len(PROMPT) :], "called after the end"
        return logits

    asked = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(stop,), logits_processors=(strict,))
    drafter = OracleDrafter(VOCAB_SIZE, 3, {tuple(PROMPT): truth})
    expected = truth[: truth.index(stop)]
    assert run(build(model, drafter), [Job(PROMPT, asked)], Coverage())[0].token_ids == expected


@pytest.mark.faults
@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (ending, "raised SystemExit: 3"),
        (unspeakable, "raised Unspeakable: its text cannot be made"),
        (raising, r"logits_processors\[1\] raised ValueError: no more"),
        (lambda token_ids, logits: logits[:5], r"returned the shape \(5,\): must be \(128,\)"),
        (lambda token_ids, logits: "text", r"raised ValueError"),
        (lambda token_ids, logits: np.full_like(logits, -np.inf), "sampling parameters leave no token"),
    ],
)
def test_a_fault_of_one_ends_its_request_alone(processor: Any, said: str, tiny_model: dict[str, Path]) -> None:
    engine = build(tiny_model["llama"])
    right = answers(engine, [PLAIN])[0]
    first, failed, last = answers(engine, [PLAIN, params(Watch(), processor), PLAIN])
    assert first == last == right
    assert isinstance(failed, BatchserveError)
    with pytest.raises(BatchserveError, match=said):
        raise failed
    assert engine.core.executor.allocator.free_tokens == engine.core.executor.allocator.total_tokens


def test_only_what_can_be_called_is_taken() -> None:
    with pytest.raises(InvalidRequestError, match=r"logits_processors\[1\] = 'text': must be callable"):
        SamplingParams(logits_processors=(raising, "text"))  # type: ignore[arg-type]
