"""Adjustments of logits: the definition against transformers and by hand, the compiled version against the definition,
and walks down draft trees against decoding step by step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from batchserve.request import ResolvedSampling
from batchserve.row_adjustments import RowAdjustments, adjust_by_definition, mask_of
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.runner.step_handle import verify_batch, verify_request
from batchserve.sampling.adjust_kernel import adjust, make_room
from batchserve.sampling.logits import allowed_tokens
from batchserve.sampling.recordings import Recordings
from batchserve.sampling.sampler import RowSampler

VOCAB = 100
NUM_PROMPT = 12


def sampling(**options: Any) -> ResolvedSampling:
    ends = options.pop("end_token_ids", frozenset({2, 5}))
    return ResolvedSampling(options.pop("temperature", 0.0), 0, 1.0, 7, 64, ends, **options)


def random_row(rng: random.Random) -> np.ndarray:
    row = np.random.default_rng(rng.getrandbits(32)).normal(0, 3, VOCAB).astype(np.float32)
    row[rng.randrange(VOCAB)] = 0.0
    return row


def random_history(rng: random.Random, size: int = 40) -> np.ndarray:
    few = [rng.randrange(VOCAB) for _ in range(10)]  # so that they repeat themselves
    return np.array([rng.choice(few) for _ in range(size)], np.int64)


def random_options(rng: random.Random) -> dict[str, Any]:
    """Any combination of the parameters that change logits."""
    tokens = [*range(VOCAB)]
    choices: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: rng.choice([0.5, 1.1, 2.0]),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "no_repeat_ngram_size": lambda: rng.randint(1, 4),
        "min_tokens": lambda: rng.randint(1, 40),
        "logit_bias": lambda: tuple((token, rng.uniform(-9, 9)) for token in rng.sample(tokens, 5)),
        "bad_words": lambda: tuple(tuple(rng.choices(tokens[:10], k=rng.randint(1, 3))) for _ in range(4)),
        "allowed": lambda: mask_of(rng.sample(tokens, 60), VOCAB),
    }
    return {name: choices[name]() for name in rng.sample([*choices], rng.randint(1, len(choices)))}


def by_definition(row: np.ndarray, history: np.ndarray, **options: Any) -> np.ndarray:
    return adjust_by_definition(row, sampling(**options), history, NUM_PROMPT)


CASES: list[tuple[dict[str, Any], Callable[[], LogitsProcessor]]] = [
    ({"repetition_penalty": 1.3}, lambda: RepetitionPenaltyLogitsProcessor(1.3)),
    ({"repetition_penalty": 0.7}, lambda: RepetitionPenaltyLogitsProcessor(0.7)),
    *(
        ({"no_repeat_ngram_size": size}, lambda size=size: NoRepeatNGramLogitsProcessor(size))  # type: ignore[misc]
        for size in (1, 2, 3)
    ),
    ({"min_tokens": 29}, lambda: MinNewTokensLengthLogitsProcessor(NUM_PROMPT, 29, [2, 5])),
    ({"min_tokens": 28}, lambda: MinNewTokensLengthLogitsProcessor(NUM_PROMPT, 28, [2, 5])),
    (
        {"logit_bias": ((3, 4.5), (98, -7.0))},
        lambda: SequenceBiasLogitsProcessor([[[3], 4.5], [[98], -7.0]]),  # type: ignore[arg-type]
    ),
]


@pytest.mark.parametrize(("options", "theirs"), CASES)
def test_a_row_is_as_transformers_has_it(options: dict[str, Any], theirs: Callable[[], LogitsProcessor]) -> None:
    rng = random.Random(0)
    for _ in range(50):
        row, history = random_row(rng), random_history(rng)
        expected = theirs()(torch.from_numpy(history)[None], torch.from_numpy(row.copy())[None])[0].numpy()  # type: ignore[arg-type]
        assert np.array_equal(by_definition(row, history, **options), expected)


def test_bad_words_are_as_transformers_has_them() -> None:
    rng = random.Random(1)
    for _ in range(200):
        row, history = random_row(rng), random_history(rng)
        few = history.tolist()
        words = [tuple(rng.choices(few, k=rng.randint(1, 3))) for _ in range(6)]
        theirs = NoBadWordsLogitsProcessor([list(word) for word in dict.fromkeys(words)])
        expected = theirs(torch.from_numpy(history)[None], torch.from_numpy(row.copy())[None])[0].numpy()  # type: ignore[arg-type]
        assert np.array_equal(by_definition(row, history, bad_words=tuple(words)), expected)


@pytest.mark.parametrize("min_p", [0.001, 0.1, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float) -> None:
    rng = random.Random(2)
    for _ in range(50):
        row = random_row(rng)
        expected = MinPLogitsWarper(min_p)(torch.zeros(1, 1), torch.from_numpy(row / np.float32(0.7))[None])[0]  # type: ignore[arg-type]
        assert allowed_tokens(row, 0.7, 0, 1.0, min_p)[0].tolist() == expected.isfinite().nonzero().flatten().tolist()


def test_penalties_count_tokens_of_the_answer_only() -> None:
    rng = random.Random(3)
    for _ in range(50):
        row, history = random_row(rng), random_history(rng)
        found = by_definition(row, history, presence_penalty=0.5, frequency_penalty=-0.25)
        answer = history[NUM_PROMPT:].tolist()
        for token in range(VOCAB):
            count = answer.count(token)
            assert found[token] == pytest.approx(row[token] + 0.25 * count - 0.5 * (count > 0), abs=1e-6)


def test_only_allowed_tokens_stay() -> None:
    row = random_row(random.Random(4))
    found = by_definition(row, np.arange(20), allowed=mask_of([0, 31, 32, 99], VOCAB))
    assert np.flatnonzero(np.isfinite(found)).tolist() == [0, 31, 32, 99]
    assert found[99] == row[99]


@pytest.mark.parametrize("seed", range(200))
def test_compiled_adjustments_are_those_of_the_definition(seed: int) -> None:
    """Along a path, as a walk asks for them."""
    rng = random.Random(seed)
    chosen, history = sampling(**random_options(rng)), random_history(rng)
    adjustments = RowAdjustments(chosen, history[:NUM_PROMPT].tolist(), len(history))
    first = rng.randint(NUM_PROMPT, 30)
    adjustments.append(history[NUM_PROMPT:first].tolist())
    room = make_room(adjustments.address, VOCAB, len(history))
    for size in range(first, len(history)):
        row = random_row(rng)
        expected = adjust_by_definition(row, chosen, history[:size], NUM_PROMPT)
        assert np.array_equal(adjustments.adjusted(row, history[first:size].tolist()), expected)
        adjustments.history[size - 1] = history[size - 1]
        assert np.array_equal(adjust(row, adjustments.address, size, 0, room), expected)


def step_by_step(table: np.ndarray, chosen: ResolvedSampling, tokens: Sequence[int], count: int) -> list[int]:
    """The next tokens of a made-up model whose logits depend on the last token, by the definition."""
    found = [*tokens]
    for _ in range(count):
        adjustments = RowAdjustments(chosen, tokens[:NUM_PROMPT], 200)
        adjustments.append(found[NUM_PROMPT:])
        found.append(RowSampler(table).adjusted_token_at(found[-1], len(found), chosen, adjustments, (), []))
    return found[len(tokens) :]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(100))
def test_walks_give_the_tokens_of_decoding_step_by_step(seed: int, temperature: float) -> None:
    """Two requests are walked at once, whose trees hold the right path beside wrong ones."""
    rng = random.Random(seed)
    table = np.stack([random_row(rng) for _ in range(VOCAB)])
    each, rows, expected = {}, [], []
    for place in range(2):
        chosen = sampling(**random_options(rng), temperature=temperature, min_p=rng.choice([0.0, 0.05]))
        tokens = random_history(rng, rng.randint(NUM_PROMPT, 30)).tolist()
        right, depth = step_by_step(table, chosen, tokens, 6), rng.randint(0, 5)
        ids, parents, verified = [tokens[-1]], [-1], []
        at = 0
        for token in right[:depth]:
            siblings = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 2))]
            for each_token in [*(s for s in siblings if s != token), token]:
                ids.append(each_token)
                parents.append(at)
                verified.append(True)
            at = len(ids) - 1
        adjustments = RowAdjustments(chosen, tokens[:NUM_PROMPT], 200)
        adjustments.append(tokens[NUM_PROMPT:])
        each[place] = adjustments
        rows.append(RequestRows(str(place), len(tokens) - 1, ids, parents, 1, chosen, verified))
        expected.append(right[: depth + 1])
    batch = build_batch(rows)
    batch.adjustments = each
    logits = table[batch.input_ids[batch.logit_rows[: batch.num_logits]]]
    for compiled in (True, False):
        found = verify_batch(batch, logits, Recordings(), num_threads=2, can_walk_sampled=lambda: compiled)  # noqa: B023
        assert [one.token_ids for one in found.each() if one is not None] == expected
    for place, (own, first) in enumerate(zip(rows, batch.first_logit.tolist(), strict=True)):
        sampler = RowSampler(logits[first : first + len(own.token_ids)])
        assert verify_request(own, sampler, (), each[place]).token_ids == expected[place]
