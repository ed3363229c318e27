"""fp32 greedy: whatever joins, leaves, is drafted, chunked or preempted, the tokens are transformers' own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from batchserve import config
from batchserve.draft.base import Drafter
from batchserve.types import SpeculationParams
from tests.drafters import HostileDrafter, OracleDrafter, RandomTreeDrafter
from tests.equivalence.harness import Coverage, Job, PlainPath, assert_equal_but_near_ties, build, random_jobs, run
from tests.tiny_models import SUPPORTED, VOCAB_SIZE

TEST_DRAFTERS = ("random", "hostile", "oracle")
REAL_DRAFTERS = tuple(name for name in config.DRAFTERS if name != "none")
MODES = tuple(f"trie {mode}" for mode in config.TRIE_MODES)
# "mixed": every request of the batch has a drafter, caps and references of its own.
EVERYTHING = (*TEST_DRAFTERS, *REAL_DRAFTERS, *MODES, "mixed")


def make_drafter(name: str, seed: int, jobs: list[Job], expected: dict[int, list[int]]) -> Drafter | None:
    truth = {tuple(job.prompt): expected[i] for i, job in enumerate(jobs)}
    kinds = {"random": RandomTreeDrafter, "hostile": HostileDrafter, "oracle": OracleDrafter}
    return kinds[name](VOCAB_SIZE, seed, truth) if name in kinds else None


def expected_answers(plain: PlainPath, jobs: list[Job]) -> dict[int, list[int]]:
    return {i: plain.greedy(job.prompt, job.params.max_tokens or 1) for i, job in enumerate(jobs)}


def drafter_options(name: str) -> dict[str, Any]:
    kind, _, mode = name.partition(" ")
    shape = config.DraftConfig(trie_mode=mode or "hierarchical", jacobi_window=4, jacobi_ngram=3)
    return {"drafter": kind if kind in REAL_DRAFTERS else "mixture", "draft": shape}


def random_speculation(rng: random.Random, job: Job) -> SpeculationParams:
    return SpeculationParams(
        drafter=rng.choice(config.DRAFTERS),
        max_draft_tokens=rng.choice([None, 1, 5]),
        branch_length=rng.choice([None, 1, 3]),
        draft_scope=rng.choice(["", "request", "other"]),
        references=[job.prompt[::-1]] if rng.random() < 0.5 else [],
    )


def check_family(folder: Path, seed: int, num_jobs: int, drafters: tuple[str, ...]) -> Coverage:
    """Random traffic under every drafter; options (batch size, chunks, memory) are drawn from the seed."""
    rng = random.Random(seed)
    plain, coverage = PlainPath(folder), Coverage()
    jobs = random_jobs(rng, num_jobs, VOCAB_SIZE)
    expected = expected_answers(plain, jobs)
    kv_bytes = build(folder).core.executor.allocator.bytes_per_token
    for name in drafters:
        for job in jobs:
            job.speculation = random_speculation(rng, job) if name == "mixed" else SpeculationParams()
            job.leave = job.arrival + rng.randint(1, 30) if rng.random() < 0.15 else None
        options = {
            "max_num_seqs": rng.choice([1, 2, 5, 16]),
            "prefill_chunk_size": rng.choice([1, 7, 64, None]),
            "decoding_length": rng.choice([3, 8, 16]),
            "max_num_batched_tokens": rng.choice([40, 128, 1024]),
            **drafter_options(name),
        }
        if rng.random() < 0.5:  # room for little more than one request: preemption is forced
            options["kv_cache_memory"] = 448 * kv_bytes
        engine = build(folder, make_drafter(name, seed, jobs, expected), max_model_len=400, **options)
        answers = run(engine, jobs, coverage)
        assert_equal_but_near_ties(plain, jobs, answers, expected, coverage)
    return coverage


@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_every_family_under_every_drafter(family: str, tiny_model: dict[str, Path]) -> None:
    is_thorough = family in ("llama", "gpt2")
    drafters = EVERYTHING if is_thorough else (*TEST_DRAFTERS, "mixed")
    coverage = check_family(tiny_model[family], seed=7, num_jobs=16 if is_thorough else 8, drafters=drafters)
    assert coverage.accepted > 0
    assert coverage.near_ties <= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_every_family_at_length(family: str, seed: int, tiny_model: dict[str, Path]) -> None:
    coverage = check_family(tiny_model[family], seed=100 + seed, num_jobs=24, drafters=EVERYTHING)
    assert coverage.accepted > 0
    assert coverage.near_ties <= coverage.tokens // 500
