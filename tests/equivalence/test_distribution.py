"""Three tokens drawn along draft trees have exactly the distribution that was asked for (chi-square)."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from batchserve.request import ResolvedSampling
from batchserve.row_adjustments import RowAdjustments, adjust_by_definition, mask_of
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.runner.step_handle import verify_batch
from batchserve.sampling.logits import allowed_tokens
from batchserve.sampling.recordings import Recordings

VOCAB, NUM_TOKENS, AT_ONCE = 6, 3, 500
PROMPT = [1, 4, 2]
TABLE = np.random.default_rng(3).normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)  # logits after each token
SETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cuts": {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    "min_p": {"temperature": 1.3, "min_p": 0.15},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": -0.5},
    "bans": {"no_repeat_ngram_size": 2, "bad_words": ((1, 0), (3,)), "allowed": mask_of([0, 1, 2, 3, 5], VOCAB)},
    "all": {
        "temperature": 0.9,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.7,
        "logit_bias": ((0, 1.0), (5, -1.5)),
        "no_repeat_ngram_size": 3,
    },
}


def sampling(seed: int, **options: Any) -> ResolvedSampling:
    chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
    return ResolvedSampling(**chosen, seed=seed, max_tokens=NUM_TOKENS, end_token_ids=frozenset())


def exact(options: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The probability of each sequence, step by step."""
    chosen, found = sampling(0, **options), {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in found.items():
            history = np.array([*PROMPT, *tokens], np.int64)
            row = adjust_by_definition(TABLE[history[-1]], chosen, history, len(PROMPT))
            kept, values = allowed_tokens(row, chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p)
            shares = np.exp(values - values.max())
            for token, share in zip(kept.tolist(), (shares / shares.sum()).tolist(), strict=True):
                longer[*tokens, token] = probability * share
        found = longer
    return found


def draws(first_seed: int, count: int, options: dict[str, Any]) -> tuple[list[tuple[int, ...]], float]:
    """The sequences of so many requests, each with random trees; and how many drafts a step accepted on average."""
    rng, found = random.Random(first_seed), []
    num_steps = num_accepted = 0
    for start in range(first_seed, first_seed + count, AT_ONCE):
        each = [sampling(seed, **options) for seed in range(start, start + AT_ONCE)]
        tokens = [[*PROMPT] for _ in each]
        adjustments = [RowAdjustments(one, PROMPT, 64) if one.changes_logits else None for one in each]
        while open_ := [i for i in range(AT_ONCE) if len(tokens[i]) < len(PROMPT) + NUM_TOKENS]:
            rows = []
            for i in open_:
                parents = [-1, *([0] * rng.randint(0, 3))]
                parents += (
                    [rng.randrange(1, len(parents)) for _ in range(rng.randint(0, 3))] if len(parents) > 1 else []
                )
                drafts = [rng.randrange(VOCAB) for _ in parents[1:]]
                rows.append(RequestRows(str(i), len(tokens[i]) - 1, [tokens[i][-1], *drafts], parents, 1, each[i]))
                num_steps += 1
            batch = build_batch(rows)
            owners = enumerate(adjustments[i] for i in open_)
            batch.adjustments = {place: one for place, one in owners if one is not None}
            logits = TABLE[batch.input_ids[batch.logit_rows[: batch.num_logits]]]
            for i, verified in zip(open_, verify_batch(batch, logits, Recordings(), num_threads=2).each(), strict=True):
                assert verified is not None
                tokens[i] += verified.token_ids
                num_accepted += len(verified.rows)
                if (own := adjustments[i]) is not None:
                    own.append(verified.token_ids)
        found += [tuple(one[len(PROMPT) :][:NUM_TOKENS]) for one in tokens]
    return found, num_accepted / num_steps


def chi_square(name: str, first_seed: int, count: int) -> tuple[float, int]:
    """Returns the statistic over all likely sequences, and its degrees of freedom."""
    expected, (found, accepted) = exact(SETS[name]), draws(first_seed, count, SETS[name])
    assert 0.2 < accepted < 0.8, "a drafter that is often right and often wrong"
    assert sum(expected.values()) == pytest.approx(1.0)
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=NUM_TOKENS), 0)
    for tokens in found:
        counts[tokens] += 1
    assert all(tokens in expected for tokens, number in counts.items() if number), "what is banned never comes"
    likely = [tokens for tokens, probability in expected.items() if probability * count >= 5]
    statistic = sum((counts[t] - expected[t] * count) ** 2 / (expected[t] * count) for t in likely)
    return statistic, len(likely) - 1


@pytest.mark.parametrize("name", SETS)
def test_a_few_thousand_draws(name: str) -> None:
    statistic, freedom = chi_square(name, 1_000_000, 4000)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", SETS)
def test_fifty_thousand_draws(name: str, seed: int) -> None:
    statistic, freedom = chi_square(name, 10_000_000 + 100_000 * seed, 50_000)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)
