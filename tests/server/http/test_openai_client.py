"""The unmodified OpenAI client against the server: what it gets is what gRPC gives for the same request."""

from __future__ import annotations

import asyncio
import json
import math
import runpy
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from batchserve.v1 import generation_pb2 as pb
from tests.server.harness import Served, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "Convert this record to JSON.\nname: alpha beta\ncount: 7012"
MESSAGES: list[Any] = [{"role": "user", "content": TEXT}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


async def over_grpc(served: Served, prompt: str | None = None, **stop: Any) -> pb.GenerateResponse:
    request = pb.GenerateRequest(
        text=prompt,
        chat=None if prompt else pb.Chat(messages=[pb.ChatMessage(role="user", text=TEXT)]),
        stop=pb.StopConditions(**{"max_tokens": 60, **stop}),
        output=pb.OutputOptions(logprobs=2),
    )
    return await served.client.generate(request)


async def ask(client: openai.AsyncOpenAI, **more: Any) -> Any:
    return await client.chat.completions.create(**{"model": "bundled", "messages": MESSAGES, "max_tokens": 60, **more})


async def test_a_chat_whole_and_as_a_stream(served: Served, client: openai.AsyncOpenAI):
    expected = await over_grpc(served)
    whole = await ask(client, extra_body={"return_token_ids": True})
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected.text, "stop")
    assert choice.token_ids == list(expected.token_ids)
    assert whole.model == "bundled"
    assert whole.object == "chat.completion"
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens == expected.usage.prompt_tokens
    assert whole.usage.completion_tokens == len(expected.token_ids)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    chunks = [chunk async for chunk in await ask(client, stream=True, stream_options={"include_usage": True})]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "stop"]
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], len(expected.token_ids))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) < len(expected.token_ids)  # a step with accepted drafts is one chunk

    always = {"continuous_usage_stats": True}
    chunks = [chunk async for chunk in await ask(client, stream=True, extra_body={"stream_options": always})]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(expected.token_ids)


async def test_log_probabilities(served: Served, client: openai.AsyncOpenAI):
    expected = await over_grpc(served)
    whole = await ask(client, logprobs=True, top_logprobs=2)
    content = whole.choices[0].logprobs.content
    streamed = [chunk async for chunk in await ask(client, logprobs=True, top_logprobs=2, stream=True)]
    pieces = [
        each
        for chunk in streamed
        if chunk.choices and chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content
    ]
    assert pieces == content
    assert b"".join(bytes(each.bytes) for each in content).decode() == expected.text
    for each, theirs in zip(content, expected.logprobs, strict=True):
        assert math.isclose(each.logprob, theirs.logprob, abs_tol=1e-6)
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(list(theirs.top_logprobs), abs=1e-6)
        assert each.token == each.top_logprobs[0].token
    assert (await ask(client)).choices[0].logprobs is None
    shown = await ask(client, logprobs=True, extra_body={"return_tokens_as_token_ids": True})
    ids = [each.token for each in shown.choices[0].logprobs.content]
    assert ids == [f"token_id:{token_id}" for token_id in expected.token_ids]


async def test_sampling_stops_and_samples(served: Served, client: openai.AsyncOpenAI):
    drawn = {"temperature": 4.0, "seed": 7, "top_p": 0.95}
    several = await ask(client, n=3, **drawn)
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts[1] == (await ask(client, **{**drawn, "seed": 8})).choices[0].message.content
    streamed: dict[int, str] = {}
    async for chunk in await ask(client, n=3, stream=True, **drawn):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[i] for i in range(3)] == texts

    whole = (await over_grpc(served)).text
    stopped = await ask(client, stop=[whole[8:11]])
    assert stopped.choices[0].message.content == whole[: whole.index(whole[8:11])]
    assert stopped.choices[0].stop_reason == whole[8:11]
    cut = await ask(client, max_tokens=openai.omit, max_completion_tokens=3)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)
    first = (await over_grpc(served)).token_ids[0]
    banned = await ask(client, logit_bias={str(first): -100}, extra_body={"return_token_ids": True, "top_k": -1})
    assert banned.choices[0].token_ids[0] != first
    longer = await ask(client, presence_penalty=2.0, frequency_penalty=2.0, extra_body={"min_tokens": 50})
    assert longer.usage.completion_tokens >= 50
    ignored = {"user": "x", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    same = await ask(client, prompt_cache_key="k", **ignored)
    assert same.choices[0].message.content == whole


class Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str
    count: int


async def test_structured_answers(client: openai.AsyncOpenAI):
    asked: Any = {"model": "bundled", "messages": MESSAGES, "response_format": Record, "max_tokens": 60}
    parsed = await client.chat.completions.parse(**asked)
    assert parsed.choices[0].message.parsed == Record(name="alpha beta", count=7012)
    answer = await ask(client, response_format={"type": "json_object"}, max_tokens=200)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    for extra in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        chosen = await ask(client, extra_body=extra)
        assert chosen.choices[0].message.content in ("yes", "no")
    async with client.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_completion()).choices[0].message.parsed.count == 7012


