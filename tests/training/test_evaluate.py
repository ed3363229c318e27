"""The measures behind the bundled model's gates, on outputs whose values are known."""

from __future__ import annotations

import random

import pytest

from training.evaluate import (
    LOOKUP_COPY,
    Answer,
    Gate,
    acceptance_length,
    has_own_loop,
    lookup_draft,
    lookup_steps,
    loops_of,
)
from training.tasks import Example


def make_answer(token_ids, reference_ids=(), prompt_ids=(9,), has_eos=True):
    example = Example("complete", "prompt", "answer")
    return Answer(example, list(prompt_ids), list(reference_ids), list(token_ids), "text", has_eos)


@pytest.mark.parametrize("n", range(1, 9))
def test_five_repeats_of_a_short_ngram_are_a_loop_and_four_are_not(n):
    gram = list(range(10, 10 + n))
    assert loops_of([1, 2, *gram * 5, 3])
    assert not loops_of([1, 2, *gram * 4, 3])


def test_an_ngram_of_nine_tokens_is_too_long_to_be_a_loop():
    assert not loops_of(list(range(9)) * 6)


def test_a_loop_that_the_reference_has_too_is_not_the_models_own():
    looping = [1, *[4, 5] * 6]
    assert has_own_loop(make_answer(looping))
    assert not has_own_loop(make_answer(looping, reference_ids=[7, *[4, 5] * 9]))
    assert has_own_loop(make_answer(looping, reference_ids=[4] * 9))


def test_lookup_copies_what_followed_the_longest_suffix():
    assert lookup_draft([1, 2, 3, 7, 2, 3, 8, 1, 2, 3]) == [7, 2, 3, 8, 1, 2, 3]
    assert lookup_draft([5, 6, 7]) == []


def test_lookup_steps_of_a_whole_copy_and_of_a_text_without_any():
    prompt = list(range(100, 140))
    # The first token finds no draft before it is there; then every step emits the copy and the bonus token.
    assert lookup_steps(prompt, prompt[:1]) == 1
    assert lookup_steps(prompt, prompt[: 1 + LOOKUP_COPY + 1]) == 2
    assert lookup_steps([1], [2, 3, 4, 5]) == 4


def test_lookup_never_needs_more_steps_than_tokens():
    rng = random.Random(0)
    for _ in range(50):
        prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 30))]
        output = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        assert 1 <= lookup_steps(prompt, output) <= len(output)


def test_acceptance_length_counts_the_eos_as_a_token():
    assert acceptance_length([make_answer([2, 3, 4], prompt_ids=[1])], eos=0) == 1.0
    assert acceptance_length([make_answer([], prompt_ids=[1])], eos=0) == 1.0


@pytest.mark.parametrize(("value", "is_passed"), [(0.94, False), (0.95, True), (1.0, True), (float("nan"), False)])
def test_a_gate_passes_within_its_closed_interval(value, is_passed):
    assert Gate(value, 0.95, 1.0, "").is_passed is is_passed
