"""A step of the GPU path: what comes back from the device, and what only the host can decide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchserve.native import pool
from batchserve.runner import queued_step, step_handle
from batchserve.runner.queued_step import HostCopy, QueuedStep
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.runner.step_handle import verify_batch, verify_request
from batchserve.sampling.device import DeviceSampler
from batchserve.sampling.recordings import Recordings
from batchserve.sampling.sampler import RowSampler
from batchserve.types import SamplingParams
from tests.drafters import RandomTreeDrafter
from tests.equivalence.harness import Coverage, Job, build, run
from tests.factories import examples, make_sampling
from tests.sampling.test_device import random_batch, random_forced, random_logits
from tests.tiny_models import VOCAB_SIZE


def queued(batch: Any, logits: torch.Tensor, forced: Any, num_candidates: int) -> QueuedStep:
    sampler = DeviceSampler(len(batch.requests), num_candidates)
    if not len(batch.logit_rows):
        return QueuedStep(batch, sampler, logits, None, forced)
    metadata = sampler.build_metadata(batch, len(logits), forced)
    tokens = sampler.sample(logits, torch.from_numpy(metadata.blob), metadata.kind)
    return QueuedStep(batch, sampler, logits, tokens, forced)


def test_what_the_device_cannot_decide_the_host_does_from_the_requests_own_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With few candidates, and logits that are often equal, many requests need it."""
    right, num_on_host, num_requests = verify_request, 0, 0

    def counting(rows: Any, sampler: Any, recorded: Sequence[int], adjustments: Any) -> Any:
        nonlocal num_on_host
        num_on_host += 1
        assert len(sampler._logits) == 1 + rows.num_draft_tokens
        return right(rows, sampler, recorded, adjustments)

    @examples(100)
    @given(st.integers(0, 2**32), st.sampled_from([4, 1024]), st.booleans())
    def check(seed: int, num_candidates: int, has_forced: bool) -> None:
        nonlocal num_requests
        rng = random.Random(seed)
        batch = random_batch(rng, 60)
        logits = random_logits(rng, batch, 60, torch.float32)
        forced = random_forced(rng, batch, 60) if has_forced else Recordings()
        expected = [*verify_batch(batch, logits.float().numpy(), forced)]
        num_requests += len(batch.requests)
        with monkeypatch.context() as patch:
            patch.setattr(queued_step, "verify_request", counting)
            assert [*queued(batch, logits, forced, num_candidates).wait()] == expected

    check()
    assert 0 < num_on_host < num_requests / 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recorded_answers_come_out_of_the_gpu_path(tiny_model: dict[str, Path], temperature: float) -> None:
    rng = random.Random(5)
    recorded = [[rng.randrange(3, VOCAB_SIZE) for _ in range(30)] for _ in range(4)]
    built = build(tiny_model["llama"], RandomTreeDrafter(VOCAB_SIZE, 5), attention_backend="torch", max_num_seqs=3)
    built.core.executor.forced.update({str(i): text for i, text in enumerate(recorded)})
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=20, ignore_eos=True)
    answers = run(built, [Job(text[:10], params) for text in recorded], Coverage())
    assert [answers[i].token_ids for i in range(4)] == [text[10:] for text in recorded]


def test_a_step_that_samples_nothing_is_waited_for_too(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its time would be that of the next one."""
    runner = build(tiny_model["llama"], attention_backend="torch", drafter="none").core.executor
    waited: list[int] = []
    wait = HostCopy.wait
    monkeypatch.setattr(HostCopy, "wait", lambda self: (waited.append(1), wait(self))[1])
    runner.allocator.reserve("r", 5)
    handle = runner.launch(build_batch([RequestRows("r", 0, [5] * 5, list(range(-1, 4)), 5, None)]))
    assert [*handle.wait()] == [None]
    assert waited == [1]


def test_on_the_gpu_path_the_forward_runs_at_launch_and_on_the_cpus_own_when_waited_for(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend, name, expected in (
        ("torch", "_logits", ["forward", "launched"]),
        ("cpu", "forward", ["launched", "forward"]),
    ):
        runner = build(tiny_model["llama"], attention_backend=backend, drafter="none").core.executor
        log: list[str] = []
        forward = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda batch, f=forward, log=log: (log.append("forward"), f(batch))[1])
        runner.allocator.reserve("r", 5)
        handle = runner.launch(build_batch([RequestRows("r", 0, [5] * 5, list(range(-1, 4)), 5, make_sampling())]))
        log.append("launched")
        (verified,) = handle.wait()
        assert verified is not None
        assert len(verified.token_ids) == 1
        assert log == expected


@examples(200)
@given(
    st.integers(0, 2**32), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans()
)
def test_all_trees_of_a_step_are_walked_as_each_would_be_alone(
    seed: int, has_forced: bool, dtype: torch.dtype, is_wide: bool
) -> None:
    """Compiled code walks the greedy ones at once, and the sampled ones; verify_request any one row by row."""
    rng, vocab_size = random.Random(seed), 1500 if is_wide else 60
    batch = random_batch(rng, vocab_size)
    logits = random_logits(rng, batch, vocab_size, dtype)
    forced = random_forced(rng, batch, vocab_size) if has_forced else Recordings()
    verified = verify_batch(batch, logits.float().numpy(), forced)
    assert [*verify_batch(batch, logits.float().numpy(), forced, can_walk_sampled=lambda: False)] == [*verified]
    for rows, first, found in zip(batch.requests, batch.first_logit.tolist(), verified, strict=True):
        if rows.sampling is None:
            assert found is None
            continue
        sampler = RowSampler(logits[first : first + 1 + rows.num_draft_tokens].float().numpy())
        assert found == verify_request(rows, sampler, forced.get(rows.request_id, ()))


def test_walks_that_find_no_memory_give_no_token_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    batch = random_batch(rng, 500)
    logits, forced = random_logits(rng, batch, 500, torch.bfloat16), random_forced(rng, batch, 500)
    assert any(each is not None and each.temperature > 0 for each in batch.samplings)
    verify_batch(batch, logits.float().numpy(), forced)
    monkeypatch.setattr(pool, "run", lambda loop, job, count: None)  # as compiled code ends without memory
    with pytest.raises(MemoryError, match=r"no memory to sample from 500 tokens"):
        verify_batch(batch, logits.float().numpy(), forced)


def test_threads_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled requests are walked side by side, the rows of each one after the other."""
    started: list[int] = []
    run = pool.run
    monkeypatch.setattr(pool, "run", lambda loop, job, count: (started.append(count), run(loop, job, count)))
    monkeypatch.setattr(step_handle, "ALONE", 0)
    for seed in range(40):
        rng = random.Random(seed)
        batch = random_batch(rng, 500)
        logits, forced = random_logits(rng, batch, 500, torch.bfloat16), random_forced(rng, batch, 500)
        shared = [*verify_batch(batch, logits.float().numpy(), forced, num_threads=2)]
        with monkeypatch.context() as alone:
            alone.setattr(pool, "run", lambda loop, job, count: run(loop, job, 1))
            assert [*verify_batch(batch, logits.float().numpy(), forced, num_threads=2)] == shared
    assert set(started) == {2}
