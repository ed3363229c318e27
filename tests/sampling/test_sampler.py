"""Draws have the distribution that was asked for, and depend on nothing but logits, parameters and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchserve.request import ResolvedSampling
from batchserve.sampling import sampler
from batchserve.sampling.draw_kernel import NEGLIGIBLE_NATS
from batchserve.sampling.logits import allowed_tokens
from batchserve.sampling.noise import HIGHEST_NOISE, MASK64, gumbel, stream_key
from batchserve.sampling.sampler import NO_TOKEN, RowSampler, sample_by_definition, sample_row
from tests.factories import make_sampling
from tests.sampling.test_noise import key_for

LOGITS = np.array([2.0, 1.5, 1.0, 0.2, -0.5, -1.0, -3.0, -40.0], dtype=np.float32)
NUM_DRAWS = 6000


def target_distribution(logits: np.ndarray, sampling: ResolvedSampling) -> np.ndarray:
    """Softmax after temperature, then the k best, then the nucleus, renormalised: by hand."""
    probs = np.exp(logits.astype(np.float64) / sampling.temperature)
    order = np.argsort(-probs)
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= sampling.top_p]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (2.5, 0, 1.0), (1.0, 3, 1.0), (1.3, 0, 0.8), (1.0, 5, 0.9)],
)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_frequencies_are_the_softmax_probabilities(temperature: float, top_k: int, top_p: float, vary: str) -> None:
    """Whether one request draws at many positions, or many requests draw at one."""
    sampling = make_sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=99)
    expected = target_distribution(LOGITS, sampling)
    counts = np.zeros(len(LOGITS))
    for i in range(NUM_DRAWS):
        if vary == "position":
            token = sample_row(LOGITS, i, sampling)
        else:
            token = sample_row(LOGITS, 40, make_sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=i))
        counts[token] += 1
    assert counts[expected == 0].sum() == 0
    likely = expected * NUM_DRAWS >= 5
    chi_square = ((counts - expected * NUM_DRAWS)[likely] ** 2 / (expected[likely] * NUM_DRAWS)).sum()
    freedom = likely.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_temperature_zero_is_plain_argmax_whatever_else_is_set() -> None:
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    greedy = make_sampling(temperature=0.0, top_k=5, top_p=0.1, seed=5)
    tokens = [RowSampler(logits.numpy()).token_at(row, 7, greedy) for row in range(20)]
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-5}])
def test_the_narrowest_choices_are_greedy(options: dict[str, float]) -> None:
    rng = np.random.default_rng(3)
    for position in range(100):
        logits = rng.standard_normal(200).astype(np.float32)
        sampling = make_sampling(**{"temperature": 1.0, "seed": position, **options})
        assert sample_row(logits, position, sampling) == logits.argmax()


def test_a_row_is_sampled_the_same_in_any_batch() -> None:
    """Alone, among others, in another row, and whichever rows were sampled before."""
    logits = np.random.default_rng(1).standard_normal((12, 300)).astype(np.float32)
    rng = np.random.default_rng(4)
    params = [
        make_sampling(temperature=rng.choice([0.0, 0.7, 1.3]), top_k=int(rng.choice([0, 20])), seed=int(seed))
        for seed in rng.integers(0, 2**63, 12)
    ]
    together = RowSampler(logits)
    expected = [together.token_at(row, 50 + row, params[row]) for row in range(12)]
    order = rng.permutation(12)
    shuffled = RowSampler(logits[order])
    for place in reversed(range(12)):
        row = int(order[place])
        assert shuffled.token_at(place, 50 + row, params[row]) == expected[row]
        assert RowSampler(logits[row : row + 1]).token_at(0, 50 + row, params[row]) == expected[row]


def test_leaving_out_what_cannot_win_never_changes_the_winner() -> None:
    """Over steep and flat distributions, against noise on the whole vocabulary."""
    rng = np.random.default_rng(5)
    everyone = np.arange(500)
    for position in range(600):
        logits = (rng.standard_normal(500) * rng.choice([0.1, 1, 5, 20])).astype(np.float32)
        sampling = make_sampling(temperature=float(rng.choice([0.2, 1.0, 3.0])), seed=position)
        scores = logits.astype(np.float64) / sampling.temperature + gumbel(stream_key(position, position), everyone)
        assert sample_row(logits, position, sampling) == scores.argmax()


@pytest.mark.parametrize(
    ("vocab_size", "count"), [(1, 60), (63, 60), (64, 60), (65, 60), (3000, 60), (20_000, 60), (70_000, 12)]
)
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.5, 30.0])
def test_a_draw_is_that_of_noise_for_every_allowed_token(vocab_size: int, count: int, temperature: float) -> None:
    """By the literal definition, in float64; peaked and flat, masked, tied, with all of top_k and top_p."""
    rng = np.random.default_rng(vocab_size)
    for position in range(count):
        logits = rng.standard_normal(vocab_size) * rng.choice([0.0, 0.3, 3.0])
        logits[rng.integers(vocab_size, size=5)] += rng.choice([0.0, 4.0, 15.0])
        logits[rng.random(vocab_size) < rng.choice([0.0, 0.3])] = -np.inf
        logits[rng.integers(vocab_size)] = 1.0
        row = torch.from_numpy(logits).to(torch.bfloat16).float().numpy()
        top_k, top_p = int(rng.choice([0, 0, 1, 5, 40, 1000])), float(rng.choice([1.0, 1.0, 0.2, 0.9, 0.999]))
        scaled = row.astype(np.float64) / temperature
        kept = scaled >= scaled.max() - NEGLIGIBLE_NATS
        if 0 < top_k < kept.sum():
            kept &= scaled >= np.sort(scaled[kept])[-top_k]
        if top_p < 1.0:
            ordered = np.sort(scaled[kept])[::-1]
            cumulative = np.cumsum(np.exp(ordered - ordered[0]))
            kept &= scaled >= ordered[np.searchsorted(cumulative, top_p * cumulative[-1])]
        scores = np.where(kept, scaled + gumbel(stream_key(9, position), np.arange(vocab_size)), -np.inf)
        sampling = make_sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=9)
        assert sample_row(row, position, sampling) == scores.argmax(), (position, top_k, top_p)


@pytest.mark.parametrize("lucky", [1, 200])
@pytest.mark.parametrize(("margin", "is_enough"), [(1e-3, True), (-1e-3, False)])
def test_the_highest_noise_lifts_a_token_from_as_far_down_as_it_can(
    monkeypatch: pytest.MonkeyPatch, lucky: int, margin: float, is_enough: bool
) -> None:
    """One token draws the highest noise that there is; it wins if and only if that is enough.

    Beside the likeliest one, and as the only one far from it, whose draw need not be looked at if it is not.
    """
    key = key_for(MASK64, lucky)
    monkeypatch.setattr(sampler, "stream_key", lambda seed, position: key)
    top_noise, lucky_noise = gumbel(key, np.array([0, lucky]))
    assert lucky_noise == pytest.approx(HIGHEST_NOISE, abs=1e-4)
    logits = np.full(lucky + 1, -1e4, np.float32)
    logits[0], logits[lucky] = 0.0, top_noise - lucky_noise + margin
    assert sample_row(logits, 0, make_sampling(temperature=1.0)) == (lucky if is_enough else 0)


def test_positions_and_seeds_give_fresh_draws() -> None:
    flat = np.zeros(1000, dtype=np.float32)
    sampling = make_sampling(temperature=1.0, seed=1)
    by_position = [sample_row(flat, position, sampling) for position in range(300)]
    by_seed = [sample_row(flat, 0, make_sampling(temperature=1.0, seed=seed)) for seed in range(300)]
    for tokens in (by_position, by_seed):
        assert len(set(tokens)) > 220  # 259 expected of 300 draws from 1000
    assert by_position == [sample_row(flat, position, sampling) for position in range(300)]


def test_allowed_tokens_are_what_sampling_draws_from() -> None:
    logits = np.random.default_rng(6).standard_normal(50).astype(np.float32)
    sampling = make_sampling(temperature=1.0, top_k=6, top_p=0.8)
    allowed = set(allowed_tokens(logits, 1.0, 6, 0.8)[0].tolist())
    drawn = {sample_row(logits, position, sampling) for position in range(500)}
    assert drawn == allowed


@pytest.mark.parametrize("highest", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.5)])
def test_logits_that_overflowed_give_no_token(highest: float, top_k: int, top_p: float) -> None:
    """And those of other rows are no worse for it; what is only drafted from has a likeliest token all the same."""
    logits = np.full((2, 20), -np.inf, dtype=np.float32)
    logits[0, 7], logits[1, 5] = highest, 1.0
    rows = RowSampler(logits)
    for sampling in (make_sampling(), make_sampling(temperature=0.7, top_k=top_k, top_p=top_p)):
        assert [rows.token_at(row, 3, sampling) for row in (0, 1)] == [NO_TOKEN, 5]
    assert 0 <= rows.argmax()[0] < 20


def test_one_nan_anywhere_in_a_row_is_noticed() -> None:
    logits = np.random.default_rng(0).standard_normal((40, 300)).astype(np.float32)
    for row in range(0, 40, 2):
        logits[row, 7 * row] = float("nan")
    rows = RowSampler(logits)
    for sampling in (make_sampling(), make_sampling(temperature=0.7, top_k=5, top_p=0.9)):
        found = [rows.token_at(row, 3, sampling) for row in range(40)]
        assert [token == NO_TOKEN for token in found] == [row % 2 == 0 for row in range(40)]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1.0, 1e300])
def test_masked_and_extreme_logits_are_sampled(temperature: float) -> None:
    """As models with a masked vocabulary, or with values at the end of float32, give them."""
    logits = np.full(20, -np.inf, dtype=np.float32)
    logits[[4, 9]] = np.finfo(np.float32).max
    logits[11] = np.finfo(np.float32).min
    sampling = make_sampling(temperature=temperature, top_k=5, top_p=0.9)
    drawn = {sample_row(logits, position, sampling) for position in range(60)}
    # At temperatures above all logits, those that are not masked are alike.
    assert drawn == {4, 9, 11} if temperature == 1e300 else drawn <= {4, 9}


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 1.0), (20, 1.0), (0, 0.9), (5, 0.5), (400, 0.999)])
@pytest.mark.parametrize("temperature", [1e-300, 0.2, 1.0, 3.0])
def test_while_nothing_is_compiled_the_tokens_are_the_same(temperature: float, top_k: int, top_p: float) -> None:
    rng = np.random.default_rng(6)
    for position in range(150):
        logits = (rng.standard_normal(400) * rng.choice([0.1, 3.0, 20.0])).astype(np.float32)
        if position % 5 == 0:
            logits[rng.integers(400, size=90)] = rng.choice([-np.inf, 1.0])  # masked tokens, ties
        if position % 40 == 0:
            logits[3] = rng.choice([np.nan, np.inf])
        sampling = make_sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=position)
        assert sample_by_definition(logits, position, sampling) == sample_row(logits, position, sampling)
