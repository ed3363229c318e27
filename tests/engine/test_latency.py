"""How long a step may become beside those who are answering, in a core whose every step takes what a table says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from batchserve.config import PROMPT_INFLATION
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.policy import FixedDrafting
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from batchserve.engine.drafting import DraftStage
from batchserve.runner.ragged_batch import RaggedBatch
from batchserve.scheduler.prompt_room import CHUNK_STEP, MIN_CHUNK
from batchserve.scheduler.scheduler import Scheduler
from batchserve.types import SpeculationParams
from tests.engine.scripted import MAX_MODEL_LEN, ScriptedEngine, add, scripted_engine

# 10 ms and 0.1 ms a row, and as much again for a row that sees 200 tokens.
TABLE = StepTimeTable((1, 512), (0.010, 0.0611), per_attended_token=5e-7)
ANSWER = "abcdefghij" * 12
PROMPT = "p" * 200
OFF = SpeculationParams(is_enabled=False)


class Steps:
    """An engine that knows TABLE, and what each of its steps was and took."""

    def __init__(self, *, is_drafting: bool = False, **options: Any) -> None:
        self.engine = engine = scripted_engine(is_drafting=is_drafting, **options)
        core, config, truth = engine.core, engine.config, StepTimeModel(TABLE)
        allocator = core.executor.allocator
        core.scheduler = Scheduler(config, allocator, MAX_MODEL_LEN, StepTimeModel(TABLE))
        adaptive = AdaptiveDrafting(StepTimeModel(TABLE), config.draft_inflation, config.max_step_s)
        core.drafts = DraftStage(core.drafter, adaptive, allocator, lambda: engine.now_s)
        self.seconds: list[float] = []
        launch = core.executor.launch

        def timed_launch(batch: RaggedBatch) -> Any:
            self.seconds.append(truth.predict(load_of(batch)))
            engine.now_s += self.seconds[-1]
            return launch(batch)

        core.executor.launch = timed_launch  # type: ignore[method-assign]

    def decoding(self, count: int) -> ScriptedEngine:
        """So many requests that are answering, and of which nothing is drafted; what came before is forgotten."""
        for i in range(count):
            add(self.engine, f"r{i}", ANSWER, max_tokens=len(ANSWER), speculation=OFF)
        self.engine.step()
        self.seconds.clear()
        self.engine.runner.batches.clear()
        return self.engine

    def chunks(self) -> list[tuple[int, int]]:
        """(rows, context) of each step's rows of prompts that were beside others; several prompts count as one."""
        found = []
        for batch in self.engine.runner.batches:
            prompts = [rows for rows in batch.requests if rows.num_pending > 1]
            if prompts and len(prompts) < len(batch.requests):
                found.append((sum(rows.num_pending for rows in prompts), prompts[0].context_len))
        return found


def load_of(batch: RaggedBatch) -> StepLoad:
    return StepLoad(
        batch.num_rows,
        batch.num_rows,  # the table has no price for the head
        len(batch.requests),
        0,  # nor for reading
        sum(rows.context_len * len(rows.token_ids) for rows in batch.requests),
    )


@pytest.mark.parametrize(
    ("max_itl_ms", "inflation"), [(14.0, 10.0), (14.0, 1.2), (None, 1.2), (25.0, 1.5), (None, None), (16.0, None)]
)
def test_a_prompt_takes_what_the_tighter_bound_leaves_it(max_itl_ms: float | None, inflation: float | None) -> None:
    """Of its chunks each is as long as it may be, in steps of CHUNK_STEP rows: shorter the more stands before it."""
    steps = Steps(max_itl_ms=max_itl_ms, max_itl_inflation=inflation)
    engine, truth = steps.decoding(3), StepTimeModel(TABLE)
    add(engine, "prompt", "answer", prompt=PROMPT, max_tokens=2, speculation=OFF)
    engine.run()
    assert engine.text("prompt") == "an"
    chunks = steps.chunks()
    assert sum(rows for rows, _ in chunks) in (len(PROMPT), len(PROMPT) - 1)  # one row left is as good as decoding
    for (rows, context), batch, seconds in zip(chunks, engine.runner.batches, steps.seconds, strict=False):
        seen = [each.context_len for each in batch.requests if each.num_pending == 1]
        quiet_s = truth.predict(StepLoad(3, 3, 3, 0, sum(seen)))
        by_default = PROMPT_INFLATION if max_itl_ms is None else math.inf
        stretch = by_default if inflation is None else inflation
        bound_s = min(quiet_s * stretch, math.inf if max_itl_ms is None else max_itl_ms / 1e3)
        assert seconds <= bound_s
        more = StepLoad(3 + rows + CHUNK_STEP, 3, 4, 0, sum(seen) + (rows + CHUNK_STEP) * context)
        is_last = context + rows >= len(PROMPT) - 1
        assert is_last or truth.predict(more) > bound_s, "more would have fitted"
    assert [rows for rows, _ in chunks] == sorted((rows for rows, _ in chunks), reverse=True)
    assert len({rows for rows, _ in chunks[:-1]}) > 1, "all chunks alike: the context's cost is not shown"


