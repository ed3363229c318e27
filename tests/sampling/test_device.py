"""Sampling and walking on the device give what the host's sampler and walk give, whatever the step is."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from batchserve.request import ResolvedSampling
from batchserve.runner.ragged_batch import RaggedBatch, RequestRows, build_batch
from batchserve.runner.step_handle import verify_batch
from batchserve.sampling.device import DeviceSampler, SamplingKind
from batchserve.sampling.device_noise import stream_keys
from batchserve.sampling.device_rows import NEEDS_HOST, RowParams, sample_rows
from batchserve.sampling.noise import gumbel, stream_key
from batchserve.sampling.recordings import Recordings
from batchserve.sampling.sampler import NO_TOKEN, sample_row
from batchserve.sampling.verify import VerifiedTokens
from tests.factories import examples, make_sampling, random_tree

Forced = Mapping[str, Sequence[int]]
Verified = list[VerifiedTokens | None]
MAX_NUM_SEQS = 6
NUM_ROWS = 96


def random_sampling(rng: random.Random) -> ResolvedSampling:
    return make_sampling(
        temperature=rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 2, 5, 40]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.05]),
        seed=rng.choice([0, 7, 2**64 - 1, rng.getrandbits(64)]),
    )


def random_rows(rng: random.Random, request_id: str, vocab_size: int, sampling: ResolvedSampling) -> RequestRows:
    """A prefill chunk (sampled or not), a plain row, or a tree, of which some rows may not be verified."""
    num_pending = rng.choice([1, 1, 1, rng.randint(2, 6)])
    tree = random_tree(rng, rng.choice([0, rng.randint(1, 14)]) if num_pending == 1 else 0, vocab_size)
    for node in range(len(tree)):
        parent = tree.parents[node]
        if (parent >= 0 and not tree.is_verified[parent]) or (node % 3 == 2 and rng.random() < 0.3):
            tree.is_verified[node] = False
    is_sampled = bool(tree.token_ids) or rng.random() < 0.8
    parents = list(range(-1, num_pending - 1)) + [num_pending - 1 if p < 0 else num_pending + p for p in tree.parents]
    token_ids = [rng.randrange(vocab_size) for _ in range(num_pending)] + tree.token_ids
    sampling_of = sampling if is_sampled else None
    return RequestRows(
        request_id, rng.randint(0, 300), token_ids, parents, num_pending, sampling_of, tuple(tree.is_verified)
    )


def random_batch(rng: random.Random, vocab_size: int) -> RaggedBatch:
    count = rng.randint(1, MAX_NUM_SEQS)
    return build_batch([random_rows(rng, f"r{i}", vocab_size, random_sampling(rng)) for i in range(count)])


def random_logits(rng: random.Random, batch: RaggedBatch, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[NUM_ROWS, vocab_size]: often in favour of a child, often with ties, seldom with an overflow; padding is NaN."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    logits = numbers.standard_normal((NUM_ROWS, vocab_size)) * rng.choice([0.1, 1.0, 4.0, 20.0])
    if rng.random() < 0.5:
        logits = np.round(logits * 2) / 2
    for rows, first in zip(batch.requests, batch.first_logit, strict=True):
        for row in range(rows.root, len(rows.token_ids)) if rows.sampling else ():
            children = [i for i, parent in enumerate(rows.parents) if parent == row]
            if children and rng.random() < 0.8:
                logits[first + row - rows.root, rows.token_ids[rng.choice(children)]] += rng.choice([3.0, 15.0, 100.0])
    for row in range(NUM_ROWS):
        if rng.random() < 0.06:
            logits[row, rng.randrange(vocab_size)] = rng.choice([np.nan, np.inf, -np.inf])
        if rng.random() < 0.03:
            logits[row] = -np.inf
    logits[len(batch.logit_rows) :] = np.nan
    return torch.from_numpy(logits).to(dtype)


def random_forced(rng: random.Random, batch: RaggedBatch, vocab_size: int) -> Recordings:
    """Recordings that end before, among or behind the rows; now and then they follow a draft."""
    forced = {}
    for rows in batch.requests:
        if rng.random() < 0.6:
            length = max(0, rows.context_len + rows.num_pending + rng.randint(-2, 12))
            forced[rows.request_id] = [rng.randrange(vocab_size) for _ in range(length)]
            for place, token in enumerate(rows.token_ids[rows.num_pending :], rows.context_len + rows.num_pending):
                if place < length and rng.random() < 0.7:
                    forced[rows.request_id][place] = token
    return Recordings(forced)


def on_device(
    sampler: DeviceSampler, batch: RaggedBatch, logits: torch.Tensor, forced: Forced
) -> tuple[torch.Tensor, Verified, list[int]]:
    """The device's result, the walk's results, and the requests that the host had to verify."""
    metadata = sampler.build_metadata(batch, len(logits), forced)
    result = sampler.sample(logits, torch.from_numpy(metadata.blob), metadata.kind)
    on_host: list[int] = []

    def verify_on_host(index: int) -> VerifiedTokens:
        on_host.append(index)
        rows, first = batch.requests[index], batch.first_logit[index]
        alone = build_batch([rows])
        (verified,) = verify_batch(alone, logits[first : first + 1 + rows.num_draft_tokens].float().numpy(), forced)
        assert verified is not None
        return verified

    return result, sampler.to_verified(result.numpy(), batch, verify_on_host), on_host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [2, 5, 300])
def test_a_step_is_verified_like_on_the_host(dtype: torch.dtype, vocab_size: int) -> None:
    """Trees, chains, plain rows and prefill chunks, any sampling, ties, overflows, Jacobi rows, recorded answers."""
    num_on_host = num_requests = num_accepted = num_without = 0

    @examples(100)
    @given(st.integers(0, 2**32), st.sampled_from([8, 1024]), st.booleans())
    def check(seed: int, num_candidates: int, has_forced: bool) -> None:
        nonlocal num_on_host, num_requests, num_accepted, num_without
        rng = random.Random(seed)
        batch = random_batch(rng, vocab_size)
        logits = random_logits(rng, batch, vocab_size, dtype)
        forced = random_forced(rng, batch, vocab_size) if has_forced else Recordings()
        sampler = DeviceSampler(MAX_NUM_SEQS, num_candidates, rows_at_once=40)
        _, verified, on_host = on_device(sampler, batch, logits, forced)
        assert verified == [*verify_batch(batch, logits.float().numpy(), forced)]
        metadata = sampler.build_metadata(batch, len(logits), forced)
        of_step, without_padding = (
            sampler.sample(logits, torch.from_numpy(metadata.blob), metadata.kind, count)[:, : batch.num_logits]
            for count in (None, batch.num_logits)
        )
        assert torch.equal(of_step, without_padding)
        if num_candidates == 1024:
            num_on_host += len(on_host)
            num_requests += len(batch.requests)
        num_accepted += sum(len(one.rows) for one in verified if one is not None)
        num_without += sum(one.token_ids == [NO_TOKEN] for one in verified if one is not None)

    check()
    assert num_accepted > 50
    assert num_without > 0
    assert num_on_host <= 0.01 * num_requests


def sample_all(
    logits: torch.Tensor, sampling: Sequence[ResolvedSampling], positions: Sequence[int], num_candidates: int = 1024
) -> list[int]:
    """sample_rows with one row's parameters each."""
    seeds = np.array([s.seed for s in sampling], dtype=np.uint64).view(np.int64)
    params = RowParams(
        stream_keys(torch.from_numpy(seeds), torch.tensor(positions)),
        torch.tensor([s.temperature for s in sampling], dtype=torch.float64),
        torch.tensor([s.top_k for s in sampling]),
        torch.tensor([s.top_p for s in sampling], dtype=torch.float64),
    )
    return sample_rows(logits, params, num_candidates).tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9), (50, 0.9), (1, 1.0), (0, 1e-6)])