async def test_tools_that_must_be_called_always_parse(client: openai.AsyncOpenAI):
    for seed in range(6):
        drawn = {"temperature": 2.0, "seed": seed, "tools": TOOLS, "max_tokens": 300}
        named = (await ask(client, tool_choice=NAMED, **drawn)).choices[0]
        (call,) = named.message.tool_calls
        assert (call.type, call.function.name, named.finish_reason) == ("function", "weather", "stop")
        assert 1 <= json.loads(call.function.arguments)["days"] <= 9
        required = (await ask(client, tool_choice="required", parallel_tool_calls=seed % 2 == 0, **drawn)).choices[0]
        calls = required.message.tool_calls
        assert required.finish_reason in ("tool_calls", "length")
        assert len(calls) == 1 or seed % 2 == 0
        assert len({call.id for call in calls}) == len(calls)
        for call in calls[:-1] if required.finish_reason == "length" else calls:
            arguments = json.loads(call.function.arguments)
            assert arguments == {} or call.function.name != "clock" or isinstance(arguments, dict)
            assert call.function.name in ("weather", "clock")


async def test_arguments_are_an_object_also_where_the_schema_does_not_say_so(client: openai.AsyncOpenAI):
    for parameters in ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"description": "x"}, {}, None):
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        for seed, choice in ((1, "required"), (2, {"type": "function", "function": {"name": "f"}})):
            asked = {"tools": [tool], "tool_choice": choice, "temperature": 2.0, "seed": seed, "max_tokens": 1500}
            answer = (await ask(client, parallel_tool_calls=False, **asked)).choices[0]
            if answer.finish_reason != "length":
                (call,) = answer.message.tool_calls
                assert isinstance(json.loads(call.function.arguments), dict)
            assert not answer.message.content


async def test_tools_in_a_stream(client: openai.AsyncOpenAI):
    for choice in (NAMED, "required"):
        options = {"tools": TOOLS, "tool_choice": choice, "temperature": 1.0, "seed": 3, "max_tokens": 300}
        whole = (await ask(client, parallel_tool_calls=False, **options)).choices[0]
        calls: dict[int, list[str]] = {}
        async for chunk in await ask(client, parallel_tool_calls=False, stream=True, **options):
            for call in chunk.choices[0].delta.tool_calls or ():
                found = calls.setdefault(call.index, ["", ""])
                found[0] += call.function.name or ""
                found[1] += call.function.arguments or ""
            finish_reason = chunk.choices[0].finish_reason
        expected = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls]
        assert [*calls.values()] == expected
        assert finish_reason == whole.finish_reason


