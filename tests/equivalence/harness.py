"""Runs scripted traffic through a real engine core and holds every token against the plain path."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from batchserve.config import EngineConfig
from batchserve.draft.base import Drafter
from batchserve.engine.engine_core import Event
from batchserve.errors import BatchserveError
from batchserve.request import Request, ResolvedSampling
from batchserve.sampling.near_tie import is_near_tie, rounding_bound
from batchserve.sampling.verify import VerifiedTokens
from batchserve.startup.build import BuiltEngine, build_engine
from batchserve.types import FinishReason, SamplingParams, SpeculationParams, TokenLogprobs, Usage

BACKEND = {"device": "cpu", "attention_backend": "cpu"}  # options of every engine; conftest.py sets others


@dataclass
class Job:
    """One scripted request: joins before step `arrival`, and leaves by abort before step `leave` if that is set."""

    prompt: list[int]
    params: SamplingParams
    arrival: int = 0
    leave: int | None = None
    speculation: SpeculationParams = field(default_factory=SpeculationParams)


@dataclass
class Coverage:
    """What the traffic has exercised."""

    drafted: int = 0
    accepted: int = 0
    trees: dict[str, int] = field(default_factory=lambda: {"fully": 0, "partly": 0, "never": 0})
    preemptions: int = 0
    stops_inside_run: int = 0
    tokens: int = 0
    near_ties: int = 0


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    reason: FinishReason | None = None
    error: str = ""
    sampling: ResolvedSampling | None = None
    usage: Usage | None = None


def random_jobs(
    rng: random.Random, count: int, vocab_size: int, *, longest: int = 300, max_tokens: int = 24
) -> list[Job]:
    """Prompts of 1 to `longest` tokens, some of which repeat themselves, joining at random steps."""
    jobs = []
    for _ in range(count):
        size = rng.choice([1, 2, rng.randint(3, 40), rng.randint(3, longest)])
        unit = [rng.randrange(3, vocab_size) for _ in range(min(size, rng.choice([4, 16, longest])))]
        prompt = (unit * (size // len(unit) + 1))[:size]
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, max_tokens))
        jobs.append(Job(prompt, params, arrival=rng.randint(0, 12)))
    return jobs


def build(
    model: Path,
    test_drafter: Drafter | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: object,
) -> BuiltEngine:
    length = None if options.get("adaptive") else 8
    defaults = {"dtype": "float32", "drafter": "mixture", "decoding_length": length, **BACKEND}
    config = EngineConfig(model=str(model), **{**defaults, **options})  # type: ignore[arg-type]
    return build_engine(config, drafter=test_drafter, clock=clock)


def run(engine: BuiltEngine, jobs: list[Job], coverage: Coverage, *, speculate: bool = True) -> dict[int, Answer]:
    """Drive the core step by step; returns the answers by job, those of jobs that left incomplete."""
    core, answers = engine.core, {i: Answer() for i in range(len(jobs))}
    requests: dict[int, Request] = {}

    def collect(events: list[Event]) -> None:
        for request, event in events:
            answer = answers[int(request.request_id)]
            if isinstance(event, BatchserveError):  # a grammar may be left with no token that other parameters allow
                assert request.sampling.grammar is not None, event
                answer.error = event.reason
                continue
            assert answer.reason is None, "an event behind the last one"
            answer.token_ids += event.token_ids
            answer.text += event.text
            answer.logprobs += event.logprobs or ()
            answer.stop_reason = event.stop_reason
            assert answer.prompt_logprobs is None or event.prompt_logprobs is None
            answer.prompt_logprobs = answer.prompt_logprobs or event.prompt_logprobs
            answer.reason, answer.usage = event.finish_reason, event.usage

    core.emit = collect
    step = 0
    with _observed(engine, coverage):
        while core.has_work or len(requests) < len(jobs):
            for i, job in enumerate(jobs):
                if job.arrival <= step and i not in requests:
                    speculation = job.speculation if speculate else SpeculationParams(is_enabled=False)
                    asked = (engine.processor.tokenize(job.prompt), job.params, speculation, 0.0)
                    requests[i] = engine.begin(engine.processor.new_request(str(i), *asked))
                    core.add(requests[i])
                if job.leave is not None and job.leave == step and i in requests:
                    core.abort(requests[i])
            core.step()
            core.check_integrity()
            step += 1
            assert step < 20_000, "the traffic does not end"
    assert core.executor.allocator.free_tokens == core.executor.allocator.total_tokens
    for i, request in requests.items():
        answers[i].sampling = request.sampling
        coverage.preemptions += request.num_preemptions
        coverage.tokens += len(answers[i].token_ids)
        has_ended = answers[i].reason is not None or answers[i].error
        assert has_ended or jobs[i].leave is not None, f"job {i} never ended"
    return answers


class _observed:
    """Counts what verification did, from outside the engine."""

    def __init__(self, engine: BuiltEngine, coverage: Coverage) -> None:
        self.core, self.coverage = engine.core, coverage

    def __enter__(self) -> None:
        self.commit = self.core._commit

        def counting(scheduled, batch, results):  # type: ignore[no-untyped-def]
            for rows, verified in zip(batch.requests, results, strict=True):
                if verified is not None:
                    self._count(rows, verified)
            return self.commit(scheduled, batch, results)

        self.core._commit = counting  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        self.core._commit = self.commit  # type: ignore[method-assign]

    def _count(self, rows, verified: VerifiedTokens) -> None:  # type: ignore[no-untyped-def]
        drafted, accepted = rows.num_draft_tokens, len(verified.rows)
        self.coverage.drafted += drafted
        self.coverage.accepted += accepted
        if drafted:
            leaf = not any(parent == (verified.rows or [rows.root])[-1] for parent in rows.parents)
            kind = "never" if not accepted else "fully" if leaf else "partly"
            self.coverage.trees[kind] += 1
        ends = rows.sampling.end_token_ids
        self.coverage.stops_inside_run += any(token in ends for token in verified.token_ids[:-1])


class PlainPath:
    """transformers itself, one request at a time: the truth. What it has answered is kept for other tests.

    The folder must stay as it is.
    """

    _answers: ClassVar[dict[tuple[Path, str], dict[tuple[int, ...], list[int]]]] = {}

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        self._folder, self._dtype = model, dtype
        self.dtype = str(dtype).removeprefix("torch.")
        self._known = self._answers.setdefault((model, self.dtype), {})

    @functools.cached_property
    def model(self) -> PreTrainedModel:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=self._dtype, attn_implementation="eager"
        )
        return loaded.eval()

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The answer without its EOS, by generate()."""
        key = (max_tokens, *prompt)
        if key not in self._known:
            (tokens,) = self._generate([prompt], max_tokens)
            self._known[key] = tokens[:-1] if tokens and tokens[-1] == 2 else tokens
        return list(self._known[key])

    def through_eos(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """So many tokens behind each of these prompts of one length, whatever they are."""
        return self._generate(prompts, count, eos_token_id=None)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], count: int, **options: Any) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0, **options
        )
        tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return tokens

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> np.ndarray:
        """float32 [vocab_size] behind these tokens."""
        out: np.ndarray = self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1].float().numpy()
        return out

    def allows(self, prompt: list[int], tokens: list[int], place: int, sampling: ResolvedSampling) -> bool:
        """Whether tokens[place] wins behind the tokens before it, or loses by less than the rounding bound.

        `place` may be one past the end: then it is the end token that was chosen.
        """
        logits = self.logits(prompt + tokens[:place])
        bound = rounding_bound(self.dtype, logits)
        chosen = [tokens[place]] if place < len(tokens) else sorted(sampling.end_token_ids)
        return any(is_near_tie(logits, t, len(prompt) + place, sampling, bound) for t in chosen)


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs (or is there in one only); None when equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def assert_equal_but_near_ties(
    plain: PlainPath, jobs: list[Job], answers: dict[int, Answer], expected: dict[int, list[int]], coverage: Coverage
) -> None:
    """Every answer equals the expected one up to a counted near-tie; one that was aborted is a prefix of it."""
    for i, job in enumerate(jobs):
        answer, wanted = answers[i], expected[i]
        if answer.reason is None:
            wanted = wanted[: len(answer.token_ids)]
        place = first_difference(answer.token_ids, wanted)
        assert answer.sampling is not None
        if place is None:
            is_full = len(wanted) == answer.sampling.max_tokens
            assert answer.reason in (None, FinishReason.LENGTH if is_full else FinishReason.STOP), f"job {i}"
            continue
        assert plain.allows(job.prompt, answer.token_ids, place, answer.sampling), (
            f"job {i}: token {place} is wrong: {answer.token_ids[: place + 1]} instead of {wanted[: place + 1]}"
        )
        coverage.near_ties += 1