@pytest.mark.parametrize("temperature", [1e-5, 0.2, 0.7, 1.0, 3.0, 1e6])
def test_every_ordinary_row_is_decided_on_the_device(temperature: float, top_k: int, top_p: float) -> None:
    """Over flat, ordinary and steep distributions of a real vocabulary's size: the host's token, never NEEDS_HOST."""
    rng = np.random.default_rng(8)
    logits = (rng.standard_normal((60, 32_000)) * rng.choice([0.1, 1.5, 6.0], (60, 1))).astype(np.float32)
    if top_p == 0.9:  # flat ones leave more in than there are candidates: another test's matter
        logits[:, :400] += 16.0 * max(1.0, temperature)
    sampling = [make_sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=2**63 + i) for i in range(60)]
    expected = [sample_row(row, 100 + i, sampling[i]) for i, row in enumerate(logits)]
    assert sample_all(torch.from_numpy(logits), sampling, range(100, 160)) == expected
    if temperature == 1.0 and top_k == 0 and top_p == 1.0:
        assert sample_all(torch.from_numpy(logits), sampling, range(100, 160), num_candidates=0) == expected


def test_what_reaches_below_the_candidates_is_left_to_the_host() -> None:
    """A wide nucleus and a wide top_k; but not where everything that counts is among the candidates all the same."""
    flat = torch.randn(1, 500, generator=torch.Generator().manual_seed(2))
    steep = flat * 100
    for options in ({"top_p": 0.9}, {"top_k": 100}):
        sampling = make_sampling(temperature=1.0, seed=3, **options)
        assert sample_all(flat, [sampling], [4], num_candidates=64) == [NEEDS_HOST]
        assert sample_all(flat, [sampling], [4], num_candidates=500) == [sample_row(flat[0].numpy(), 4, sampling)]
        assert sample_all(steep, [sampling], [4], num_candidates=64) == [sample_row(steep[0].numpy(), 4, sampling)]


