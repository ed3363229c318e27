"""Log probabilities: against torch, after processing, along draft trees, and out of a whole engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchserve.request import ResolvedSampling
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.runner.step_handle import verify_batch
from batchserve.sampling.draw_kernel import floor_of
from batchserve.sampling.logits import allowed_tokens, process
from batchserve.sampling.logprobs import RAW, FoundLogprobs, logprobs_by_definition, note_logprobs
from batchserve.sampling.recordings import Recordings
from batchserve.types import SamplingParams, SpeculationParams, TokenLogprobs
from tests.equivalence.harness import Coverage, Job, PlainPath, build, run
from tests.tiny_models import VOCAB_SIZE

VOCAB = 1000


def random_row(seed: int) -> np.ndarray:
    row = np.random.default_rng(seed).normal(0, 4, VOCAB).astype(np.float32)
    row[::7] = np.round(row[::7])  # some are equal
    return row


def noted(row: np.ndarray, param: np.ndarray, token: int, num_tops: int) -> TokenLogprobs:
    found = FoundLogprobs.empty(3, num_tops)
    note_logprobs(row, param, token, num_tops, 1, found)
    return found.tokens(1, 1, num_tops)[0]


def sampling(**options: Any) -> ResolvedSampling:
    return ResolvedSampling(options.pop("temperature", 0.0), 0, 1.0, 5, 8, frozenset(), **options)


@pytest.mark.parametrize("seed", range(20))
def test_those_of_the_model_are_log_softmax(seed: int) -> None:
    row, token = random_row(seed), random.Random(seed).randrange(VOCAB)
    expected = torch.from_numpy(row).double().log_softmax(0)
    for found in (noted(row, RAW, token, 20), logprobs_by_definition(row, row, token, sampling(logprobs=20))):
        assert found.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert found.rank == int((row >= row[token]).sum())
        order = np.argsort(-row, kind="stable")[:20].tolist()
        assert [token_id for token_id, _ in found.top] == order
        assert [value for _, value in found.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


@pytest.mark.parametrize("cut", [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (50, 0.9, 0.05)])
@pytest.mark.parametrize("seed", range(5))
def test_processed_ones_are_those_of_the_distribution_that_is_drawn_from(
    seed: int, cut: tuple[int, float, float]
) -> None:
    row, (top_k, top_p, min_p) = random_row(seed), cut
    kept, values = allowed_tokens(row, 0.7, top_k, top_p, min_p)
    if cut == (0, 1.0, 0.0):  # then also those that are too unlikely to be drawn
        kept, values = np.arange(VOCAB), process(row, 0.7)
    expected = np.full(VOCAB, -np.inf)
    expected[kept] = torch.from_numpy(values).log_softmax(0).numpy()
    param = np.array([0.7, top_k, top_p, floor_of(min_p)])
    chosen = ResolvedSampling(
        0.7, top_k, top_p, 5, 8, frozenset(), min_p=min_p, logprobs=8, has_processed_logprobs=True
    )
    for token in (int(row.argmax()), int(row.argmin()), int(kept[0])):
        for found in (noted(row, param, token, 8), logprobs_by_definition(row, row, token, chosen)):
            assert found.logprob == pytest.approx(expected[token], abs=1e-5)
            ids = [token_id for token_id, _ in found.top]
            assert [value for _, value in found.top] == pytest.approx(expected[ids].tolist(), abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_each_token_of_an_accepted_path_has_its_own(seed: int) -> None:
    """A greedy and a sampled request are walked, by compiled code and without it."""
    rng = random.Random(seed)
    table = np.stack([random_row(seed * 1000 + i) for i in range(VOCAB)])
    rows, expected = [], []
    for place in range(2):
        chosen = sampling(temperature=float(place), logprobs=rng.randint(0, 6))
        ids, depth = [rng.randrange(VOCAB)], rng.randint(0, 4)
        plain = [RequestRows("x", 10, ids[-1:], [-1], 1, chosen)]
        tokens, found = [ids[0]], []
        for at in range(depth + 1):  # step by step
            plain = [RequestRows("x", 10 + at, tokens[-1:], [-1], 1, chosen)]
            batch = build_batch(plain)
            (one,) = verify_batch(batch, table[batch.input_ids[:1]], Recordings()).each()
            assert one is not None
            tokens += one.token_ids
            found += one.logprobs
        rows.append(RequestRows(str(place), 10, tokens[: depth + 1], [*range(-1, depth)], 1, chosen))
        expected.append((tokens[1:], found))
    batch = build_batch(rows)
    logits = table[batch.input_ids[batch.logit_rows[: batch.num_logits]]]
    each = verify_batch(batch, logits, Recordings(), num_threads=2).each()
    assert [(one.token_ids, one.logprobs) for one in each if one is not None] == expected
    each = verify_batch(batch, logits, Recordings(), can_walk_sampled=lambda: False).each()
    for one, (tokens, logprobs) in zip(each, expected, strict=True):
        assert one is not None
        assert one.token_ids == tokens
        for mine, theirs in zip(one.logprobs, logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


def test_an_engine_gives_those_of_transformers(tiny_model: dict[str, Path]) -> None:
    plain, params = PlainPath(tiny_model["llama"]), SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)
    prompts = [[5, 9, 11, 40], [7] * 9]
    answers = run(build(tiny_model["llama"]), [Job(prompt, params) for prompt in prompts], Coverage())
    for prompt, answer in zip(prompts, answers.values(), strict=True):
        assert len(answer.logprobs) == len(answer.token_ids) > 0
        for place, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            expected = torch.from_numpy(plain.logits(prompt + answer.token_ids[:place])).log_softmax(0)
            assert found.rank == 1
            assert found.top[0] == (token, found.logprob)
            assert found.logprob == pytest.approx(float(expected[token]), abs=1e-3)
            assert [value for _, value in found.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("chunk", [None, 7])
def test_those_of_a_prompt_are_of_every_token_whatever_runs_beside_it(
    tiny_model: dict[str, Path], chunk: int | None
) -> None:
    """In several chunks, twice (nothing is cached), beside requests that do not ask for them."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(size)] for size in (1, 2, 40, 150)]
    asked = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2)
    plain, others = PlainPath(tiny_model["llama"]), SamplingParams(temperature=0.0, max_tokens=30)
    engine = build(tiny_model["llama"], prefill_chunk_size=chunk)
    found = []
    for _ in range(2):
        jobs = [*(Job(prompt, asked) for prompt in prompts), Job([5, 9], others), Job(prompts[3], others)]
        answers = run(engine, jobs, Coverage())
        found.append([answers[i].prompt_logprobs for i in range(len(jobs))])
    assert found[0] == found[1]
    assert found[0][4:] == [None, None]
    assert found[0][0] == [None], "there is nothing before the only token"
    for prompt, each in zip(prompts[1:], found[0][1:4], strict=True):
        assert each is not None
        assert each[0] is None
        assert len(each) == len(prompt)
        for place, one in enumerate(each[1:], 1):
            expected = torch.from_numpy(plain.logits(prompt[:place])).log_softmax(0)
            assert one is not None
            assert one.logprob == pytest.approx(float(expected[prompt[place]]), abs=1e-3)
            assert [value for _, value in one.top] == pytest.approx(expected.topk(2).values.tolist(), abs=1e-3)


def test_a_preempted_request_gives_those_of_its_prompt_once(tiny_model: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, prompt_logprobs=0, ignore_eos=True)
    rng, coverage = random.Random(5), Coverage()
    jobs = [Job([rng.randrange(3, VOCAB_SIZE) for _ in range(60)], params) for _ in range(5)]
    answers = run(build(tiny_model["llama"], kv_cache_memory=300_000), jobs, coverage)
    assert coverage.preemptions > 0
    assert all(len(answer.prompt_logprobs or ()) == 60 for answer in answers.values())


def test_without_drafts_and_alone_they_have_the_same_bits(tiny_model: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=20, logprobs=2, ignore_eos=True)
    jobs = [Job([5, 9, 11, 40 + i], params) for i in range(6)]
    alone = [
        run(build(tiny_model["llama"]), [Job(job.prompt, params, speculation=SpeculationParams(is_enabled=False))],
            Coverage())[0].logprobs
        for job in jobs
    ]  # fmt: skip
    together = run(build(tiny_model["llama"]), jobs, Coverage())
    assert [answer.logprobs for answer in together.values()] == alone