def test_without_a_bound_a_prompt_is_computed_at_once() -> None:
    """So it is the bounds that cut it in the other tests; and nobody is held up where nobody is answering."""
    steps = Steps(max_itl_inflation=100.0)
    engine = steps.decoding(3)
    add(engine, "prompt", "answer", prompt=PROMPT, max_tokens=2, speculation=OFF)
    engine.run()
    assert steps.chunks() == [(len(PROMPT), 0)]
    alone = Steps(max_itl_ms=11.0, max_itl_inflation=1.0)
    add(alone.engine, "prompt", "answer", prompt=PROMPT, max_tokens=2, speculation=OFF)
    alone.engine.run()
    assert alone.engine.runner.batches[0].num_rows == len(PROMPT)


@pytest.mark.parametrize(
    ("max_itl_ms", "inflation", "bound"),
    [
        (None, None, PROMPT_INFLATION),
        (13.0, None, 1.3),
        (None, 1.2, 1.2),
        (11.0, 1.2, 1.1),
    ],
)
def test_however_many_prompts_stretch_a_step_no_further_than_one_may(
    max_itl_ms: float | None, inflation: float | None, bound: float
) -> None:
    for num_prompts in (1, 2, 3):
        steps = Steps(max_itl_ms=max_itl_ms, max_itl_inflation=inflation, max_num_seqs=8)
        engine = steps.decoding(2)
        for i in range(num_prompts):
            add(engine, f"p{i}", "answer", prompt=PROMPT, max_tokens=2, speculation=OFF)
        engine.step()
        stretch = steps.seconds[0] / 0.010
        assert bound - 0.1 < stretch <= bound + 0.03  # of two rows more than one request's; to CHUNK_STEP


@pytest.mark.parametrize("options", [{"max_itl_ms": 1.0}, {"max_itl_inflation": 1.0}])
def test_a_prompt_goes_on_whatever_the_bound(options: dict[str, float]) -> None:
    steps = Steps(**options)
    engine = steps.decoding(2)
    add(engine, "prompt", "answer", prompt=PROMPT, max_tokens=2, speculation=OFF)
    engine.run()
    assert engine.text("prompt") == "an"
    assert {rows for rows, _ in steps.chunks()[:-1]} == {MIN_CHUNK}


@pytest.mark.parametrize("max_itl_ms", [12.0, 16.0])
def test_prompt_and_drafts_together_stay_within_the_hard_bound(max_itl_ms: float) -> None:
    """Drafts that are always right, which everybody gains by, and a prompt in the midst of them."""

    def longest_s(**options: Any) -> float:
        steps = Steps(is_drafting=True, max_itl_inflation=3.0, **options)
        for name in "ab":
            add(steps.engine, name, ANSWER, max_tokens=len(ANSWER))
        for _ in range(4):
            steps.engine.step()
        add(steps.engine, "prompt", ANSWER, prompt=PROMPT, max_tokens=60)
        steps.engine.run()
        assert steps.engine.text("a") == steps.engine.text("b") == ANSWER
        assert steps.engine.core.metrics.snapshot()["draft_rows_total"] > 40
        batches = steps.engine.runner.batches
        return max(s for s, batch in zip(steps.seconds, batches, strict=True) if len(batch.requests) > 1)

    assert longest_s(max_itl_ms=max_itl_ms) <= max_itl_ms / 1e3 * (1 + 1e-9)
    assert longest_s() > max_itl_ms / 1e3, "there was nothing to hold"


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_a_request_is_drafted_no_more_than_it_allows(cap: int) -> None:
    """However much its drafts would gain."""
    steps = Steps(is_drafting=True)
    engine = steps.engine
    add(engine, "capped", ANSWER, max_tokens=60, speculation=SpeculationParams(max_draft_tokens=cap))
    add(engine, "free", ANSWER, max_tokens=len(ANSWER))
    engine.run()
    drafted: dict[str, list[int]] = {"capped": [], "free": []}
    for batch in engine.runner.batches:
        for rows in batch.requests:
            drafted[rows.request_id].append(rows.num_draft_tokens)
    assert max(drafted["capped"]) == cap
    assert max(drafted["free"]) > 3
    assert engine.text("capped") == ANSWER[:60]


def test_step_times_are_corrected_without_the_adaptive_choice_too() -> None:
    """Prompts go by them."""
    steps = Steps()
    engine, core = steps.engine, steps.engine.core
    too_low = StepTimeModel(StepTimeTable((1, 512), (0.005, 0.03055), per_attended_token=2.5e-7))
    policy = FixedDrafting(too_low)
    core.drafts = DraftStage(core.drafter, policy, core.executor.allocator, lambda: engine.now_s)
    steps.decoding(3)
    for _ in range(30):
        engine.step()
    load = StepLoad(3, 3, 3)
    assert too_low.predict(load) == pytest.approx(StepTimeModel(TABLE).predict(load), rel=0.1)
