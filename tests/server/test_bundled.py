"""The service with the bundled model: text in, text out."""

from __future__ import annotations

import asyncio
import itertools
import re
import runpy
from pathlib import Path
from typing import Any

import grpc
import pytest

from batchserve.v1 import generation_pb2 as pb
from tests.server.harness import Served, failure_of, tokens_of

PROMPT = "<|user|>Convert this record to JSON.\nname: alpha beta\ncount: 7012<|assistant|>"


def _ask(text: str, **stop: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=text,
        sampling_params=pb.SamplingParams(temperature=0),
        stop=pb.StopConditions(**{"max_tokens": 40, **stop}),
    )


async def test_text_streams_and_adds_up(bundled: Served):
    whole = await bundled.client.generate(_ask(PROMPT))
    messages = await bundled.client.stream(_ask(PROMPT))
    assert "".join(message.delta.text for message in messages) == whole.text
    assert tokens_of(messages) == list(whole.token_ids)
    assert messages[0].started.prompt_tokens == whole.usage.prompt_tokens
    assert whole.text.startswith("{")


async def test_the_documentation_s_client(bundled: Served, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    client = Path(__file__).parents[2] / "docs" / "examples" / "grpc_client.py"
    monkeypatch.setattr("sys.argv", [str(client), bundled.address])

    def run() -> None:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(client), run_name="__main__")
        assert not ended.value.code

    await asyncio.to_thread(run)
    shown = capsys.readouterr().out
    assert shown.startswith("name: socket reader")
    assert " tokens, " in shown
    assert "INVALID_ARGUMENT: " in shown
    assert "INVALID_TOP_P: {'bound': 'in (0, 1]', 'field': 'sampling_params.top_p', 'value': '1.5'}" in shown


async def test_a_stop_string_ends_the_answer_before_it(bundled: Served):
    whole = (await bundled.client.generate(_ask(PROMPT))).text
    stop = whole[8:11]
    stopped = await bundled.client.generate(_ask(PROMPT, stop_strings=[stop]))
    streamed = await bundled.client.stream(_ask(PROMPT, stop_strings=[stop]))
    assert stopped.text == whole[: whole.index(stop)]
    assert "".join(message.delta.text for message in streamed) == stopped.text
    assert stopped.finish_reason == pb.FINISH_REASON_STOP
    assert stopped.usage.completion_tokens == len(stopped.token_ids)
    assert stopped.stop_reason.stop_string == streamed[-1].finished.stop_reason.stop_string == stop
    request = _ask(PROMPT, stop_strings=[stop])
    request.output.include_stop_str_in_output = True
    echoed = _ask(PROMPT, stop_strings=[stop])
    echoed.output.echo = True
    said = PROMPT.removeprefix("<|user|>").removesuffix("<|assistant|>")
    assert (await bundled.client.generate(echoed)).text == said + stopped.text
    assert (await bundled.client.generate(request)).text == stopped.text + stop


