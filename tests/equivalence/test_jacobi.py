"""The Jacobi drafter end to end: its unverified rows run in every forward, and change only the number of steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from batchserve.draft.base import DraftQuery, DraftTree
from batchserve.draft.jacobi import JacobiDrafter
from batchserve.types import SamplingParams
from tests.equivalence.harness import Coverage, Job, PlainPath, assert_equal_but_near_ties, build, random_jobs, run
from tests.equivalence.test_greedy import expected_answers
from tests.equivalence.test_sampled import sampled_jobs
from tests.tiny_models import VOCAB_SIZE


class WatchedDrafter(JacobiDrafter):
    """Holds the engine to its side: one argmax for every unverified row, and for no other tree than the last."""

    def __init__(self, *options: int, prompt_ngrams: bool) -> None:
        super().__init__(*options, prompt_ngrams=prompt_ngrams)
        self.unverified: dict[str, int] = {}
        self.observed = 0

    def _propose(self, query: DraftQuery) -> DraftTree:
        tree = super()._propose(query)
        self.unverified[query.request_id] = len(tree) - tree.num_verified
        return tree

    def observe(self, request_id: str, token_ids: list[int]) -> None:  # type: ignore[override]
        assert len(token_ids) == self.unverified.pop(request_id)
        self.observed += len(token_ids)
        super().observe(request_id, token_ids)


def check_greedy(folder: Path, seed: int, num_jobs: int) -> Coverage:
    """Random traffic under several shapes of the window; batch size, chunks and memory are drawn from the seed."""
    rng = random.Random(seed)
    plain, coverage = PlainPath(folder), Coverage()
    jobs = random_jobs(rng, num_jobs, VOCAB_SIZE, max_tokens=40)
    expected = expected_answers(plain, jobs)
    kv_bytes = build(folder).core.executor.allocator.bytes_per_token
    for shape, prompt_ngrams, is_tight in (((3, 4, 2), False, True), ((7, 5), True, False), ((4, 3, 4), True, True)):
        for job in jobs:
            job.leave = job.arrival + rng.randint(1, 30) if rng.random() < 0.15 else None
        drafter = WatchedDrafter(*shape, prompt_ngrams=prompt_ngrams)
        options = {
            "max_num_seqs": rng.choice([4, 16]) if is_tight else rng.choice([1, 2, 5]),
            "prefill_chunk_size": rng.choice([7, 64, None]),
            "decoding_length": rng.choice([6, 20, 60]),
            "max_num_batched_tokens": rng.choice([40, 128, 1024]),
        }
        if is_tight:  # room for little more than one request: preemption is forced
            options["kv_cache_memory"] = 448 * kv_bytes
        answers = run(build(folder, drafter, max_model_len=400, **options), jobs, coverage)
        assert_equal_but_near_ties(plain, jobs, answers, expected, coverage)
        assert drafter.observed > 0
        assert drafter.memory_bytes() == 0, "a request's state outlives it"
    return coverage


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_in_any_batch(family: str, tiny_model: dict[str, Path]) -> None:
    coverage = check_greedy(tiny_model[family], 3, 14)
    assert coverage.accepted > 20
    assert coverage.preemptions > 0
    assert coverage.near_ties <= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "deepseek_v3"])
def test_greedy_at_length(family: str, seed: int, tiny_model: dict[str, Path]) -> None:
    coverage = check_greedy(tiny_model[family], 50 + seed, 24)
    assert coverage.accepted > 20
    assert coverage.near_ties <= coverage.tokens // 500


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sampled_on_against_off(family: str, tiny_model: dict[str, Path]) -> None:
    folder = tiny_model[family]
    jobs = sampled_jobs(random.Random(8), 12, VOCAB_SIZE)
    off = run(build(folder, max_num_seqs=1, max_model_len=200), jobs, Coverage(), speculate=False)
    plain, coverage = PlainPath(folder), Coverage()
    for prompt_ngrams in (False, True):
        drafter = WatchedDrafter(5, 4, 5, prompt_ngrams=prompt_ngrams)
        options = {"max_num_seqs": 5, "prefill_chunk_size": 16, "max_model_len": 200, "decoding_length": 30}
        answers = run(build(folder, drafter, **options), jobs, coverage)
        assert_equal_but_near_ties(plain, jobs, answers, {i: a.token_ids for i, a in off.items()}, coverage)
        assert drafter.observed > 0
    assert coverage.accepted > 0
    assert coverage.near_ties <= 1


def test_the_window_alone_speeds_up_a_model_that_repeats_itself(tiny_model: dict[str, Path]) -> None:
    """No n-gram of the text: what is accepted was found by Jacobi iterations."""
    prompt = [5, 9, 11, 40]
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    drafter = WatchedDrafter(8, 4, 8, prompt_ngrams=False)
    engine = build(tiny_model["llama"], drafter, decoding_length=48, max_model_len=256)
    coverage = Coverage()
    run(engine, [Job(prompt, params)], coverage)
    assert coverage.tokens == 200
    assert coverage.tokens / (coverage.tokens - coverage.accepted) > 1.5


def test_a_full_context_ends_without_rows_beyond_it(tiny_model: dict[str, Path]) -> None:
    """The window shrinks with the positions that are left; the last token comes by a plain step."""
    drafter = WatchedDrafter(8, 4, 8, prompt_ngrams=True)
    engine = build(tiny_model["llama"], drafter, decoding_length=48, max_model_len=64)
    params = SamplingParams(temperature=0.0, max_tokens=44, ignore_eos=True)
    plain, coverage = PlainPath(tiny_model["llama"]), Coverage()
    jobs = [Job([7, 8, 9, 10] * 5, params)]
    answers = run(engine, jobs, coverage)
    assert len(answers[0].token_ids) == 44
    assert_equal_but_near_ties(plain, jobs, answers, {0: ignoring_eos(plain, jobs[0])}, coverage)


def ignoring_eos(plain: PlainPath, job: Job) -> list[int]:
    tokens: list[int] = []
    for _ in range(job.params.max_tokens or 0):
        tokens.append(int(plain.logits(job.prompt + tokens).argmax()))
    return tokens
