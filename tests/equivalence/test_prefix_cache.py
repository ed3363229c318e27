"""K/V that ended requests leave behind: whoever begins with it gets the answer that he would have got without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchserve.engine.engine_core import Event
from batchserve.errors import BatchserveError
from batchserve.kv.prefix_index import MIN_TOKENS
from batchserve.request import TENANT, DraftScope, Request
from batchserve.runner import step_handle
from batchserve.startup.build import BuiltEngine
from batchserve.types import FinishReason, SamplingParams, SpeculationParams
from tests.drafters import OracleDrafter
from tests.equivalence.harness import Answer, Coverage, Job, PlainPath, assert_equal_but_near_ties, build, run
from tests.equivalence.test_greedy import expected_answers, random_speculation
from tests.factories import common_length
from tests.tiny_models import VOCAB_SIZE

FAMILIES = ("llama", "mistral", "gemma2", "gpt2", "deepseek_v3")
SHARED = (1, 15, 16, 17, 40, 64, 130, 200)  # around the fewest tokens that are looked for, and around extents
ROOM = 8192  # tokens of K/V: nothing has to go


def texts(seed: int, *sizes: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(size)] for size in sizes]


def greedy(prompt: list[int], max_tokens: int = 12, scope: str = "team", **options: Any) -> Job:
    return Job(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), speculation=of(scope), **options)


def of(scope: str, **options: Any) -> SpeculationParams:
    return SpeculationParams(draft_scope=scope, **options)


def sharing_jobs(seed: int) -> list[Job]:
    """Prompts that have beginnings of all lengths in common, and some that are the same."""
    base, *tails = texts(seed, 200, *[7 + 3 * i for i in range(len(SHARED))])
    prompts = [base[:shared] + tail for shared, tail in zip(SHARED, tails, strict=True)]
    return [greedy(prompt) for prompt in [base, *prompts, base, prompts[4], base[:100]]]


def make_engine(model: Path, *, room: int = ROOM, **options: Any) -> BuiltEngine:
    per_token = build(model).core.executor.allocator.bytes_per_token
    # However slow the machine is, nobody has waited so long that he comes before others.
    fixed = {"max_model_len": 400, "kv_cache_memory": room * per_token, "max_priority_wait_s": 3600.0}
    return build(model, **{**fixed, **options})


def cached(answer: Answer) -> int:
    assert answer.usage is not None
    return answer.usage.cached_tokens


def ask(engine: BuiltEngine, prompt: list[int], scope: str = "team", **options: Any) -> Answer:
    """One request, alone."""
    return run(engine, [greedy(prompt, scope=scope, **options)], Coverage())[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [None, 7])
def test_one_after_the_other_each_hits_the_longest_beginning_there_is(
    family: str, chunk: int | None, tiny_model: dict[str, Path]
) -> None:
    plain, coverage = PlainPath(tiny_model[family]), Coverage()
    engine = make_engine(tiny_model[family], prefill_chunk_size=chunk, decoding_length=4)
    jobs = sharing_jobs(3)
    expected = expected_answers(plain, jobs)
    known: list[list[int]] = []
    total = 0
    for i, job in enumerate(jobs):
        answer = run(engine, [job], coverage)[0]
        assert_equal_but_near_ties(plain, [job], {0: answer}, {0: expected[i]}, coverage)
        found, wanted = cached(answer), job.prompt[:-1]
        # Of an answer's last token there may be K/V or not.
        least, most = (max((common_length(wanted, text[:end]) for text in known), default=0) for end in (-1, None))
        assert least <= found <= most if least >= MIN_TOKENS else found in (0, most)
        known.append(job.prompt + answer.token_ids)
        total += found
    assert total > 4 * 100
    assert coverage.near_ties <= 1
    metrics = engine.core.metrics.snapshot()
    assert metrics["prefix_hit_tokens_total"] == total
    assert metrics["prefix_queried_tokens_total"] == sum(len(job.prompt) for job in jobs)


@pytest.mark.parametrize("family", FAMILIES[:4])
def test_many_at_once_under_every_drafter_in_scopes_and_with_preemption(
    family: str, tiny_model: dict[str, Path]
) -> None:
    rng = random.Random(family)
    plain, coverage = PlainPath(tiny_model[family]), Coverage()
    jobs = sharing_jobs(4) * 2
    # Answers of an extent and more: where memory is tight, they outgrow it.
    jobs = [greedy(job.prompt, rng.choice([5, 70]), arrival=rng.randint(0, 30)) for job in jobs]
    expected = expected_answers(plain, jobs)
    hits = 0
    for room, chunk, seats in ((ROOM, None, 16), (448, 7, 5), (640, 32, 3)):
        for job in jobs:
            job.speculation = random_speculation(rng, job)
            job.leave = job.arrival + rng.randint(1, 20) if rng.random() < 0.2 else None
        engine = make_engine(tiny_model[family], room=room, prefill_chunk_size=chunk, max_num_seqs=seats)
        for _ in range(2):
            answers = run(engine, jobs, coverage)
            assert_equal_but_near_ties(plain, jobs, answers, expected, coverage)
            for i, job in enumerate(jobs):
                if answers[i].usage is not None:
                    hits += cached(answers[i]) > 0
                    assert cached(answers[i]) == 0 or job.speculation.draft_scope != "request"
    assert hits > 20
    assert coverage.preemptions > 0
    assert coverage.near_ties <= 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [None, 7])
def test_who_begins_like_one_that_is_running_takes_over_what_it_has_computed(
    family: str, chunk: int | None, tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, coverage = PlainPath(tiny_model[family]), Coverage()
    base, *tails = texts(11, 120, *range(3, 9))
    computed = 1 if chunk is None else 18  # steps, of the first prompt
    jobs = [greedy(base[: 120 - 10 * i] + tail, 40, arrival=computed * (i > 0)) for i, tail in enumerate(tails)]
    engine = make_engine(tiny_model[family], prefill_chunk_size=chunk, decoding_length=1)
    allocator, forks = engine.core.executor.allocator, []
    allocator = getattr(allocator, "own", allocator)
    fork = allocator.fork
    monkeypatch.setattr(allocator, "fork", lambda *args: forks.append(args) or fork(*args))
    answers = run(engine, jobs, coverage)
    assert [cached(answers[i]) for i in range(len(jobs))] == [0, 110, 100, 90, 80, 70]
    assert len(forks) == len(jobs) - 1
    assert_equal_but_near_ties(plain, jobs, answers, expected_answers(plain, jobs), coverage)
    assert coverage.near_ties <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_of_a_conversation_begins_behind_the_answer(family: str, tiny_model: dict[str, Path]) -> None:
    plain = PlainPath(tiny_model[family])
    engine = make_engine(tiny_model[family], decoding_length=4)
    prompt, known = texts(5, 30)[0], 0
    for question in texts(6, 5, 9, 20):
        job = greedy(prompt, 20)
        answer, coverage = run(engine, [job], Coverage())[0], Coverage()
        assert_equal_but_near_ties(plain, [job], {0: answer}, expected_answers(plain, [job]), coverage)
        assert cached(answer) >= max(0, known - 1), "the earlier turns were computed again"
        known = len(prompt + answer.token_ids)
        prompt = prompt + answer.token_ids + question


def test_no_other_scope_ever_hits_and_a_private_request_leaves_nothing(tiny_model: dict[str, Path]) -> None:
    engine = make_engine(tiny_model["llama"])
    allocator = engine.core.executor.allocator
    prompt = texts(7, 100)[0]
    for _ in range(2):
        assert cached(ask(engine, prompt, "request")) == 0
        assert allocator.cached_tokens == 0
    assert [cached(ask(engine, prompt, scope)) for scope in ("a", "b", "request", "a", "b", "")] == [0, 0, 0, 99, 99, 0]
    engine.core.clear_draft_scope(DraftScope(TENANT, "a"))
    assert [cached(ask(engine, prompt, scope)) for scope in ("b", "a")] == [99, 0]
    for scope in ("a", "b", "default"):
        engine.core.clear_draft_scope(DraftScope(TENANT, scope))
    assert allocator.cached_tokens == 0


def test_nobody_hits_what_was_computed_before_the_scope_was_cleared_while_it_runs_nor_later(
    tiny_model: dict[str, Path],
) -> None:
    engine = make_engine(tiny_model["llama"], decoding_length=0)
    usage: dict[str, int] = {}

    def note(events: list[Event]) -> None:
        for request, event in events:
            if not isinstance(event, BatchserveError) and event.usage is not None:
                usage[request.request_id] = event.usage.cached_tokens

    def add(name: str, prompt: list[int], max_tokens: int) -> Request:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = engine.processor.make_request(name, prompt, sampling, of("team"), 0.0)
        engine.core.add(request)
        return request

    engine.core.emit = note
    early = add("early", texts(12, 60)[0], 60)
    for _ in range(20):
        engine.core.step()
    before = list(early.token_ids)
    assert len(before) > 70
    engine.core.clear_draft_scope(DraftScope(TENANT, "team"))
    add("while it runs", before, 1)
    for _ in range(5):
        engine.core.step()
    assert "early" not in usage
    while engine.core.has_work:
        engine.core.step()
    add("later", before[:65], 1)
    while engine.core.has_work:
        engine.core.step()
    # The second one came behind the clear: what it has left is the scope's again.
    assert usage == {"early": 0, "while it runs": 0, "later": 64}


def test_without_the_cache_nothing_is_kept(tiny_model: dict[str, Path]) -> None:
    engine = make_engine(tiny_model["llama"], prefix_cache=False)
    prompt = texts(7, 100)[0]
    assert [cached(ask(engine, prompt)) for _ in range(2)] == [0, 0]
    assert engine.core.executor.allocator.cached_tokens == 0
    assert engine.core.metrics.snapshot()["prefix_queried_tokens_total"] == 0


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_an_end_inside_an_accepted_run_leaves_the_kv_of_the_tokens_that_were_kept(
    family: str, tiny_model: dict[str, Path]
) -> None:
    """What was accepted behind it is not taken for the text that another goes on with."""
    plain, coverage = PlainPath(tiny_model[family]), Coverage()
    prompt, question = texts(8, 40, 12)
    whole = plain.greedy(prompt, 40)
    oracle = OracleDrafter(VOCAB_SIZE, 1, {tuple(prompt): whole})
    engine = make_engine(tiny_model[family], test_drafter=oracle, decoding_length=12)
    for place in range(2, min(30, len(whole))):
        params = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(whole[place],))
        first = run(engine, [Job(prompt, params, speculation=of(f"{place}"))], coverage)[0]
        given = whole[: whole.index(whole[place])]
        assert (first.token_ids, first.reason) == (given, FinishReason.STOP)
        following = greedy(prompt + given + question, 6, scope=f"{place}")
        answer = run(engine, [following], coverage, speculate=False)[0]
        assert_equal_but_near_ties(plain, [following], {0: answer}, expected_answers(plain, [following]), coverage)
    assert coverage.stops_inside_run > 3
    assert coverage.near_ties <= 1
    assert engine.core.metrics.snapshot()["prefix_hit_tokens_total"] > 20 * 40


@pytest.mark.parametrize("ends", ["by its deadline", "by its client"])
def test_an_end_in_the_middle_of_a_prompt_leaves_what_was_computed(ends: str, tiny_model: dict[str, Path]) -> None:
    now_s = [0.0]
    plain = PlainPath(tiny_model["llama"])
    engine = make_engine(tiny_model["llama"], prefill_chunk_size=16, clock=lambda: now_s[0])
    core, prompt = engine.core, texts(9, 150)[0]
    events: list[Event] = []
    core.emit = events.extend
    request = make_request(engine, "early", prompt, deadline_s=5.0 if ends == "by its deadline" else None)
    core.add(request)
    for _ in range(3):
        core.step()
    if ends == "by its deadline":
        now_s[0] = 6.0
        core.step()
        assert [isinstance(event, BatchserveError) for _, event in events] == [True]
    else:
        core.abort(request)
    core.check_integrity()
    job = greedy(prompt)
    answer, coverage = run(engine, [job], Coverage())[0], Coverage()
    assert cached(answer) == 48
    assert_equal_but_near_ties(plain, [job], {0: answer}, expected_answers(plain, [job]), coverage)


def make_request(engine: BuiltEngine, request_id: str, prompt: list[int], **options: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return engine.processor.make_request(request_id, prompt, params, of("team"), 0.0, **options)


@pytest.mark.cpu_backend
def test_with_batch_invariance_hits_are_bitwise_the_same(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits behind every token, in a full batch with hits, are those of each request alone without a cache."""
    rng = random.Random(10)
    jobs = sharing_jobs(10)
    for i, job in enumerate(jobs):
        job.params = SamplingParams(temperature=1.0, seed=i, max_tokens=16)
    seen: dict[tuple[str, int], torch.Tensor] = {}
    verify = step_handle.verify_batch
    name = [""]
    is_recording, num_compared = True, 0

    def observing(batch, logits, *others, **options):  # type: ignore[no-untyped-def]
        nonlocal num_compared
        results = verify(batch, logits, *others, **options)
        for rows, first, verified in zip(batch.requests, batch.first_logit, results, strict=True):
            for depth, row in enumerate([rows.root, *verified.rows] if verified else []):
                slot = (name[0] or rows.request_id, rows.context_len + rows.num_pending + depth)
                if is_recording:
                    seen[slot] = logits[first + row - rows.root]
                elif slot in seen:
                    num_compared += 1
                    assert np.array_equal(seen[slot], logits[first + row - rows.root]), f"other bits at {slot}"
        return results

    monkeypatch.setattr(step_handle, "verify_batch", observing)
    options: dict[str, Any] = {"batch_invariant": True, "decoding_length": 6}
    plain, hitting = (make_engine(tiny_model["llama"], prefix_cache=on, **options) for on in (False, True))
    expected = {}
    for i, job in enumerate(jobs):
        name[0] = str(i)
        expected[i] = run(plain, [job], Coverage(), speculate=False)[0].token_ids
    name[0], is_recording = "", False
    for job in jobs:
        job.arrival = rng.randint(0, 25)
    hits = 0
    for _ in range(2):
        answers = run(hitting, jobs, Coverage())
        assert {i: answer.token_ids for i, answer in answers.items()} == expected
        hits += sum(map(cached, answers.values()))
    assert hits > 1000
    assert num_compared > 100