async def test_tools_that_may_be_called(served: Served, client: openai.AsyncOpenAI):
    none = await ask(client, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == (await over_grpc(served)).text
    assert none.choices[0].message.tool_calls is None
    auto = await ask(client, tools=TOOLS)  # the bundled model has never seen tools: it answers, or calls
    assert auto.usage.prompt_tokens > none.usage.prompt_tokens + 50  # it is told of them
    # A chat goes on with what a tool has said.
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    turns = [{"role": "assistant", "content": "so", "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "12:30", "tool_call_id": "abcdefghi"}]
    assert (await ask(client, messages=[*MESSAGES, *turns])).choices[0].message.content is not None


async def test_a_prediction_is_counted_and_changes_nothing(served: Served, client: openai.AsyncOpenAI):
    whole = (await over_grpc(served)).text
    good = await ask(client, prediction={"type": "content", "content": whole})
    parts: Any = {"type": "content", "content": [{"type": "text", "text": "Nothing of the kind, whatever it says."}]}
    bad = await ask(client, prediction=parts)
    assert good.choices[0].message.content == bad.choices[0].message.content == whole
    details = good.usage.completion_tokens_details
    assert details.accepted_prediction_tokens >= 0.9 * good.usage.completion_tokens
    assert details.rejected_prediction_tokens <= 2
    assert details.accepted_draft_tokens > 0
    details = bad.usage.completion_tokens_details
    assert details.accepted_prediction_tokens <= 1
    assert details.rejected_prediction_tokens >= 5
    assert (await ask(client)).usage.completion_tokens_details.accepted_prediction_tokens is None


async def test_completions(served: Served, client: openai.AsyncOpenAI):
    prompts = ["def add(a, b):\n", "import os\n"]
    expected = [(await over_grpc(served, prompt, max_tokens=12)).text for prompt in prompts]
    asked: dict[str, Any] = {"model": "bundled", "max_tokens": 12}
    whole = await client.completions.create(prompt=prompts, **asked)
    assert [choice.text for choice in whole.choices] == expected
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 24
    streamed = ["", ""]
    async for chunk in await client.completions.create(prompt=prompts, stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected
    ids = await served.engine.tokenize(prompts[0])
    by_ids = await client.completions.create(prompt=ids, **asked)
    assert by_ids.choices[0].text == expected[0]
    assert (
        len((await client.completions.create(prompt="x", model="bundled", logprobs=0)).choices[0].logprobs.tokens) <= 16
    )
    # What evaluation harnesses ask: the log probabilities of the prompt.
    scored = await client.completions.create(prompt=prompts[0], echo=True, logprobs=2, **asked)
    (choice,) = scored.choices
    assert choice.text == prompts[0] + expected[0]
    found = choice.logprobs
    assert (
        len(found.tokens)
        == len(found.token_logprobs)
        == len(found.top_logprobs)
        == len(ids) + scored.usage.completion_tokens
    )
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    shown = [token for token in found.tokens if token not in ("<s>", "<|assistant|>")]  # special ones are skipped
    assert "".join(shown) == choice.text
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text[offset:].startswith(token) or token not in shown
    assert all(max(top, key=top.get) in top for top in found.top_logprobs[1:])


async def test_responses(served: Served, client: openai.AsyncOpenAI):
    expected = (await over_grpc(served)).text
    whole = await client.responses.create(model="bundled", input=TEXT, max_output_tokens=60)
    assert (whole.output_text, whole.status, whole.output[0].type) == (expected, "completed", "message")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]
    async with client.responses.stream(model="bundled", input=items, max_output_tokens=60) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == expected
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    ]
    assert kinds[-1] == "response.completed"
    parsed = await client.responses.parse(model="bundled", input=TEXT, text_format=Record, max_output_tokens=60)
    assert parsed.output_parsed == Record(name="alpha beta", count=7012)
    cut = await client.responses.create(model="bundled", input=TEXT, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    flat: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    called = await client.responses.create(
        model="bundled", input=TEXT, tools=[flat], tool_choice={"type": "function", "name": "weather"}
    )
    (item,) = called.output
    assert (item.type, item.name) == ("function_call", "weather")
    assert json.loads(item.arguments)["days"] in range(1, 10)
    again: Any = [*items, item.to_dict(), {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}]
    assert (await client.responses.create(model="bundled", input=again, instructions="Be short.")).output_text


async def test_models_and_errors(client: openai.AsyncOpenAI):
    (model,) = (await client.models.list()).data
    assert (model.id, model.owned_by) == ("bundled", "batchserve")
    assert (await client.models.retrieve("bundled")).id == "bundled"
    with pytest.raises(openai.NotFoundError, match=r"other.*the model being served is 'bundled'") as missing:
        await ask(client, model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match=r"temperature = -1\.0: must be finite and >= 0") as bad:
        await ask(client, temperature=-1)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        *("temperature", "invalid_temperature"),
        "invalid_request_error",
    )
    with pytest.raises(openai.BadRequestError) as long:
        await ask(client, messages=[{"role": "user", "content": "word " * 5000}])
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    endless = {"extra_body": {"request_id": "same", "ignore_eos": True}, "max_tokens": 2000}
    with pytest.raises(openai.ConflictError):
        await asyncio.gather(*(ask(client, **endless) for _ in range(2)))


@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_client_that_goes_away_frees_its_request(served: Served, client: openai.AsyncOpenAI, is_whole: bool):
    endless = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    if is_whole:
        asking = asyncio.create_task(ask(client, **endless))
        await until(lambda: served.engine.num_in_flight == 1, 60)
        asking.cancel()
    else:
        stream = await ask(client, stream=True, **endless)
        await anext(aiter(stream))
        assert served.engine.num_in_flight == 1
        await stream.close()
    await until(lambda: served.engine.num_in_flight == 0, 60)
    await until(lambda: served.engine.metrics.reading().load["requests_running"] == 0, 60)


async def test_the_documentation_s_client(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    example = Path(__file__).parents[3] / "docs" / "examples" / "openai_client.py"
    monkeypatch.setattr("sys.argv", [str(example), f"{served.url}/v1"])
    await asyncio.to_thread(runpy.run_path, str(example), run_name="__main__")
    shown = capsys.readouterr().out
    assert '"name": "socket reader"' in shown
    assert "parsed: Record(name='socket reader', count=7012)" in shown
    assert int(shown.split(" tokens of the prediction")[0].split()[-1]) > 10
    assert "top_p: invalid_top_p" in shown