@pytest.mark.parametrize(("num_equal", "top_k", "top_p"), [(300, 20, 1.0), (300, 0, 0.01), (40, 20, 0.5)])
def test_equals_at_the_edge_stay_in_however_many_they_are(num_equal: int, top_k: int, top_p: float) -> None:
    """Also when there are more of them than candidates."""
    logits = np.full(1000, -3.0, dtype=np.float32)
    logits[np.random.default_rng(1).permutation(1000)[:num_equal]] = 2.0
    sampling = [make_sampling(temperature=1.0, top_k=top_k, top_p=top_p, seed=seed) for seed in range(200)]
    expected = [sample_row(logits, 9, one) for one in sampling]
    assert sample_all(torch.from_numpy(logits).expand(200, -1), sampling, [9] * 200, num_candidates=64) == expected
    assert len(set(expected)) > 0.6 * min(200, num_equal)


def test_a_nucleus_that_rounding_decides_is_left_to_the_host() -> None:
    """Whether the first four of ten tokens reach top_p: at the border that is a matter of the order of a sum."""
    logits = torch.arange(10, 0, -1, dtype=torch.float32).unsqueeze(0)
    mass = np.exp(np.arange(0.0, -10.0, -1.0))
    at_edge = float(mass[:4].sum() / mass.sum())
    for top_p, is_sure in ((at_edge, False), (at_edge - 1e-9, True), (at_edge + 1e-9, True)):
        sampling = [make_sampling(temperature=1.0, top_p=top_p, seed=seed) for seed in range(50)]
        expected = [sample_row(logits[0].numpy(), 9, one) for one in sampling]
        given = sample_all(logits.expand(50, -1), sampling, [9] * 50)
        assert given == (expected if is_sure else [NEEDS_HOST] * 50)


def test_negligible_tokens_have_no_part_in_the_nucleus() -> None:
    """Together, those below the cut weigh more than the second token: counted, they would widen the nucleus."""
    logits = torch.full((1, 50_000), -30.5)
    logits[0, :3] = torch.tensor([0.0, -20.0, -25.0])
    sampling = make_sampling(temperature=1.0, top_p=1.0 - 1e-9, seed=1)
    assert sample_all(logits, [sampling], [9], num_candidates=64) == [sample_row(logits[0].numpy(), 9, sampling)]


@pytest.mark.parametrize(
    ("gap", "is_sure"), [(0.0, False), (1e-13, False), (-1e-13, False), (1e-9, True), (-1e-9, True)]
)
def test_a_tie_within_the_rounding_of_a_logarithm_is_left_to_the_host(gap: float, is_sure: bool) -> None:
    """Perturbed logits that differ by `gap`: the coarse part is in one token's logit, the fine one in the other's."""
    noise = gumbel(stream_key(5, 9), np.array([0, 1]))
    coarse = np.float32(noise[1] - noise[0])
    fine = np.float32(float(coarse) + noise[0] - noise[1] - gap)
    logits = np.array([coarse, fine, -50.0, -50.0], dtype=np.float32)
    sampling = make_sampling(temperature=1.0, seed=5)
    expected = sample_row(logits, 9, sampling) if is_sure else NEEDS_HOST
    assert sample_all(torch.from_numpy(logits).unsqueeze(0), [sampling], [9]) == [expected]


