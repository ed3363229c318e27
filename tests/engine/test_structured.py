"""Structured output: answers follow their grammars, with the same tokens whatever is drafted, and end when complete."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from typing import Any

import jsonschema_rs
import pytest

from batchserve.config import EngineConfig
from batchserve.engine.async_engine import AsyncEngine
from batchserve.errors import BatchserveError, DeadlineExceededError, GrammarError, InvalidRequestError
from batchserve.grammar import state as state_module
from batchserve.grammar.state import GrammarState
from batchserve.llm import LLM
from batchserve.types import FinishReason, RequestOutput, SamplingParams, SpeculationParams
from tests.grammar.schemas import random_schema
from tools.real_model import default_folder

NO_DRAFTS = SpeculationParams(is_enabled=False)
PROMPT = "def parse(text):\n    return "
NUM_SCHEMAS = 300


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", max_model_len=1024)


def answers(llm: LLM, params: list[SamplingParams], speculation: SpeculationParams) -> list[RequestOutput]:
    return llm.generate([PROMPT] * len(params), params, speculation=speculation, show_progress=False)


def key(output: RequestOutput) -> tuple[Any, ...]:
    return output.token_ids, output.text, output.finish_reason, output.stop_reason, output.usage.completion_tokens


def test_schemas_at_temperature_1(llm: LLM) -> None:
    """Every finished answer is valid, by another library; and drafts change none."""
    rng = random.Random(1)
    schemas = [random_schema(rng) for _ in range(NUM_SCHEMAS)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=300, json_schema=schema) for i, schema in enumerate(schemas)
    ]
    drafted, plain = answers(llm, params, SpeculationParams()), answers(llm, params[:100], NO_DRAFTS)
    assert [key(each) for each in drafted[:100]] == [key(each) for each in plain]
    counts = Counter(each.finish_reason for each in drafted)
    assert counts[FinishReason.STOP] > 0.85 * NUM_SCHEMAS, counts
    for schema, output in zip(schemas, drafted, strict=True):
        if output.finish_reason is FinishReason.STOP:
            validator = jsonschema_rs.validator_for(schema, validate_formats=True)
            assert validator.is_valid(json.loads(output.text)), (schema, output.text)
    used = Counter(word for schema in schemas for word in re.findall(r'"(\$?\w+)": ', json.dumps(schema)))
    for word in ("enum", "$ref", "pattern", "format", "prefixItems", "anyOf", "allOf", "multipleOf", "maxItems"):
        assert used[word] > 20, used
    assert sum(each.usage.accepted_draft_tokens for each in drafted) > 1000


@pytest.mark.slow
def test_schemas_with_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As chats, at temperature 1. `python -m tools.real_model` fetches it."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.environ["BATCHSERVE_TESTS_CALLERS_CACHE"])
        folder = default_folder()
    if not folder.exists():
        pytest.skip("the model was not fetched")
    rng, llm = random.Random(99), LLM(str(folder), max_model_len=1024)
    schemas = [random_schema(rng) for _ in range(NUM_SCHEMAS)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=200, json_schema=each) for i, each in enumerate(schemas)
    ]
    asked = [{"role": "user", "content": "Give me an example as JSON."}]
    drafted = llm.chat([asked] * NUM_SCHEMAS, params, show_progress=False)
    plain = llm.chat([asked] * 60, params[:60], speculation=NO_DRAFTS, show_progress=False)
    assert [key(each) for each in drafted[:60]] == [key(each) for each in plain]
    ended = [pair for pair in zip(schemas, drafted, strict=True) if pair[1].finish_reason is FinishReason.STOP]
    assert len(ended) > 0.7 * NUM_SCHEMAS
    for schema, output in ended:
        validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        assert validator.is_valid(json.loads(output.text)), (schema, output.text)


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": r"^\d{3}-[a-f]{2}$"}, r"\d{3}-[a-f]{2}"),
        ({"choice": ("yes", "no", 'say "é"\n')}, r'yes|no|say "é"\n'),
        ({"choice": "only"}, "only"),
        ({"ebnf": 'root ::= "no" | "yes " [0-9] [0-9]'}, r"no|yes \d\d"),
        ({"ebnf": 'start: "no" | "yes " /[0-9]{2}/'}, r"no|yes \d\d"),
        ({"json_schema": '{"enum": ["a", 7]}'}, '"a"|7'),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_kinds(given: dict[str, Any], pattern: str, temperature: float, llm: LLM) -> None:
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=40, **given) for seed in range(8)]
    drafted = answers(llm, params, SpeculationParams())
    assert [key(each) for each in drafted] == [key(each) for each in answers(llm, params, NO_DRAFTS)]
    assert all(re.fullmatch(pattern, each.text) for each in drafted), [each.text for each in drafted]
    assert {each.finish_reason for each in drafted} == {FinishReason.STOP}


def test_any_object_and_its_white_space(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=120, json_object=True) for seed in range(24)]
    found = [each for each in answers(llm, params, SpeculationParams()) if each.finish_reason is FinishReason.STOP]
    assert len(found) > 6
    for each in found:
        assert isinstance(json.loads(each.text), dict)
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    asked = [SamplingParams(temperature=1.0, seed=seed, max_tokens=60, json_schema=schema) for seed in range(16)]
    assert {each.text for each in answers(llm, asked, SpeculationParams())} <= {
        json.dumps([bool(i & 1), bool(i & 2), bool(i & 4)]) for i in range(8)
    }
    spaced = LLM(dtype="float32", max_model_len=1024, json_whitespace="any")
    texts = [each.text for each in answers(spaced, asked, SpeculationParams())]
    assert any(text != json.dumps(json.loads(text)) for text in texts if text.endswith("]"))


def test_it_ends_when_complete_whatever_ends_other_answers(llm: LLM) -> None:
    """Without an end token, before min_tokens, and with max_tokens that it just reaches."""
    whole = answers(llm, [SamplingParams(temperature=0.0, choice=("return value of it",))], NO_DRAFTS)[0]
    exact = len(whole.token_ids)
    for more in ({"ignore_eos": True}, {"min_tokens": exact + 5, "max_tokens": 50}, {"max_tokens": exact}):
        for speculation in (NO_DRAFTS, SpeculationParams()):
            params = SamplingParams(temperature=0.0, choice=("return value of it",), **more)  # type: ignore[arg-type]
            (found,) = answers(llm, [params], speculation)
            assert (found.text, found.finish_reason) == ("return value of it", FinishReason.STOP), more
            assert found.usage.completion_tokens == exact
    cut = answers(
        llm, [SamplingParams(temperature=0.0, choice=("return value of it",), max_tokens=exact - 1)], NO_DRAFTS
    )[0]
    assert cut.finish_reason is FinishReason.LENGTH
    endless = SamplingParams(temperature=1.0, seed=1, regex="a*", ignore_eos=True, max_tokens=30)
    (found,) = answers(llm, [endless], SpeculationParams())
    assert found.finish_reason is FinishReason.LENGTH
    assert set(found.text) == {"a"}


def test_forced_tokens_are_drafts_that_are_always_accepted(llm: LLM) -> None:
    names = ["first_of_all", "second_of_all"]
    schema = {"properties": {name: {"type": "boolean"} for name in names}, "required": names}
    schema |= {"type": "object", "additionalProperties": False}
    params = SamplingParams(temperature=1.3, seed=3, max_tokens=100, json_schema=schema)
    (found,) = answers(llm, [params], SpeculationParams(drafter="reference", draft_scope="request"))
    assert found.usage.draft_tokens == found.usage.accepted_draft_tokens >= 0.6 * found.usage.completion_tokens
    (plain,) = answers(llm, [params], NO_DRAFTS)
    assert key(found) == key(plain)
    assert plain.usage.draft_tokens == 0


def test_samples_of_one_prompt_follow_it_each(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=6, max_tokens=60, regex="[a-z]{3,9} [0-9]{1,4}[.]")
    (found,) = answers(llm, [params], SpeculationParams())
    assert len({each.text for each in found.samples}) > 3
    assert all(re.fullmatch(r"[a-z]{3,9} [0-9]{1,4}\.", each.text) for each in found.samples)


def test_log_probabilities_and_other_parameters_go_with_it(llm: LLM) -> None:
    given = {"json_schema": {"type": "array", "items": {"enum": ["aa", "ab", "ba"]}, "maxItems": 9}, "logprobs": 3}
    more = {"presence_penalty": 1.5, "logit_bias": {5: 3.0}, "top_k": 20, "temperature": 0.9, "max_tokens": 80}
    params = [SamplingParams(seed=seed, **given, **more) for seed in range(6)]  # type: ignore[arg-type]
    drafted, plain = answers(llm, params, SpeculationParams()), answers(llm, params, NO_DRAFTS)
    assert [key(each) for each in drafted] == [key(each) for each in plain]
    assert [each.logprobs for each in drafted] == [each.logprobs for each in plain]


@pytest.mark.parametrize(
    ("given", "field", "bound"),
    [
        ({"json_schema": {"patternProperties": {}}}, "json_schema[#/patternProperties]", "absent"),
        ({"json_schema": {"type": "object", "properties": 5}}, "json_schema", "one that can be followed"),
        ({"json_schema": {1, 2}}, "json_schema", "text"),
        ({"json_schema": {"const": {1, 2}}}, "json_schema", "what JSON can hold"),
        ({"json_schema": {"const": float("nan")}}, "json_schema", "what JSON can hold"),
        ({"json_object": "yes"}, "json_object", "True or False"),
        ({"regex": ""}, "regex", "text"),
        ({"regex": "\ud800"}, "regex", "UTF-8"),
        ({"regex": "a" * 65537}, "regex", "at most 65536 bytes"),
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"ebnf": "root ::= x"}, "ebnf", "Rule 'x' not found"),
        ({"choice": ("a", "")}, "choice[1]", "1..1024 characters"),
        ({"choice": ("a",) * 257}, "choice", "at most 256 strings"),
        ({"choice": ("a",), "regex": "b"}, "choice", "unset, as regex is set"),
    ],
)
def test_what_is_refused(given: dict[str, Any], field: str, bound: str, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        answers(llm, [SamplingParams(temperature=0.0, **given)], NO_DRAFTS)
    assert caught.value.field == field
    assert bound in caught.value.bound


def test_a_model_without_a_tokenizer_refuses_it(tiny_model: dict[str, Any]) -> None:
    llm = LLM(str(tiny_model["llama"]), dtype="float32")
    with pytest.raises(InvalidRequestError, match=r"json_object = True: must be .*has no tokenizer"):
        llm.generate([[5, 6]], SamplingParams(json_object=True), show_progress=False)


@pytest.mark.faults
async def test_a_grammar_that_fails_midway_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await AsyncEngine.start(EngineConfig(dtype="float32", max_model_len=512))
    try:
        plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        expected = (await engine.generate(PROMPT, plain)).token_ids
        for bad in (
            {"regex": r"(\p{L}{1,500}){1,500}", "seed": 1},  # too complex
            {"ebnf": 'start: e\ne: e e e | e e | "a" | ""', "ignore_eos": True},  # takes ever longer
        ):
            asked = SamplingParams(temperature=1.0, max_tokens=400, **bad)  # type: ignore[arg-type]
            calls = engine.generate(PROMPT, asked), engine.generate(PROMPT, plain)
            failed, other = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(failed, GrammarError)
            assert failed.reason == "INVALID_GRAMMAR"
            assert isinstance(other, RequestOutput)
            assert other.token_ids == expected

        def wrong(own: GrammarState, token_ids: list[int]) -> None:
            raise GrammarError("on purpose")

        monkeypatch.setattr(state_module.GrammarState, "accept", wrong)
        with pytest.raises(GrammarError, match="on purpose"):
            await engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=20, regex="[a-z]+"))
        assert (await engine.generate(PROMPT, plain)).token_ids == expected
    finally:
        await engine.shutdown()


async def test_requests_wait_for_no_grammar_but_their_own() -> None:
    """Schemas that take seconds to refuse; known grammars beside them, deadlines, and calls that are taken back."""
    engine = await AsyncEngine.start(EngineConfig(dtype="float32", max_model_len=512))
    try:
        await engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=4, regex="[a-z]+"))
        slow = {"type": "integer", "multipleOf": 999983}
        refused = asyncio.create_task(engine.generate(PROMPT, SamplingParams(json_schema=slow)))
        await asyncio.sleep(0.05)
        await engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8))
        assert (await engine.generate(PROMPT, SamplingParams(max_tokens=4, regex="[a-z]+"))).token_ids
        with pytest.raises(DeadlineExceededError):
            await engine.generate(PROMPT, SamplingParams(regex="[0-9]+"), deadline_s=0.1)
        assert not refused.done()
        with pytest.raises(BatchserveError, match=r"to compile"):
            await refused
        for length in range(8):
            task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(regex=f"[a-z]{{{length + 20}}}")))
            await asyncio.sleep(0.002 * length)
            task.cancel()
        assert (await engine.generate(PROMPT, SamplingParams(choice=("a",)))).text == "a"
    finally:
        await engine.shutdown()
    assert engine._processor.grammars._process is None
