"""Random combinations of all sampling parameters: the same answers with speculation as without, alone and among 16."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchserve.draft.base import Drafter
from batchserve.grammar.state import GrammarState
from batchserve.row_adjustments import RowAdjustments
from batchserve.runner.model_folder import resolve_model
from batchserve.types import SamplingParams, TokenLogprobs
from tests.drafters import OracleDrafter
from tests.equivalence.harness import BACKEND, Coverage, Job, build, random_jobs, run
from tests.grammar.schemas import random_schema
from tests.tiny_models import VOCAB_SIZE

TOLERANCE = 2e-3  # of log probabilities in float32
LENGTH = {"max_model_len": 200, "prefill_chunk_size": 32}
WORDS = ("the", "a", " of", "and", "ing", "1", "is the", "to be")
STOPS = (".", "\n", "the", " a")
GRAMMARS: dict[str, Callable[[random.Random], Any]] = {
    "json_schema": random_schema,
    "json_object": lambda rng: True,
    "regex": lambda rng: rng.choice(["[a-z]{3,10} [0-9]{2}", "(the |a )*end", r"\d+(, \d+)*", "(?s:.*)"]),
    "ebnf": lambda rng: 'root ::= "(" root ")" | item (", " item)*\nitem ::= "alpha" | "alphabet" | [0-9]+',
    "choice": lambda rng: ("yes", "no", "yes and no", "no and yes"),
}


def random_params(rng: random.Random, vocab_size: int, *, has_text: bool) -> SamplingParams:
    """Some of the parameters, each with a random value."""
    tokens = range(vocab_size)
    choices: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice([0.0, 0.3, 0.8, 1.0, 1.5]),
        "top_k": lambda: rng.choice([1, 5, 40]),
        "top_p": lambda: rng.choice([0.95, 0.5]),
        "min_p": lambda: rng.choice([0.01, 0.1, 0.5]),
        "repetition_penalty": lambda: rng.choice([0.8, 1.05, 1.2, 2.0]),
        "presence_penalty": lambda: rng.choice([-1.0, 0.2, 1.0, 2.0]),
        "frequency_penalty": lambda: rng.choice([-0.5, 0.2, 1.0, 2.0]),
        "no_repeat_ngram_size": lambda: rng.randint(1, 4),
        "min_tokens": lambda: rng.randint(1, 12),
        "logit_bias": lambda: {rng.choice(tokens): rng.uniform(-5, 5) for _ in range(8)},
        "allowed_token_ids": lambda: rng.sample(tokens, int(vocab_size * rng.uniform(0.5, 0.95))),
        "stop_token_ids": lambda: rng.sample(tokens, vocab_size // 32),
        "ignore_eos": lambda: True,
        "logits_processors": lambda: (away_from(rng.randrange(vocab_size)),),
        "logprobs": lambda: rng.choice([0, 1, 5, 20]),
        "prompt_logprobs": lambda: rng.choice([0, 1, 5]),
    }
    if has_text:
        choices |= {"bad_words": lambda: rng.sample(WORDS, 3), "stop": lambda: rng.sample(STOPS, 1)}
        choices |= {"include_stop_str_in_output": lambda: True, "echo": lambda: True}
    names = rng.sample([*choices], rng.randint(1, 6))
    chosen = {name: choices[name]() for name in names}
    if has_text and rng.random() < 0.5:
        kind = rng.choice([*GRAMMARS])
        chosen[kind] = GRAMMARS[kind](rng)
    chosen.setdefault("temperature", 0.0)
    return SamplingParams(**{"seed": rng.getrandbits(64), "max_tokens": rng.randint(12, 32), **chosen})


def away_from(shift: int) -> Callable[[Sequence[int], np.ndarray], np.ndarray]:
    """A processor that bans a token which depends on the last two."""

    def processor(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        logits[(sum(token_ids[-2:]) + shift) % len(logits)] = -np.inf
        return logits

    return processor


def random_cases(rng: random.Random, count: int, vocab_size: int, *, has_text: bool = False) -> list[Job]:
    jobs = random_jobs(rng, count, vocab_size, longest=60)
    for job in jobs:
        job.params = random_params(rng, vocab_size, has_text=has_text)
    return jobs


def given(job: Job, name: str) -> bool:
    default = next(each for each in dataclasses.fields(SamplingParams) if each.name == name).default
    value = getattr(job.params, name)
    return value not in (default, {}) and (name, value) != ("temperature", 0.0)


def check(model: Path, jobs: Sequence[Job], drafters: Sequence[Drafter | str], **options: Any) -> Coverage:
    """The same tokens, texts, reasons and counts, with every drafter and 16 requests at once; with the last one also
    one by one.
    """
    coverage = Coverage()
    off = run(build(model, max_num_seqs=1, **LENGTH, **options), [*jobs], Coverage(), speculate=False)
    for drafter in drafters:
        for num_seqs in (1, 16) if drafter is drafters[-1] else (16,):
            chosen = {"drafter": drafter} if isinstance(drafter, str) else {"test_drafter": drafter}
            on = run(build(model, max_num_seqs=num_seqs, **LENGTH, **options, **chosen), [*jobs], coverage)
            for i, job in enumerate(jobs):
                assert (on[i].error, on[i].reason) == (off[i].error, off[i].reason), f"job {i}: {job.params}"
                if on[i].error:
                    continue  # what was given before depends on the steps that it took
                assert on[i].token_ids == off[i].token_ids, f"job {i}: {job.params}"
                assert on[i].text == off[i].text, f"job {i}: {job.params}"
                assert on[i].stop_reason == off[i].stop_reason, f"job {i}: {job.params}"
                for mine, theirs in (
                    (on[i].logprobs, off[i].logprobs),
                    (on[i].prompt_logprobs, off[i].prompt_logprobs),
                ):
                    assert are_equal(mine or [], theirs or []), f"job {i}: {job.params}"
                assert len(on[i].logprobs) == (len(on[i].token_ids) if job.params.logprobs is not None else 0)
                used, expected = on[i].usage, off[i].usage
                assert used is not None
                assert expected is not None
                assert used.completion_tokens == expected.completion_tokens
    return coverage


def are_equal(mine: Sequence[TokenLogprobs | None], theirs: Sequence[TokenLogprobs | None]) -> bool:
    """To the bit on a CPU's own backend; elsewhere within TOLERANCE, since a row's bits depend on the others."""
    if BACKEND["attention_backend"] == "cpu":
        return [*mine] == [*theirs]
    numbers = [
        [value for each in many if each is not None for value in (each.logprob, *(top for _, top in each.top))]
        for many in (mine, theirs)
    ]
    return bool(np.allclose(*numbers, rtol=0.0, atol=TOLERANCE))


def oracle(model: Path, jobs: Sequence[Job], vocab_size: int, **options: Any) -> OracleDrafter:
    """Knows the answers, but for some errors; and how most would go on after their ends."""
    endless = {"stop_token_ids": (), "ignore_eos": True}
    longer = [dataclasses.replace(job, params=dataclasses.replace(job.params, **endless)) for job in jobs]
    off = run(build(model, max_num_seqs=1, **LENGTH, **options), longer, Coverage(), speculate=False)
    truth = {tuple(job.prompt): off[i].token_ids for i, job in enumerate(jobs)}
    return OracleDrafter(vocab_size, 5, truth)


def check_cases(model: Path, seed: int, count: int, dtype: str, **options: Any) -> None:
    jobs = random_cases(random.Random(seed), count, VOCAB_SIZE)
    drafters = "mixture", "jacobi", oracle(model, jobs, VOCAB_SIZE, dtype=dtype)
    coverage = check(model, jobs, drafters, dtype=dtype, **options)
    used = Counter(each.name for job in jobs for each in dataclasses.fields(SamplingParams) if given(job, each.name))
    adjusted = sum(count for name, count in used.items() if "penalty" in name or "bias" in name)
    assert all(used[name] >= count // 12 for name in used), used
    assert adjusted > count / 2
    assert coverage.accepted > 5 * count
    assert coverage.trees["partly"] > count
    assert coverage.stops_inside_run > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny_model(dtype: str, tiny_model: dict[str, Path], backend: str) -> None:
    if dtype == "bfloat16" and backend != "cpu":
        pytest.skip("rounding decides between tokens that are nearly as likely: test_sampled.py counts them")
    mode = "processed_logprobs" if dtype == "bfloat16" else "raw_logprobs"
    check_cases(tiny_model["llama"], 11, 100, dtype, logprobs_mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_tiny_models_at_length(family: str, seed: int, tiny_model: dict[str, Path]) -> None:
    check_cases(tiny_model[family], 100 + seed, 100, "bfloat16")


def test_bundled_model_with_texts() -> None:
    model = Path(resolve_model("bundled"))
    count = 120 if BACKEND["attention_backend"] == "cpu" else 60  # elsewhere steps take longer
    jobs = random_cases(random.Random(12), count, 4096, has_text=True)
    coverage = check(model, jobs, ["mixture", "trie", "reference", "jacobi"], dtype="float32")
    assert coverage.accepted > 40
    for name in ("bad_words", "stop", *GRAMMARS):
        assert sum(given(job, name) for job in jobs) >= count // 20


def forgotten_ancestors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties do not count the draft tokens on the way to a row."""
    right = RowAdjustments.adjusted
    monkeypatch.setattr(RowAdjustments, "adjusted", lambda own, logits, path: right(own, logits, ()))