def test_more_near_equals_than_finalists_are_left_to_the_host() -> None:
    """Float32 cannot say which three of five are the best: then nobody may guess."""
    tokens = np.arange(5)
    noise = gumbel(stream_key(5, 9), tokens)
    logits = np.full(100, -50.0, dtype=np.float32)
    logits[tokens] = 10.0 - noise
    sampling = make_sampling(temperature=1.0, seed=5)
    assert sample_all(torch.from_numpy(logits).unsqueeze(0), [sampling], [9]) == [NEEDS_HOST]
    logits[tokens[:3]] += 0.01
    decided = sample_all(torch.from_numpy(logits).unsqueeze(0), [sampling], [9])
    assert decided == [sample_row(logits, 9, sampling)]


@pytest.mark.parametrize("temperature", [5e-324, 1e-200, 1e-31, 1e31, 1e300])
def test_temperatures_beyond_float32_are_left_to_the_host(temperature: float) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    assert sample_all(logits, [make_sampling(temperature=temperature, seed=1)], [3]) == [NEEDS_HOST]


def plain_row(request_id: str, context_len: int, sampling: ResolvedSampling) -> RequestRows:
    return RequestRows(request_id, context_len, [1], [-1], 1, sampling)


def test_a_request_is_left_to_the_host_only_if_its_walk_comes_to_an_undecided_row() -> None:
    """Root -> 1 -> 2, undecided behind the 1: only a root that says 1 gets there, and no other request is concerned."""
    wide = make_sampling(temperature=1.0, top_k=30)
    sampler = DeviceSampler(max_num_seqs=2, num_candidates=8)
    batch = build_batch([RequestRows("a", 4, [9, 1, 2], [-1, 0, 1], 1, wide), plain_row("b", 6, wide)])
    for said in (1, 3):
        logits = torch.zeros(4, 50)
        logits[0, said] = logits[2, 5] = logits[3, 7] = 100.0
        _, verified, on_host = on_device(sampler, batch, logits, Recordings())
        assert verified == [*verify_batch(batch, logits.numpy(), Recordings())]
        assert on_host == ([0] if said == 1 else [])
        assert verified[1] == VerifiedTokens([7], [])


def test_metadata_that_does_not_fit_is_refused() -> None:
    sampler = DeviceSampler(max_num_seqs=2)
    batch = build_batch([plain_row(f"r{i}", 5, make_sampling()) for i in range(3)])
    with pytest.raises(ValueError, match="requests = 3: at most max_num_seqs = 2"):
        sampler.build_metadata(batch, 8, Recordings())
    with pytest.raises(ValueError, match="rows with logits = 3: at most num_rows = 2"):
        DeviceSampler(max_num_seqs=3).build_metadata(batch, 2, Recordings())


def test_metadata_is_written_where_it_is_to_be_copied_from() -> None:
    """A buffer that held another step, which had more of everything, and random bits before."""
    sampler = DeviceSampler(MAX_NUM_SEQS)
    buffer = np.random.default_rng(0).integers(-(2**62), 2**62, sampler.blob_size(NUM_ROWS))
    for seed in range(20):
        batch = random_batch(random.Random(seed), 30)
        fresh = sampler.build_metadata(batch, NUM_ROWS, Recordings())
        again = sampler.build_metadata(batch, NUM_ROWS, Recordings(), out=buffer)
        assert again.blob is buffer
        assert again.kind == fresh.kind
        np.testing.assert_array_equal(again.blob, fresh.blob)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ([{}, {"top_k": 5, "top_p": 0.5}], SamplingKind.GREEDY),
        ([{}, {"temperature": 0.5}], SamplingKind.SAMPLED),
        ([{"top_k": 5}, {"temperature": 0.5}], SamplingKind.SAMPLED),
        ([{"temperature": 0.5}, {"temperature": 0.5, "top_k": 5}], SamplingKind.TRUNCATED),
        ([{}, {"temperature": 0.5, "top_p": 0.5}], SamplingKind.TRUNCATED),
    ],
)
def test_a_step_runs_the_least_program_that_its_requests_need(
    options: list[dict[str, Any]], kind: SamplingKind
) -> None:
    """And any greater one gives the same."""
    rng = random.Random(3)
    batch = build_batch([random_rows(rng, f"r{i}", 40, make_sampling(**one)) for i, one in enumerate(options * 3)])
    logits = random_logits(rng, batch, 40, torch.float32)
    sampler = DeviceSampler(MAX_NUM_SEQS)
    metadata = sampler.build_metadata(batch, NUM_ROWS, Recordings())
    assert metadata.kind is kind
    blob = torch.from_numpy(metadata.blob)
    kinds = list(SamplingKind)
    results = [sampler.sample(logits, blob, later) for later in kinds[kinds.index(kind) :]]
    for result in results[1:]:
        assert torch.equal(result[1], results[0][1])
        count = len(batch.logit_rows)
        assert torch.equal(result[:, :count], results[0][:, :count])


