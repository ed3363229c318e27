"""The adaptive decoding length chooses rows, never tokens; and it leaves alone what does not pay."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from batchserve.config import EngineConfig
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.step_time import StepTimeModel, StepTimeTable
from batchserve.draft.base import DraftQuery, DraftTree
from batchserve.startup.build import BuiltEngine
from batchserve.types import SamplingParams, SpeculationParams
from tests.drafters import HostileDrafter, ScriptedDrafter
from tests.equivalence.harness import Coverage, Job, PlainPath, assert_equal_but_near_ties, build, random_jobs, run
from tests.equivalence.test_greedy import drafter_options, expected_answers, make_drafter, random_speculation
from tests.tiny_models import VOCAB_SIZE

TABLE = StepTimeTable((4, 8, 16, 32, 64), (0.010, 0.011, 0.014, 0.020, 0.034))


def jittery_clock(seed: int) -> Callable[[], float]:
    """Steps that seem to take anything between nothing and long, so that prices and choices are all over the place."""
    rng, now = random.Random(seed), [0.0]

    def read() -> float:
        now[0] += rng.expovariate(1000.0)
        return now[0]

    return read


@pytest.mark.parametrize("name", ["oracle", "random", "hostile", "mixture", "trie", "jacobi", "mixed"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokens_are_the_same_whatever_is_chosen(family: str, name: str, tiny_model: dict[str, Path]) -> None:
    folder, rng, coverage = tiny_model[family], random.Random(name), Coverage()
    plain, jobs = PlainPath(folder), random_jobs(rng, 10, VOCAB_SIZE)
    expected = expected_answers(plain, jobs)
    for job in jobs:
        job.speculation = random_speculation(rng, job) if name == "mixed" else SpeculationParams()
    kv_bytes = build(folder).core.executor.allocator.bytes_per_token
    engine = build(
        folder,
        make_drafter(name, 7, jobs, expected),
        jittery_clock(3),
        adaptive=True,
        max_model_len=400,
        max_num_seqs=rng.choice([1, 5, 16]),
        prefill_chunk_size=rng.choice([7, None]),
        kv_cache_memory=448 * kv_bytes if rng.random() < 0.5 else None,
        **drafter_options(name),
    )
    answers = run(engine, jobs, coverage)
    assert_equal_but_near_ties(plain, jobs, answers, expected, coverage)
    if name == "oracle":
        assert coverage.accepted > 0


class SureAndWrong(ScriptedDrafter):
    """Claims certainty and is never right; counts how often it is asked."""

    name = "sure"
    num_asked = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        self.num_asked += len(queries)
        return super().propose(queries)

    def tree(self, query: DraftQuery) -> DraftTree:
        tree, truth = DraftTree(), self.truth(query.request_id)
        wrong = 3 if not truth or truth[0] != 3 else 4
        for _ in range(min(query.max_tokens, query.max_depth)):
            tree.add(wrong, len(tree) - 1, 1.0)
        return tree


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_drafter_that_is_always_wrong_is_left_alone_within_32_steps(batch: int, tiny_model: dict[str, Path]) -> None:
    folder, rng = tiny_model["llama"], random.Random(batch)
    plain = PlainPath(folder)
    params = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
    jobs = [Job([rng.randrange(3, VOCAB_SIZE) for _ in range(8)], params) for _ in range(batch)]
    truth = _through_eos(plain, [job.prompt for job in jobs], 161)
    drafter = SureAndWrong(VOCAB_SIZE, 0, truth)
    engine = _steady_engine(folder, drafter, max_num_seqs=16)
    rows, asked = _rows_by_step(engine, drafter, jobs)
    late = rows[32:]
    assert len(late) > 100
    assert sum(drafts for drafts, _ in late) < 0.01 * sum(total for _, total in late)
    # Asked at first, then for probes only: after 32 steps some once in 32.
    assert asked[-1] - asked[32] <= 0.1 * batch * len(late)


def test_hostile_trees_of_any_shape_are_left_alone_too(tiny_model: dict[str, Path]) -> None:
    folder, rng = tiny_model["llama"], random.Random(9)
    plain = PlainPath(folder)
    params = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
    jobs = [Job([rng.randrange(3, VOCAB_SIZE) for _ in range(8)], params) for _ in range(4)]
    truth = _through_eos(plain, [job.prompt for job in jobs], 161)
    drafter = HostileDrafter(VOCAB_SIZE, 0, truth)
    engine = _steady_engine(folder, drafter, max_num_seqs=16)
    late = _rows_by_step(engine, drafter, jobs)[0][32:]
    assert sum(drafts for drafts, _ in late) < 0.01 * sum(total for _, total in late)


def test_answers_that_end_at_once_are_misses_too(tiny_model: dict[str, Path]) -> None:
    """Nothing comes behind an answer's end, so the end itself must tell that the drafts were wrong."""
    folder, rng = tiny_model["llama"], random.Random(3)
    plain = PlainPath(folder)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(8)] for _ in range(160)]
    truth = _through_eos(plain, prompts, 2)
    engine = _steady_engine(folder, SureAndWrong(VOCAB_SIZE, 0, truth), max_num_seqs=4)
    drafted = []
    for first in range(0, len(prompts), 4):
        jobs = [
            Job(prompt, SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(truth[tuple(prompt)][1],)))
            for prompt in prompts[first : first + 4]
        ]
        before = engine.core.metrics.snapshot()["draft_rows_total"]
        run(engine, jobs, Coverage())
        drafted.append(engine.core.metrics.snapshot()["draft_rows_total"] - before)
    assert sum(drafted[:8]) > 0
    assert sum(drafted[8:]) <= 0.01 * 4 * len(drafted[8:])


def _through_eos(plain: PlainPath, prompts: list[list[int]], count: int) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): text for prompt, text in zip(prompts, plain.through_eos(prompts, count), strict=True)}


def _steady_engine(folder: Path, drafter: ScriptedDrafter, *, max_num_seqs: int) -> BuiltEngine:
    """Step times are given, and every step seems to take the same: the machine does not decide these tests."""
    engine = build(folder, drafter, _steady_clock(), adaptive=True, max_num_seqs=max_num_seqs)
    engine.core.drafts.policy = AdaptiveDrafting(StepTimeModel(TABLE), EngineConfig().draft_inflation)
    return engine


def _steady_clock() -> Callable[[], float]:
    now = [0.0]

    def read() -> float:
        now[0] += 1e-3
        return now[0]

    return read


def _rows_by_step(
    engine: BuiltEngine, drafter: ScriptedDrafter, jobs: list[Job]
) -> tuple[list[tuple[int, int]], list[int]]:
    """(draft rows, all rows) of each decoding step, and how often the drafter had been asked before each."""
    steps: list[tuple[int, int]] = []
    asked: list[int] = []
    launch = engine.core.executor.launch

    def watching(batch):  # type: ignore[no-untyped-def]
        if all(rows.num_pending == 1 for rows in batch.requests):
            steps.append((sum(rows.num_draft_tokens for rows in batch.requests), batch.num_rows))
            asked.append(getattr(drafter, "num_asked", 0))
        return launch(batch)

    engine.core.executor.launch = watching  # type: ignore[method-assign]
    run(engine, jobs, Coverage())
    return steps, asked
