"""The suite's own coverage, and the proof that it can fail: seeded faults turn it red."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchserve.attention import mask, paged
from batchserve.attention.base import Spans
from batchserve.attention.compiled import CompiledAttention
from batchserve.attention.cpu import CpuBackend
from batchserve.errors import BatchserveError
from batchserve.kv.slab import SlabAllocator
from batchserve.kv.slots import SlotAllocator
from batchserve.runner import ragged_batch, step_handle
from batchserve.sampling.device import DeviceSampler
from batchserve.sampling.verify import StepTokens, VerifiedTokens
from tests.drafters import OracleDrafter
from tests.equivalence.harness import Coverage, Job, PlainPath, assert_equal_but_near_ties, build, random_jobs, run
from tests.equivalence.test_greedy import expected_answers
from tests.tiny_models import VOCAB_SIZE

SMALL_MEMORY = 384 * 3 * 2 * 2 * 16 * 4  # 384 tokens of the tiny llama in fp32


def jobs_with_stops(plain: PlainPath, seed: int) -> tuple[list[Job], dict[int, list[int]], dict[int, list[int]]]:
    """(jobs, expected answers, untruncated ones): most jobs end at a stop token somewhere in their answer."""
    rng = random.Random(seed)
    jobs = random_jobs(rng, 24, VOCAB_SIZE, longest=120, max_tokens=100)
    for job in jobs[::2]:  # just below an extent: several will outgrow the memory at once
        job.prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(40, 62))]
    whole = expected_answers(plain, jobs)
    expected = dict(whole)
    for i, job in enumerate(jobs):
        if len(whole[i]) > 12 and rng.random() < 0.7:
            stop = whole[i][rng.randint(8, len(whole[i]) - 1)]
            job.params = dataclasses.replace(job.params, stop_token_ids=(stop,))
            expected[i] = whole[i][: whole[i].index(stop)]
    return jobs, expected, whole


def run_oracle(folder: Path, seed: int, **options: object) -> Coverage:
    """Oracle drafts under stop tokens and too little memory; raises AssertionError on a wrong token."""
    plain, coverage = PlainPath(folder), Coverage()
    jobs, expected, whole = jobs_with_stops(plain, seed)
    drafter = OracleDrafter(VOCAB_SIZE, seed, {tuple(job.prompt): whole[i] for i, job in enumerate(jobs)})
    engine = build(folder, drafter, kv_cache_memory=SMALL_MEMORY, max_model_len=320, decoding_length=12, **options)
    answers = run(engine, jobs, coverage)
    assert_equal_but_near_ties(plain, jobs, answers, expected, coverage)
    return coverage


@pytest.mark.parametrize("chunk", [5, None])
def test_coverage_of_the_suite(tiny_model: dict[str, Path], chunk: int | None) -> None:
    coverage = run_oracle(tiny_model["llama"], seed=3, prefill_chunk_size=chunk)
    assert coverage.accepted >= 0.3 * coverage.drafted
    assert min(coverage.trees.values()) > 0, coverage.trees
    assert coverage.preemptions > 0
    assert coverage.stops_inside_run > 0


def wrong_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mask, deeper nodes hang from their grandparent's child before: the previous row."""
    right_mask, right_rows, right_spans = mask.ancestor_mask, paged.describe_rows, CpuBackend._gather

    def moved(parents: np.ndarray, local: np.ndarray) -> np.ndarray:
        is_wrong = (parents != local - 1) & (parents > 0) & (local > 1)
        return np.where(is_wrong, parents - 1, parents)

    def faulty_mask(parents: np.ndarray) -> np.ndarray:
        return right_mask(moved(parents, np.arange(len(parents))))

    def faulty_rows(spans: np.ndarray, parents: np.ndarray, *more: Any) -> Any:
        starts = np.repeat(spans[:, 0], spans[:, 1])
        return right_rows(spans, moved(parents, np.arange(len(parents)) - starts), *more)

    def faulty_spans(backend: CpuBackend, spans: Spans) -> Any:
        parents = [moved(span.parents, np.arange(span.num_rows)) for span in spans]
        return dataclasses.replace(right_spans(backend, spans), parents=np.concatenate(parents))

    monkeypatch.setattr(mask, "ancestor_mask", faulty_mask)
    monkeypatch.setattr(CpuBackend, "_gather", faulty_spans)
    right_jobs = CompiledAttention.begin_jobs

    def faulty_jobs(self: CompiledAttention, spans: Spans, *others: Any) -> bool:
        parents = np.where(spans.parents > 0, spans.parents - 1, spans.parents).astype(np.int32)
        held.append(parents)
        return right_jobs(self, dataclasses.replace(spans, parents=parents), *others)

    held: list[np.ndarray] = []  # jobs have their addresses
    monkeypatch.setattr(CompiledAttention, "begin_jobs", faulty_jobs)
    monkeypatch.setattr(paged, "describe_rows", faulty_rows)


def wrong_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every branching row is one position too late, as if positions followed rows, not depth."""

    right = ragged_batch.lay_out

    def faulty(*arguments: Any) -> int:
        num_logits = right(*arguments)
        rows, is_chain, _, _, positions, *_ = arguments[-1]
        for start, count, context in rows[~is_chain].tolist():
            positions[start : start + count] = context + np.arange(count)
        return num_logits

    monkeypatch.setattr(ragged_batch, "lay_out", faulty)


def accepted_kv_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows are kept instead of the accepted ones."""

    def first_rows(right: Callable[..., None]) -> Callable[..., None]:
        return lambda allocator, names, counts, moved: right(allocator, names, counts, {})

    for allocator in (SlabAllocator, SlotAllocator):
        monkeypatch.setattr(allocator, "commit_all", first_rows(allocator.commit_all))
    monkeypatch.setattr(SlabAllocator, "move_rows", lambda *arguments: None)


def last_accepted_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of an accepted path is dropped; the bonus token is kept. (Compiled code relies on one a path.)"""
    right_walk, right_reading = step_handle.verify_batch, DeviceSampler.to_verified

    def cut(verified: VerifiedTokens | None) -> VerifiedTokens | None:
        if verified is None or not verified.rows:
            return verified
        tokens = [*verified.token_ids[:-2], verified.token_ids[-1]]
        return dataclasses.replace(verified, token_ids=tokens, rows=verified.rows[:-1])

    def walk(*arguments: Any, **options: Any) -> StepTokens:
        return StepTokens.of([*map(cut, right_walk(*arguments, **options))])

    monkeypatch.setattr(step_handle, "verify_batch", walk)
    monkeypatch.setattr(DeviceSampler, "to_verified", lambda *arguments: list(map(cut, right_reading(*arguments))))


@pytest.mark.parametrize("fault", [wrong_parent, wrong_position, accepted_kv_not_kept, last_accepted_lost])
def test_seeded_faults_turn_it_red(
    fault: Callable[[pytest.MonkeyPatch], None], tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError, BatchserveError)):
        run_oracle(tiny_model["llama"], seed=3)