class WideDoubles(TorchDispatchMode):
    """Notes the operations that make a float64 tensor with an entry for each token of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float64 and self.vocab_size in tensor.shape:
                self.operations.append(str(func))
        return made


class Waits(TorchDispatchMode):
    """Notes the operations that would wait for a GPU: those that read a value, and torch.where with a number.

    The number is copied to the device from memory that is not pinned, for which torch waits: not to be captured either.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        numbers = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 0]
        if name.startswith(("aten._local_scalar_dense", "aten.nonzero")) or (name.startswith("aten.where") and numbers):
            self.operations.append(name)
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device() -> None:
    rng = random.Random(5)
    batch = random_batch(rng, 60)
    sampler = DeviceSampler(MAX_NUM_SEQS, num_candidates=8)
    blob = torch.from_numpy(sampler.build_metadata(batch, NUM_ROWS, Recordings()).blob)
    for kind in SamplingKind:
        with Waits() as waits:
            sampler.sample(torch.randn(NUM_ROWS, 60), blob, kind)
        assert not waits.operations, kind
    with Waits() as waits:
        torch.where(torch.ones(2) > 0, torch.ones(2), -1)
    assert waits.operations


def test_float64_over_the_vocabulary_is_only_for_the_nucleus() -> None:
    rng = random.Random(5)
    batch = build_batch([random_rows(rng, "a", 777, make_sampling(temperature=0.7))])
    logits = random_logits(rng, batch, 777, torch.bfloat16)
    sampler = DeviceSampler(MAX_NUM_SEQS, num_candidates=32)
    blob = torch.from_numpy(sampler.build_metadata(batch, NUM_ROWS, Recordings()).blob)
    seen = {}
    for kind in SamplingKind:
        with WideDoubles(777) as wide:
            sampler.sample(logits, blob, kind)
        seen[kind] = wide.operations
    assert not seen[SamplingKind.GREEDY]
    assert not seen[SamplingKind.SAMPLED]
    assert seen[SamplingKind.TRUNCATED]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", SamplingKind)
def test_one_compiled_program_serves_all_steps_of_a_bucket(kind: SamplingKind, backend: str) -> None:
    """No graph break, no second compilation, and the same results as uncompiled."""
    counter = CompileCounterWithBackend(backend)
    sampler = DeviceSampler(MAX_NUM_SEQS, num_candidates=16, rows_at_once=64)
    compiled = torch.compile(sampler.sample, backend=counter, fullgraph=True)
    num_steps = 0
    for seed in range(60):
        rng = random.Random(seed)
        batch = random_batch(rng, 60)
        metadata = sampler.build_metadata(batch, NUM_ROWS, random_forced(rng, batch, 60))
        if list(SamplingKind).index(metadata.kind) > list(SamplingKind).index(kind):
            continue
        num_steps += 1
        blob = torch.from_numpy(metadata.blob)
        logits = random_logits(rng, batch, 60, torch.bfloat16)
        expected = sampler.sample(logits, blob, kind)
        result = compiled(logits, blob, kind)
        count = sum(1 + rows.num_draft_tokens for rows in batch.requests if rows.sampling)
        assert torch.equal(result[:, :count], expected[:, :count])
    assert num_steps >= 3
    assert counter.frame_count == 1