async def test_bad_texts_are_refused_and_the_rest_of_the_batch_is_unharmed(bundled: Served):
    alone = await bundled.client.generate(_ask(PROMPT))
    beside = asyncio.gather(*(bundled.client.generate(_ask(PROMPT)) for _ in range(4)))
    for text, reason, part in (
        ("", "EMPTY_PROMPT", "at least one character"),
        ("count " * 5000, "PROMPT_TOO_LONG", "at most 4095 tokens"),
        ("x y" * (5_000_000 // 3), "PROMPT_TOO_LONG", "at most 4095 tokens"),
    ):
        failed = await failure_of(bundled.client.stream(_ask(text)))
        assert (failed.code, failed.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        assert failed.field == "text"
        assert part in failed.message
        assert len(failed.message) < 300
    assert {answer.text for answer in await beside} == {alone.text}


async def test_any_text_is_a_prompt(bundled: Served):
    texts = ["\0", "\N{GRINNING FACE}" * 50, "</s>", "<|user|>" * 5, "\u202e\ufeff", " " * 1000, "a\r\n\tb"]
    answers = await asyncio.gather(*(bundled.client.generate(_ask(text, max_tokens=5)) for text in texts))
    assert all(len(answer.token_ids) <= 5 for answer in answers)


async def test_what_a_request_says_of_drafts_takes_effect_and_changes_no_answer(bundled: Served):
    """Over the wire: a drafter of its own, a text to quote, a scope to share."""

    async def steps(drafter: str = "mixture", scope: str = "request", **fields: object) -> int:
        request = _ask(PROMPT)
        options = pb.SpeculationOptions(drafter=drafter)
        request.MergeFrom(pb.GenerateRequest(draft_scope=scope, speculation=options, **fields))
        answer = await bundled.client.generate(request)
        assert answer.text == plain.text
        return answer.usage.completion_tokens - answer.usage.accepted_draft_tokens

    plain = await bundled.client.generate(_ask(PROMPT))
    as_text = [pb.Reference(text="unrelated"), pb.Reference(text=plain.text)]
    as_ids = [pb.Reference(token_ids=pb.TokenIds(ids=plain.token_ids))]
    assert await steps("none", references=as_text) == plain.usage.completion_tokens
    alone = await steps()
    assert await steps(references=as_text) < alone
    assert await steps(references=as_ids) < alone
    assert await steps(scope="mine") == alone
    assert await steps(scope="mine") < alone  # its own answer
    assert await steps(scope="other") == alone
    await bundled.engine.clear_draft_scope("mine")
    assert await steps(scope="mine") == alone


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (pb.StructuredOutput(json_schema='{"enum": ["alpha", 7012]}'), '"alpha"|7012'),
        (pb.StructuredOutput(json_object=True), r"\{.*\}"),
        (pb.StructuredOutput(json_object=False), ".*"),
        (pb.StructuredOutput(regex="[a-z]{3} [0-9]{2}"), "[a-z]{3} [0-9]{2}"),
        (pb.StructuredOutput(ebnf='root ::= "yes" | "no"'), "yes|no"),
        (pb.StructuredOutput(choice=pb.Choices(texts=["alpha", "beta"])), "alpha|beta"),
    ],
    ids=str,
)
async def test_structured_output(grammar: pb.StructuredOutput, pattern: str, bundled: Served):
    request = _ask(PROMPT)
    request.structured_output.CopyFrom(grammar)
    whole = await bundled.client.generate(request)
    assert re.fullmatch(pattern, whole.text, re.DOTALL), whole.text
    assert tokens_of(await bundled.client.stream(request)) == list(whole.token_ids)


@pytest.mark.parametrize(
    ("grammar", "reason", "path", "bound"),
    [
        (
            pb.StructuredOutput(json_schema='{"items": {"uniqueItems": true}}'),
            *("UNSUPPORTED_KEYWORD", "structured_output.json_schema[#/items/uniqueItems]", "absent: uniqueItems"),
        ),
        (
            pb.StructuredOutput(json_schema='{"type": "integer", "multipleOf": 999983}'),
            *("INVALID_JSON_SCHEMA", "structured_output.json_schema", "to compile"),
        ),
        (pb.StructuredOutput(regex="(a"), "INVALID_REGEX", "structured_output.regex", "unclosed group"),
        (pb.StructuredOutput(ebnf="root ::= b"), "INVALID_EBNF", "structured_output.ebnf", "Rule 'b' not found"),
        (
            pb.StructuredOutput(choice=pb.Choices()),
            *("INVALID_CHOICES", "structured_output.choice.texts", "at least one text"),
        ),
    ],
    ids=str,
)
async def test_grammars_that_are_refused(
    grammar: pb.StructuredOutput, reason: str, path: str, bound: str, bundled: Served
):
    beside, request = asyncio.create_task(bundled.client.generate(_ask(PROMPT))), _ask(PROMPT)
    request.structured_output.CopyFrom(grammar)
    failed = await failure_of(bundled.client.generate(request))
    assert (failed.code, failed.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert failed.field == path
    assert bound in failed.message
    assert (await beside).text


@pytest.mark.faults
async def test_a_grammar_that_grows_too_complex_ends_its_call_alone(bundled: Served):
    beside = asyncio.create_task(bundled.client.generate(_ask(PROMPT)))
    request = _ask(PROMPT)
    request.structured_output.regex = r"(\p{L}{1,500}){1,500}"
    failed = await failure_of(bundled.client.generate(request))
    assert (failed.code, failed.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_GRAMMAR")
    assert (await beside).text == (await bundled.client.generate(_ask(PROMPT))).text


async def test_text_offsets_of_tokens(bundled: Served):
    request = _ask(PROMPT)
    request.output.logprobs = 0
    plain = (await bundled.client.generate(request)).text
    for echo in (False, True):
        request.output.echo = echo
        whole = await bundled.client.generate(request)
        offsets = [each.text_offset for each in whole.logprobs]
        assert offsets[0] == len(whole.text) - len(plain)
        pieces = [whole.text[a:b] for a, b in itertools.pairwise([*offsets, len(whole.text)])]
        assert "".join(pieces) == plain
        assert "" not in pieces
        streamed = await bundled.client.stream(request)
        assert [each.text_offset for message in streamed for each in message.delta.logprobs] == offsets


MESSAGE = "Convert this record to JSON.\nname: alpha beta\ncount: 7012"


async def test_a_chat_is_the_prompt_that_its_template_makes(bundled: Served):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", text=MESSAGE)])
    for asked in (chat, pb.Chat(messages=[pb.ChatMessage(role="user", parts=pb.TextParts(texts=MESSAGE.split("\n")))])):
        request = pb.GenerateRequest(chat=asked, sampling_params=pb.SamplingParams(temperature=0))
        request.stop.max_tokens = 40
        found, plain = await bundled.client.generate(request), await bundled.client.generate(_ask(PROMPT))
        assert (found.text, found.usage.prompt_tokens) == (plain.text, plain.usage.prompt_tokens)
    request.chat.CopyFrom(chat)
    begun = plain.text[: plain.text.index(",") + 1]
    request.chat.messages.add(role="assistant", text=begun)
    request.chat.continue_final_message = True
    assert begun + (await bundled.client.generate(request)).text == plain.text


@pytest.mark.parametrize(
    ("chat", "reason", "path", "bound"),
    [
        (pb.Chat(), "EMPTY_PROMPT", "chat.messages", "at least one message"),
        (
            pb.Chat(messages=[pb.ChatMessage(text="x")]),
            *("INVALID_CHAT", "chat.messages[0].role", "the name of a role"),
        ),
        (
            pb.Chat(messages=[pb.ChatMessage(role="user")]),
            *("INVALID_CHAT", "chat.messages[0].content", "a text"),
        ),
        (
            pb.Chat(messages=[pb.ChatMessage(role="user", text="x", extra_fields='{"role": 1}')]),
            *("INVALID_CHAT", "chat.messages[0].extra_fields", "other keys"),
        ),
        (
            pb.Chat(messages=[pb.ChatMessage(role="user", text="x")], tools=["[1]"]),
            *("INVALID_CHAT", "chat.tools[0]", "a JSON object"),
        ),
        (
            pb.Chat(messages=[pb.ChatMessage(role="user", text="x")], tools=['{"a": 1}']),
            *("INVALID_CHAT", "chat.tools", "empty: the model's template uses none"),
        ),
        (
            pb.Chat(messages=[pb.ChatMessage(role="user", text="x")], chat_template_kwargs='{"no": 1}'),
            *("INVALID_CHAT", "chat.chat_template_kwargs[no]", "knows no such variable"),
        ),
        (
            pb.Chat(messages=[pb.ChatMessage(role="user", text="x")] * 1025),
            *("TOO_MANY_MESSAGES", "chat.messages", "at most 1024"),
        ),
        (
            pb.Chat(messages=[pb.ChatMessage(role="user", text="word " * 100_000)]),
            *("PROMPT_TOO_LONG", "chat.messages", "tokens"),
        ),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_chats_that_are_refused(chat: pb.Chat, reason: str, path: str, bound: str, bundled: Served):
    failed = await failure_of(bundled.client.generate(pb.GenerateRequest(chat=chat)))
    assert (failed.code, failed.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert failed.field.startswith(path)
    assert bound in failed.message


async def test_texts_and_token_ids_there_and_back(bundled: Served):
    stub = bundled.client.stub
    plain = await stub.Tokenize(pb.TokenizeRequest(text=PROMPT))
    bare = await stub.Tokenize(pb.TokenizeRequest(text=PROMPT, add_special_tokens=False))
    chat = await stub.Tokenize(pb.TokenizeRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", text=MESSAGE)])))
    answer = await bundled.client.generate(_ask(PROMPT))
    assert list(chat.token_ids) == list(plain.token_ids) == [plain.token_ids[0], *bare.token_ids]
    assert len(plain.token_ids) == answer.usage.prompt_tokens
    assert plain.max_model_len == bundled.engine.info.max_model_len
    for ids in (answer.token_ids, bare.token_ids):
        text = (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text
        assert text == (answer.text if ids is answer.token_ids else PROMPT)
    whole = pb.DetokenizeRequest(token_ids=plain.token_ids, skip_special_tokens=True)
    assert (await stub.Detokenize(whole)).text == PROMPT.removeprefix("<|user|>").removesuffix("<|assistant|>")


@pytest.mark.parametrize(
    ("method", "request_", "reason", "field", "bound"),
    [
        ("Tokenize", pb.TokenizeRequest(), "MISSING_INPUT", "input", "text or chat"),
        ("Tokenize", pb.TokenizeRequest(text=""), "EMPTY_PROMPT", "text", "at least one character"),
        ("Tokenize", pb.TokenizeRequest(text="word " * 1_000_000), "PROMPT_TOO_LONG", "text", "at most"),
        ("Tokenize", pb.TokenizeRequest(chat=pb.Chat()), "EMPTY_PROMPT", "chat.messages", "at least one message"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[5, 4096]), "TOKEN_ID_OUT_OF_RANGE", "token_ids[1]", "0..4095"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[5] * 100_000), "TOO_MANY_TOKEN_IDS", "token_ids", "at most"),
    ],
)
async def test_what_cannot_be_tokenised(
    method: str, request_: Any, reason: str, field: str, bound: str, bundled: Served
):
    failed = await failure_of(getattr(bundled.client.stub, method)(request_))
    assert (failed.code, failed.reason, failed.field) == (grpc.StatusCode.INVALID_ARGUMENT, reason, field)
    assert bound in failed.message


async def test_stats_are_those_of_the_engine(bundled: Served):
    before = await bundled.client.stub.GetStats(pb.GetStatsRequest())
    answer = await bundled.client.generate(_ask(PROMPT))
    after = await bundled.client.stub.GetStats(pb.GetStatsRequest())
    assert (after.requests_running, after.requests_waiting, after.kv_used_tokens) == (0, 0, 0)
    assert after.kv_total_tokens > 0
    given = after.counters["completion_tokens_total"] - before.counters["completion_tokens_total"]
    assert given == answer.usage.completion_tokens
    tested = after.drafters["mixture"]
    assert len(tested.depths) == len(tested.tested) == len(tested.accepted)
    assert 0 < sum(tested.accepted) <= sum(tested.tested)
