"""Speculation on against off in the default dtype, greedy and sampled, under the near-tie rule."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from batchserve.runner.loader import resolve_dtype
from batchserve.runner.model_folder import resolve_model
from batchserve.types import SamplingParams
from tests.drafters import OracleDrafter
from tests.equivalence.harness import Coverage, Job, PlainPath, assert_equal_but_near_ties, build, random_jobs, run
from tests.tiny_models import VOCAB_SIZE

DEFAULT = resolve_dtype("auto")


def sampled_jobs(rng: random.Random, count: int, vocab_size: int) -> list[Job]:
    """Greedy and sampled jobs, with and without top_k and top_p."""
    jobs = random_jobs(rng, count, vocab_size, longest=80, max_tokens=32)
    for job in jobs:
        job.params = SamplingParams(
            temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.5]),
            top_k=rng.choice([0, 1, 5, 40]),
            top_p=rng.choice([1.0, 0.95, 0.5]),
            seed=rng.randrange(2**64),
            max_tokens=job.params.max_tokens,
            ignore_eos=True,
        )
    return jobs


def check_on_against_off(model: Path, seed: int, vocab_size: int, dtype: torch.dtype) -> Coverage:
    rng, coverage = random.Random(seed), Coverage()
    jobs = sampled_jobs(rng, 12, vocab_size)
    name = str(dtype).removeprefix("torch.")
    off_engine = build(model, dtype=name, max_num_seqs=1, max_model_len=200)
    off = {i: a.token_ids for i, a in run(off_engine, jobs, Coverage(), speculate=False).items()}
    plain = PlainPath(model, dtype)
    truth = {tuple(job.prompt): off[i] for i, job in enumerate(jobs)}
    for drafter in (None, OracleDrafter(vocab_size, seed, truth)):
        engine = build(model, drafter, dtype=name, max_num_seqs=5, prefill_chunk_size=16, max_model_len=200)
        answers = run(engine, jobs, coverage)
        assert_equal_but_near_ties(plain, jobs, answers, off, coverage)
    return coverage


@pytest.mark.parametrize("dtype", sorted({torch.float32, DEFAULT}, key=str), ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tiny_models(family: str, dtype: torch.dtype, tiny_model: dict[str, Path]) -> None:
    coverage = check_on_against_off(tiny_model[family], 5, VOCAB_SIZE, dtype)
    assert coverage.accepted > 20
    assert coverage.near_ties <= coverage.tokens // 50


@pytest.mark.parametrize("dtype", sorted({torch.float32, DEFAULT}, key=str), ids=str)
def test_bundled_model(dtype: torch.dtype) -> None:
    coverage = check_on_against_off(Path(resolve_model("bundled")), 6, 4096, dtype)
    assert coverage.accepted > 20
    assert coverage.near_ties <= coverage.tokens // 50
