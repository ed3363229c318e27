"""Forced answers: what is recorded comes out, whatever the model, the drafts, the batch and the chunks are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from batchserve.bench.replay import ReplayRecord, simulate
from batchserve.draft.base import Drafter
from batchserve.draft.trie import TrieDrafter, compile_kernels
from batchserve.types import FinishReason, SamplingParams
from tests.drafters import HostileDrafter, OracleDrafter, RandomTreeDrafter
from tests.equivalence.harness import Coverage, Job, build, run
from tests.tiny_models import VOCAB_SIZE

NODES = 6


class UnsharedTrie(TrieDrafter):
    """An engine publishes a step later than a replay does, so they are only alike where nothing is shared."""

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Others get nothing."""


def make_records(count: int) -> list[ReplayRecord]:
    """Answers that no model gives: phrases in random order, the prompt's among them."""
    rng = random.Random(3)
    phrases = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 6))] for _ in range(6)]

    def text(length: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += rng.choice(phrases)
        return tokens[:length]

    return [ReplayRecord([3 + i, *text(rng.randint(1, 40))], text(rng.randint(2, 50)), []) for i in range(count)]


def jobs_of(records: Sequence[ReplayRecord], **sampling: float) -> list[Job]:
    return [
        Job(r.prompt_token_ids, SamplingParams(**sampling, max_tokens=len(r.response_token_ids), ignore_eos=True))
        for r in records
    ]


def forced_of(records: Sequence[ReplayRecord]) -> dict[str, list[int]]:
    return {str(i): r.prompt_token_ids + r.response_token_ids for i, r in enumerate(records)}


SCRIPTED = {"random": RandomTreeDrafter, "wrong": HostileDrafter, "right": OracleDrafter}


@pytest.mark.parametrize("name", ["none", "trie", *SCRIPTED])
@pytest.mark.parametrize(("seqs", "chunk", "temperature"), [(1, None, 0.0), (5, 7, 0.0), (5, 16, 1.0)])
def test_the_recorded_answer_comes_out(
    tiny_model: dict[str, Path], name: str, seqs: int, chunk: int | None, temperature: float
) -> None:
    records = make_records(8)
    drafter: Drafter | None = None
    if name == "trie":
        compile_kernels()
        drafter = UnsharedTrie(decoding_length=NODES)
    elif name != "none":
        truth = {tuple(r.prompt_token_ids): r.response_token_ids for r in records}
        drafter = SCRIPTED[name](VOCAB_SIZE, 5, truth)
    length = 0 if name == "none" else NODES
    engine = build(tiny_model["llama"], drafter, decoding_length=length, max_num_seqs=seqs, prefill_chunk_size=chunk)
    assert engine.core.executor.forced == {}
    engine.core.executor.forced.update(forced_of(records))
    coverage = Coverage()
    answers = run(engine, jobs_of(records, temperature=temperature, seed=1), coverage)
    assert [answers[i].token_ids for i in range(len(records))] == [r.response_token_ids for r in records]
    assert {answer.reason for answer in answers.values()} == {FinishReason.LENGTH}
    if name in ("trie", "right"):
        assert coverage.accepted > 20
    if name in ("none", "wrong"):
        assert coverage.accepted == 0


@pytest.mark.parametrize("streams", [1, 3])
def test_as_many_drafts_are_accepted_as_in_a_replay(tiny_model: dict[str, Path], streams: int) -> None:
    compile_kernels()
    records = make_records(10)
    replayed = simulate(records, UnsharedTrie(decoding_length=NODES), NODES, streams)
    # Whole prompts: where the last chunk is one token, its step has drafts, too, which a replay does not count.
    whole: dict[str, object] = {"decoding_length": NODES, "max_num_seqs": streams, "max_itl_inflation": 1e9}
    engine = build(tiny_model["llama"], UnsharedTrie(decoding_length=NODES), **whole)
    engine.core.executor.forced.update(forced_of(records))
    coverage = Coverage()
    run(engine, jobs_of(records, temperature=0.0), coverage)
    # A response's first token comes from its prefill: a replay does not count it.
    assert coverage.tokens - len(records) == replayed.num_tokens
    assert coverage.accepted == replayed.num_tokens - replayed.num_steps > 50
    assert coverage.drafted == replayed.num_draft_tokens


def test_behind_the_recording_the_model_goes_on(tiny_model: dict[str, Path]) -> None:
    engine = build(tiny_model["llama"])
    prompt, recorded = [5, 6, 7], [40, 41, 42]
    engine.core.executor.forced["0"] = prompt + recorded
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    forced = run(engine, [Job(prompt, params)], Coverage())[0].token_ids
    engine.core.executor.forced.clear()
    free = run(
        engine, [Job(prompt + recorded, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))], Coverage()
    )
    assert forced == recorded + free[0].token_ids
    assert forced != run(engine, [Job(prompt, params)], Coverage())[0].token_ids