def wrong_ancestor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token before a row is another one."""
    right = RowAdjustments.adjusted

    def adjusted(own: RowAdjustments, logits: np.ndarray, path: Sequence[int]) -> np.ndarray:
        return right(own, logits, [*path[:-1], (path[-1] + 1) % VOCAB_SIZE] if path else ())

    monkeypatch.setattr(RowAdjustments, "adjusted", adjusted)


@pytest.mark.cpu_backend  # the faults are put into the walk in Python, which is the same for all
@pytest.mark.parametrize("fault", [forgotten_ancestors, wrong_ancestor])
def test_seeded_faults_turn_it_red(
    fault: Callable[[pytest.MonkeyPatch], None], tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, jobs = tiny_model["llama"], random_cases(random.Random(13), 40, VOCAB_SIZE)
    drafter = oracle(model, jobs, VOCAB_SIZE)
    off = run(build(model, max_num_seqs=1, **LENGTH), jobs, Coverage(), speculate=False)  # type: ignore[arg-type]
    fault(monkeypatch)
    engine = build(model, drafter, max_num_seqs=16, **LENGTH)  # type: ignore[arg-type]
    engine.core.executor.can_walk_sampled = lambda: False  # so that it is not the compiled walk
    on = run(engine, jobs, Coverage())
    assert any(on[i].token_ids != off[i].token_ids for i in range(len(jobs)))


def of_a_sibling(own: GrammarState, masks: np.ndarray, token_ids: Sequence[int], parents: Sequence[int]) -> None:
    """Each node has the mask of the node before it that hangs from the same one, or else of the one it hangs from."""
    right = masks.copy()
    for node, parent in enumerate(parents):
        siblings = [other for other in range(node) if parents[other] == parent]
        masks[node + 1] = right[siblings[-1] + 1 if siblings else parent + 1]


def late(own: GrammarState, masks: np.ndarray, token_ids: Sequence[int], parents: Sequence[int]) -> None:
    """Each node has the mask of the answer's end."""
    masks[1:] = masks[0]


