"""A model whose numbers overflow for one request: that one ends with its error, the others with their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchserve.draft.base import Drafter
from batchserve.engine.engine_core import Event
from batchserve.errors import BatchserveError, NonFiniteLogitsError
from batchserve.kv.slots import SlotAllocator
from batchserve.program import instructions as at
from batchserve.runner.native_runner import NativeRunner
from batchserve.startup.build import BuiltEngine
from batchserve.types import Delta, FinishReason, SamplingParams, SpeculationParams
from tests.drafters import OracleDrafter
from tests.equivalence.harness import PlainPath, build
from tests.tiny_models import VOCAB_SIZE

PROMPTS = [list(range(10 * i + 5, 10 * i + 35)) for i in range(4)]
MAX_TOKENS = 24
TEAM, OFF = SpeculationParams(draft_scope="team"), SpeculationParams(is_enabled=False)


@pytest.fixture(scope="module")
def expected(tiny_model: dict[str, Path]) -> list[list[int]]:
    plain = PlainPath(tiny_model["llama"])
    return [plain.greedy(prompt, MAX_TOKENS) for prompt in PROMPTS]


def broken(model: Path, token_id: int, drafter: Drafter | None = None) -> BuiltEngine:
    """An engine for which nothing is finite behind this token; broken once it has been probed and accepted."""
    engine = build(model, drafter, kv_cache_memory=1 << 24, max_kept_bytes=0)
    executor = engine.core.executor
    if isinstance(executor, NativeRunner):
        image = executor._native.image
        ((_, _, number),) = [each for each in image.array_fields.tolist() if each[1] == at.TABLE]
        image.arrays[number].view(np.float32)[token_id] = float("nan")
        return engine
    with torch.no_grad():
        executor._model.get_input_embeddings().weight[token_id] = float("nan")
    return engine


def answer(
    engine: BuiltEngine, prompts: list[list[int]], speculation: SpeculationParams = TEAM, **params: Any
) -> list[tuple[list[int], FinishReason | type]]:
    """Each prompt's tokens, and how it ended: once."""
    tokens: list[list[int]] = [[] for _ in prompts]
    ends: list[list[FinishReason | type]] = [[] for _ in prompts]

    def collect(events: list[Event]) -> None:
        for request, event in events:
            place = int(request.request_id)
            assert not ends[place], "an event behind the end"
            if isinstance(event, BatchserveError):
                assert f"request_id = '{place}', after {len(tokens[place])} tokens" in str(event)
                ends[place].append(type(event))
                continue
            assert isinstance(event, Delta)
            tokens[place] += event.token_ids
            ends[place] += [event.finish_reason] if event.finish_reason else []

    engine.core.emit = collect
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, **params})
    for place, prompt in enumerate(prompts):
        engine.core.add(engine.processor.make_request(str(place), prompt, sampling, speculation, 0.0))
    while engine.core.has_work:
        engine.core.step()
        engine.core.check_integrity()
        allocator = engine.core.executor.allocator
        if isinstance(allocator, SlotAllocator):  # whose commit gives back what drafts took, also behind an overflow
            needed = [max(r.num_prompt_tokens, r.num_computed_tokens) for r in engine.core.scheduler.running]
            assert allocator.total_tokens - allocator.free_tokens <= sum(needed)
    return [(text, end) for text, (end,) in zip(tokens, ends, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_prompt_that_overflows_harms_nobody_else(
    tiny_model: dict[str, Path], expected: list[list[int]], temperature: float
) -> None:
    unused = next(token for token in range(3, VOCAB_SIZE) if all(token not in text for text in [*expected, *PROMPTS]))
    options = {"temperature": temperature, "seed": 1}
    engine = broken(tiny_model["llama"], unused)
    hostile = [*PROMPTS[0], unused]
    right = answer(build(tiny_model["llama"]), PROMPTS, OFF, **options)
    if temperature == 0.0:
        assert [text for text, _ in right] == expected
    *others, last = answer(engine, [*PROMPTS, hostile], **options)
    assert last == ([], NonFiniteLogitsError)
    assert [text for text, _ in others if unused not in text] == [text for text, _ in right if unused not in text]
    assert sum(unused not in text for text, _ in others) >= 2


@pytest.mark.parametrize("times", [1, 8])  # long contexts go to another kernel, in which rows can spoil each other
@pytest.mark.parametrize("place", [1, 2, 5, 11])
def test_what_comes_before_is_given_the_same_with_drafts_and_without(
    tiny_model: dict[str, Path], place: int, times: int
) -> None:
    """Behind one of its tokens the answer overflows; an end before that is still found, whatever was accepted."""
    prompt = PROMPTS[1] * times
    whole = text = PlainPath(tiny_model["llama"]).greedy(prompt, MAX_TOKENS)
    token = next(token for token in text[place:] if token not in prompt)
    text = text[: text.index(token) + 1]
    oracle = OracleDrafter(VOCAB_SIZE, place, {tuple(prompt): whole})
    prompts = [prompt] * 6  # the oracle's drafts differ in length
    for drafter, speculation in ((None, OFF), (oracle, TEAM)):
        engine = broken(tiny_model["llama"], token, drafter)
        assert answer(engine, prompts, speculation) == [(text, NonFiniteLogitsError)] * 6
        allocator = engine.core.executor.allocator
        assert allocator.free_tokens == allocator.total_tokens
        assert allocator.cached_tokens == 0, "nobody shall begin with such K/V"
        assert answer(engine, prompts, speculation, max_tokens=len(text)) == [(text, FinishReason.LENGTH)] * 6
        stopped = answer(engine, prompts, speculation, stop_token_ids=(token,))
        assert stopped == [(text[:-1], FinishReason.STOP)] * 6
