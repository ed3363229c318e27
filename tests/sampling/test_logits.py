"""Which tokens may be sampled: the literal definition of temperature, top_k and top_p, and transformers' own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from batchserve.sampling.draw_kernel import NEGLIGIBLE_NATS
from batchserve.sampling.logits import allowed_tokens
from tests.factories import examples

# A coarse grid: ties are the rule.
tied_logits = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=24)
temperatures = st.sampled_from([0.25, 0.5, 1.0, 2.0])


def literal(logits: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    """By sorting everything: the k best and all that tie with the last of them, then the same for the nucleus."""
    scores = [logit / temperature for logit in logits]
    best = max(scores)
    allowed = {token for token, score in enumerate(scores) if score >= best - NEGLIGIBLE_NATS}
    if top_k:
        edge = sorted((scores[token] for token in allowed), reverse=True)[:top_k][-1]
        allowed = {token for token in allowed if scores[token] >= edge}
    if top_p < 1:
        ranked = sorted((scores[token] for token in allowed), reverse=True)
        total = math.fsum(math.exp(score - best) for score in ranked)
        size = next(
            n
            for n in range(1, len(ranked) + 1)
            if math.fsum(math.exp(s - best) for s in ranked[:n]) >= top_p * total or n == len(ranked)
        )
        allowed = {token for token in allowed if scores[token] >= ranked[size - 1]}
    return allowed


def allowed_set(logits: np.ndarray | list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    token_ids, _ = allowed_tokens(np.asarray(logits, dtype=np.float32), temperature, top_k, top_p)
    assert len(set(token_ids.tolist())) == len(token_ids)
    return set(token_ids.tolist())


@examples(300)
@given(tied_logits, temperatures, st.integers(0, 26), st.sampled_from([0.05, 0.3, 0.51, 0.77, 0.95, 1.0]))
def test_equals_the_literal_definition_with_ties(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    assert allowed_set(logits, temperature, top_k, top_p) == literal(logits, temperature, top_k, top_p)


@examples(100)
@given(tied_logits, temperatures, st.integers(0, 26), st.sampled_from([0.05, 0.5, 0.9, 1.0]), st.randoms())
def test_is_a_function_of_the_values_alone(
    logits: list[float], temperature: float, top_k: int, top_p: float, rng: np.random.Generator
) -> None:
    """Equal logits are in or out together, and no order of the vocabulary shows through."""
    order = list(range(len(logits)))
    rng.shuffle(order)  # type: ignore[arg-type]
    straight = allowed_set(logits, temperature, top_k, top_p)
    shuffled = allowed_set([logits[i] for i in order], temperature, top_k, top_p)
    assert {order[i] for i in shuffled} == straight
    values_in = {logits[i] for i in straight}
    assert straight == {i for i, logit in enumerate(logits) if logit in values_in}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50, 1000])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999, 1.0])
def test_equals_transformers_warpers_without_ties(temperature: float, top_k: int, top_p: float) -> None:
    rng = np.random.default_rng(11)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    for _ in range(5):
        logits = (rng.standard_normal(1000) * 3).astype(np.float32)
        warped = warpers(None, torch.from_numpy(logits).double()[None])[0].numpy()
        theirs = set(np.flatnonzero(warped >= warped.max() - NEGLIGIBLE_NATS).tolist())
        token_ids, processed = allowed_tokens(logits, temperature, top_k, top_p)
        assert set(token_ids.tolist()) == theirs
        np.testing.assert_allclose(processed, warped[token_ids], rtol=1e-12)


@pytest.mark.parametrize("vocab_size", [129, 3000, 20_000])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.01, 1.0])
def test_a_nucleus_of_much_of_the_vocabulary_ends_where_the_definition_says(vocab_size: int, spread: float) -> None:
    """It is found without sorting the vocabulary: with ties, with masked tokens, and where all are nearly equal."""
    rng = np.random.default_rng(vocab_size)
    for top_p in (0.3, 0.9, 0.999):
        logits = (spread * rng.standard_normal(vocab_size)).astype(np.float32)
        logits[rng.random(vocab_size) < 0.3] = -np.inf
        logits[1::7] = logits[0] = 0.0
        processed = logits.astype(np.float64) / 0.7
        ordered = np.sort(processed[processed >= processed.max() - NEGLIGIBLE_NATS])[::-1]
        cumulative = np.cumsum(np.exp(ordered - ordered[0]))
        edge = ordered[np.searchsorted(cumulative, top_p * cumulative[-1])]
        assert allowed_tokens(logits, 0.7, 0, top_p)[0].tolist() == np.flatnonzero(processed >= edge).tolist()


def test_what_is_cut_off_as_negligible_weighs_nothing() -> None:
    """Even a vocabulary of a quarter million tokens just below the cut has less mass than fp32 resolves."""
    assert 262_144 * math.exp(-NEGLIGIBLE_NATS) < np.finfo(np.float32).eps


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-310])
def test_temperatures_near_zero_leave_the_best_token_only(temperature: float) -> None:
    """Any T > 0 is accepted at the door, so dividing by it may not overflow."""
    for logits in ([1.0, 9.0, 8.5], [-9.0, -1.0, -1.5]):
        assert allowed_set(logits, temperature, 0, 1.0) == {1}
        assert allowed_set(logits, temperature, 2, 0.9) == {1}