@pytest.mark.cpu_backend  # grammars know nothing of backends
@pytest.mark.parametrize("fault", [of_a_sibling, late])
def test_seeded_faults_of_grammars_turn_it_red(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(resolve_model("bundled"))
    jobs = random_cases(random.Random(14), 24, 4096)
    for i, job in enumerate(jobs):
        job.params = SamplingParams(temperature=1.0, seed=i, max_tokens=24, regex="([a-z]{1,4}[0-9]){1,30}")
    drafter = oracle(model, jobs, 4096)
    off = run(build(model, max_num_seqs=1, **LENGTH), jobs, Coverage(), speculate=False)  # type: ignore[arg-type]
    assert check(model, jobs, [drafter]).accepted > 100
    right = GrammarState.fill_masks

    def fill_masks(own: GrammarState, masks: np.ndarray, *tree: Sequence[Any]) -> None:
        right(own, masks, *tree)  # type: ignore[arg-type]
        fault(own, masks, *tree[:2])

    monkeypatch.setattr(GrammarState, "fill_masks", fill_masks)
    on = run(build(model, drafter, max_num_seqs=16, **LENGTH), jobs, Coverage())  # type: ignore[arg-type]
    assert any(on[i].token_ids != off[i].token_ids for i in range(len(jobs)))
