"""Several samples of one prompt: those of separate requests, with the prompt computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchserve.config import EngineConfig
from batchserve.engine.async_engine import AsyncEngine
from batchserve.errors import InvalidRequestError, QueueFullError
from batchserve.llm import LLM
from batchserve.startup.build import build_engine
from batchserve.types import Delta, SamplingParams, SpeculationParams, Started

PROMPT = [5, 9, 11, 40] * 12
PARAMS = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}


def separate(llm: LLM, seeds: range) -> list[list[int]]:
    params = [SamplingParams(seed=seed, **PARAMS) for seed in seeds]  # type: ignore[arg-type]
    return [each.token_ids for each in llm.generate([PROMPT] * len(params), params, show_progress=False)]


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"default_draft_scope": "request"}])
def test_they_are_those_of_separate_requests_and_the_prompt_is_computed_once(
    tiny_model: dict[str, Path], options: dict[str, object]
) -> None:
    llm = LLM(str(tiny_model["llama"]), dtype="float32", cache_dir=str(tiny_model["llama"] / "cache"), **options)
    (found,) = llm.generate([PROMPT], SamplingParams(n=4, seed=7, **PARAMS), show_progress=False)  # type: ignore[arg-type]
    assert [each.token_ids for each in found.samples] == separate(llm, range(7, 11))
    assert found.token_ids == found.samples[0].token_ids
    cached = [each.usage.cached_tokens for each in found.samples]
    assert cached == [0, *[len(PROMPT) - 1] * 3]
    assert len({tuple(each.token_ids) for each in found.samples}) == 4
    allocator = llm._core.executor.allocator
    assert allocator.free_tokens == allocator.total_tokens


def test_seeds_go_on_at_zero(tiny_model: dict[str, Path]) -> None:
    llm = LLM(str(tiny_model["llama"]), dtype="float32", cache_dir=str(tiny_model["llama"] / "cache"))
    params = SamplingParams(n=2, seed=2**64 - 1, **PARAMS)  # type: ignore[arg-type]
    (found,) = llm.generate([PROMPT], params, show_progress=False)
    assert found.samples[1].token_ids == separate(llm, range(1))[0]


@pytest.mark.parametrize(("n", "bound"), [(0, "in 1..64"), (65, "in 1..64"), (2.0, "an integer"), (None, "in 1..64")])
def test_how_many_there_may_be(n: object, bound: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"n = .*{bound}"):
        SamplingParams(n=n)  # type: ignore[arg-type]


def test_samples_begin_when_the_first_ends_with_its_first_token(tiny_model: dict[str, Path]) -> None:
    llm = LLM(str(tiny_model["llama"]), dtype="float32", cache_dir=str(tiny_model["llama"] / "cache"))
    for params in (
        SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=1),
        SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, allowed_token_ids=(2,)),  # the EOS
    ):
        (found,) = llm.generate([PROMPT], params, show_progress=False)
        assert [len(each.token_ids) for each in found.samples] == [params.max_tokens % 8] * 3


async def test_they_stream_beside_each_other_and_end_together_with_their_call(tiny_model: dict[str, Path]) -> None:
    config = EngineConfig(str(tiny_model["llama"]), dtype="float32", max_num_seqs=3, max_waiting=3)
    engine = AsyncEngine(build_engine(config), config)
    try:
        params = SamplingParams(n=4, seed=7, **PARAMS)  # type: ignore[arg-type]
        whole = await engine.generate(PROMPT, params, request_id="one")
        tokens: dict[int, list[int]] = {}
        ended: list[int] = []
        async for event in engine.stream(PROMPT, params, request_id="one"):
            if isinstance(event, Started):
                assert event.request_id == "one"
                continue
            assert isinstance(event, Delta)
            assert event.request_id == "one"
            tokens.setdefault(event.index, []).extend(event.token_ids)
            ended += [event.index] if event.finish_reason is not None else []
        assert [tokens[i] for i in range(4)] == [each.token_ids for each in whole.samples]
        assert sorted(ended) == [0, 1, 2, 3]
        with pytest.raises(InvalidRequestError, match="n = 7: must be at most 6"):
            await engine.generate(PROMPT, SamplingParams(n=7, temperature=1.0))
        running = engine.stream(PROMPT, params)
        await anext(running)
        with pytest.raises(QueueFullError):
            await engine.generate(PROMPT, params)
        await running.aclose()
        with pytest.raises(InvalidRequestError, match="none of them NUL"):
            await engine.generate(PROMPT, params, request_id="one\0001")
        with pytest.raises(InvalidRequestError, match="n = 2: must be 1 at temperature 0"):
            await engine.generate(PROMPT, SamplingParams(n=2, temperature=0.0))
        cut = engine.stream(PROMPT, params)
        async for event in cut:
            if isinstance(event, Delta):
                break
        await cut.aclose()
        early = engine.stream(PROMPT, params)  # before any prompt is computed
        await anext(early)
        await early.aclose()
        await engine.ping()
        assert engine.num_in_flight == 0
        no_drafts = SpeculationParams(is_enabled=False)
        assert (await engine.generate(PROMPT, params, speculation=no_drafts)).token_ids == whole.token_ids
    finally:
        await engine.shutdown()


def shifted(token_ids: list[int], logits: np.ndarray) -> np.ndarray:
    logits[token_ids[-1]] -= 1.0
    return logits


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ("e", "the"), "include_stop_str_in_output": True},
        {"echo": True, "logprobs": 2},
        {"logits_processors": (shifted,)},
        {"frequency_penalty": 1.0, "bad_words": ("return",), "min_p": 0.05},
    ],
    ids="-".join,
)
def test_each_sample_has_what_else_is_asked_for(more: dict[str, Any]) -> None:
    llm = LLM(dtype="float32", max_model_len=256)
    text = "def parse(text: str) -> list[str]:\n    "
    (found,) = llm.generate(text, SamplingParams(n=4, seed=7, **PARAMS, **more), show_progress=False)  # type: ignore[arg-type]
    alone = [
        llm.generate(text, SamplingParams(seed=7 + i, **PARAMS, **more), show_progress=False)[0]  # type: ignore[arg-type]
        for i in range(4)
    ]
    for mine, theirs in zip(found.samples, alone, strict=True):
        assert (mine.token_ids, mine.text, mine.logprobs) == (theirs.token_ids, theirs.text, theirs.logprobs)
        assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
    assert len({each.text for each in found.samples}) > 1
