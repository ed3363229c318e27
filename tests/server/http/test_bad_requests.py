"""What HTTP requests may not say: each refusal names the field, its value and the bound, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from batchserve.server.http import call, limits
from tests.server.harness import Served, until
from tests.server.http.raw import post, request, send

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.faults]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
COMPLETION: dict[str, Any] = {"prompt": "x", "max_tokens": 4}
RESPONSE: dict[str, Any] = {"input": "x", "max_output_tokens": 16}
F: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
OBJECT = {"type": "object"}


def said(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def with_schema(**schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


PARAMETERS = "tools[0].function.parameters"
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat", {"foo": 1}, "foo", "absent: it is not known"),
    ("chat", {"functions": []}, "functions", "absent"),
    ("chat", {"stream": "yes"}, "stream", "true or false"),
    ("chat", {"temperature": "hot"}, "temperature", "number"),
    ("chat", {"temperature": True}, "temperature", "number"),
    ("chat", {"top_p": 0}, "top_p", "(0, 1]"),
    ("chat", {"top_k": -2}, "top_k", ">= 0"),
    ("chat", {"top_k": 10**9}, "top_k", "vocabulary"),
    ("chat", {"seed": -1}, "seed", "in 0.."),
    ("chat", {"n": 0}, "n", "1..64"),
    ("chat", {"n": 2}, "n", "1 at temperature 0"),
    ("chat", {"n": 64, "temperature": 1, "seed": 1.5}, "seed", "integer"),
    ("chat", {"max_tokens": 0}, "max_tokens", ">= 1"),
    ("chat", {"max_tokens": 5000}, "max_tokens", "at most"),
    ("chat", {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", ">= 1"),
    ("chat", {"max_completion_tokens": 5}, "max_tokens", "the same as max_completion_tokens"),
    ("chat", {"stop": [1]}, "stop[0]", "a string"),
    ("chat", {"stop": [""]}, "stop[0]", "1..1024 characters"),
    ("chat", {"logprobs": 3}, "logprobs", "true or false"),
    ("chat", {"top_logprobs": 3}, "top_logprobs", "unless logprobs is true"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0..20"),
    ("chat", {"logit_bias": {"a": 1}}, "logit_bias", "token ids as keys"),
    ("chat", {"logit_bias": {"1": 101}}, "logit_bias", "-100"),
    ("chat", {"logit_bias": []}, "logit_bias", "an object"),
    ("chat", {"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
    ("chat", {"store": True}, "store", "false"),
    ("chat", {"modalities": ["audio"]}, "modalities", "text"),
    ("chat", {"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
    ("chat", {"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "not known"),
    ("chat", {"response_format": {"type": "xml"}}, "response_format.type", "one of"),
    ("chat", {"response_format": {}}, "response_format.type", "one of"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
    (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}},
        "response_format.json_schema.schema",
        "can be followed",
    ),
    ("chat", {"guided_regex": "("}, "guided_regex", "can be followed"),
    ("chat", {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "unset, as regex is set"),
    ("chat", {"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag", "not known"),
    ("chat", {"messages": []}, "messages", "at least one"),
    ("chat", {"messages": "x"}, "messages", "a list"),
    ("chat", {"messages": [{"content": "x"}]}, "messages[0].role", "role"),
    (
        "chat",
        {"messages": [said([{"type": "image_url"}])]},
        "messages[0].content[0].type",
        "text",
    ),
    ("chat", {"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs[tools]", "absent"),
    ("chat", {"tools": [{}]}, "tools[0].type", "function"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters"),
    ("chat", {"tools": [{**F, "x": 1}]}, "tools[0].x", "not known"),
    ("chat", {"tools": [F, F]}, "tools", "different names"),
    ("chat", {"tools": [F] * 129}, "tools", "at most 128"),
    ("chat", {"tool_choice": "required"}, "tool_choice", "no tools"),
    ("chat", {"tools": [F], "tool_choice": "maybe"}, "tool_choice", "one of"),
    ("chat", {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "one of"),
    (
        "chat",
        {"tools": [F], "tool_choice": "required", "guided_regex": "a"},
        "guided_regex",
        "absent, as tool_choice is required",
    ),
    ("chat", {"tools": [with_schema(type="string")], "tool_choice": "required"}, PARAMETERS + ".type", "'object'"),
    ("chat", {"tools": [with_schema(const=5)], "tool_choice": "required"}, PARAMETERS + ".const", "absent"),
    ("chat", {"tools": [F], "tool_choice": "required", "stop": ["a"]}, "stop", "absent, as tool_choice is required"),
    ("chat", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "absent, as stream is true"),
    ("chat", {"priority": -1001}, "priority", "1000"),
    ("chat", {"logit_bias": {" 5": 1}}, "logit_bias", "token ids as keys"),
    ("chat", {"request_id": "a\ud800"}, "request_id", "UTF-8"),
    ("chat", {"tools": [F], "response_format": {"type": "json_object"}}, "response_format", "tool_choice is none"),
    ("chat", {"prediction": {"type": "content", "content": 1}}, "prediction.content", "text"),
    ("chat", {"prediction": {"type": "image"}}, "prediction.type", "content"),
    ("chat", {"prediction": {"type": "content", "content": "word " * 5000}}, "prediction.content", "at most"),
    ("chat", {"priority": 1001}, "priority", "1000"),
    ("chat", {"references": [1]}, "references[0]", "a list"),
    ("chat", {"draft_scope": "x" * 300}, "draft_scope", "256"),
    ("chat", {"cache_salt": "a", "draft_scope": "b"}, "cache_salt", "draft_scope is set"),
    ("chat", {"speculation": {"drafter": "magic"}}, "speculation.drafter", "one of"),
    ("chat", {"speculation": {"mode": 1}}, "speculation.mode", "not known"),
    ("chat", {"deadline_s": "soon"}, "deadline_s", "seconds"),
    ("chat", {"request_id": "a" * 300}, "request_id", "256"),
    ("chat", {"stop": {"a": 1}}, "stop", "a list of strings"),
    ("chat", {"bad_words": {"a": 1}}, "bad_words", "a list"),
    ("chat", {"stop_token_ids": {}}, "stop_token_ids", "a list"),
    ("chat", {"allowed_token_ids": "x"}, "allowed_token_ids", "a list"),
    ("chat", {"references": {"a": 1}}, "references", "a list"),
    ("chat", {"guided_choice": []}, "guided_choice", "at least one text"),
    ("chat", {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one text"),
    ("chat", {"structured_outputs": {"choice": {"a": 1}}}, "structured_outputs.choice", "at least one text"),
    ("chat", {"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    (
        "chat",
        {"prediction": {"type": "content", "content": [{"type": "text", "text": 5}]}},
        "prediction.content",
        "text",
    ),
    ("chat", {"store": 0}, "store", "false"),
    ("completion", {"best_of": True}, "best_of", "must be 1 or absent"),
    ("response", {"prompt_logprobs": 1}, "prompt_logprobs", "absent"),
    ("response", {"return_token_ids": True}, "return_token_ids", "false or absent"),
    ("response", {"chat_template_kwargs": 0}, "chat_template_kwargs", "an object"),
    ("completion", {"prompt": None}, "prompt", "a text"),
    ("completion", {"prompt": ""}, "prompt", "at least one"),
    ("completion", {"prompt": [None]}, "prompt[0]", "token ids"),
    ("completion", {"prompt": [1, "a"]}, "prompt", "integers"),
    ("completion", {"prompt": [10**9]}, "prompt[0]", "in 0.."),
    ("completion", {"prompt": ["x"] * 129}, "prompt", "128"),
    ("completion", {"suffix": "x"}, "suffix", "absent"),
    ("completion", {"best_of": 3}, "best_of", "absent"),
    ("completion", {"logprobs": 21}, "logprobs", "0..20"),
    ("completion", {"messages": []}, "messages", "not known"),
    ("response", {"input": 1}, "input", "list of items"),
    ("response", {"input": [{"type": "item_reference"}]}, "input[0].type", "function_call"),
    (
        "response",
        {"input": [said([{"type": "input_image"}])]},
        "input[0].content[0].type",
        "one",
    ),
    ("response", {"previous_response_id": "resp_1"}, "previous_response_id", "must be absent"),
    ("response", {"store": True}, "store", "false"),
    ("response", {"n": 2}, "n", "one answer"),
    ("response", {"include": ["file_search_call.results"]}, "include[0]", "logprobs"),
    ("response", {"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
    ("response", {"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
    ("tokens", {"prompt": "x", "messages": []}, "prompt", "not both"),
    ("tokens", {}, "prompt", "not both"),
    ("tokens", {"prompt": 1}, "prompt", "a string"),
    ("tokens", {"messages": [said("x")], "add_special_tokens": True}, "add_special_tokens", "absent"),
    ("text", {"token_ids": [1]}, "token_ids", "not known"),
    ("text", {"tokens": [1.5]}, "tokens", "integers"),
    ("text", {"tokens": [-1]}, "tokens[0]", "in 0.."),
    ("text", {"tokens": [1] * 5000}, "tokens", "4096"),
]
ROUTES = {
    "chat": ("/v1/chat/completions", CHAT),
    "completion": ("/v1/completions", COMPLETION),
    "response": ("/v1/responses", RESPONSE),
    "tokens": ("/tokenize", {}),
    "text": ("/detokenize", {}),
}


async def test_each_bad_field_is_refused_by_its_name_while_others_are_served(served: Served):
    text = (await post(served.url, "/v1/chat/completions", {**CHAT, "max_tokens": 60})).json["choices"]
    stream = asyncio.create_task(
        post(served.url, "/v1/completions", {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True})
    )
    await until(lambda: served.engine.num_in_flight == 1)
    for route, fields, param, bound in BAD:
        path, sound = ROUTES[route]
        answer = await post(served.url, path, {**sound, **fields})
        what = (route, fields, answer.body[:300])
        assert answer.status == 400, what
        assert answer.headers["content-type"] == "application/json", what
        assert answer.error["param"] == param, what
        assert answer.error["type"] == "invalid_request_error", what
        assert answer.error["code"] == answer.error["code"].lower() != "", what
        assert bound in answer.error["message"], what
        assert param in answer.error["message"], what
    assert (await post(served.url, "/v1/chat/completions", {**CHAT, "max_tokens": 60})).json["choices"] == text
    *events, done = (await stream).events
    assert done == "[DONE]"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "a JSON object"),
        (b"null", "a JSON object"),
        (b"\xff\xfe{}", "JSON"),
        (b'{"temperature": NaN}', "NaN is not JSON"),
        (b'{"messages": ' + b"[" * 100_000, "JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "JSON"),
    ],
    ids=range(8),
)
async def test_a_body_that_is_no_json_object(served: Served, body: bytes, message: str):
    answer = await post(served.url, "/v1/chat/completions", body)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "body", "invalid_json")
    assert message in answer.error["message"]


async def test_text_that_cannot_be_encoded(served: Served):
    for body in (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"\\ud800": 1}'):
        answer = await post(served.url, "/v1/chat/completions", body)
        assert answer.status == 400
        assert answer.error["message"]


async def test_methods_paths_and_types(served: Served):
    url = served.url
    get = await request(url, "/v1/chat/completions")
    assert (get.status, get.headers["allow"], get.error["code"]) == (405, "POST", "method_not_allowed")
    assert (await post(url, "/health", {})).status == 405
    head, last = b"POST /lost HTTP/1.1\r\nHost: localhost\r\nContent-Length: ", b"GET /health HTTP/1.1\r\n"
    for end in (b"0\r\n\r\n", b"2\r\n\r\n{}"):  # all of it is there: the connection goes on with the next one
        lost = await send(url, head + end + last + b"Host: localhost\r\nConnection: close\r\n\r\n")
        assert (lost.status, lost.headers.get("connection")) == (404, None)
        assert b"200 OK" in lost.body
    nothing = await request(url, "/v2/anything?x=1")
    assert (nothing.status, nothing.error["code"]) == (404, "not_found")
    plain = await post(url, "/v1/completions", COMPLETION, Content_Type="text/plain")
    assert (plain.status, plain.error["code"]) == (415, "unsupported_media_type")
    assert (await post(url, "/v1/completions", COMPLETION, Content_Type="")).status == 415
    utf8 = "application/json; charset=utf-8"
    assert (await post(url, "/v1/completions", COMPLETION, Content_Type=utf8)).status == 200
    head = await request(url, "/health", "HEAD")
    assert (head.status, head.body) == (200, b"")


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:1", "", 200),
        ("127.0.0.1", "", 200),
        ("[::1]:8000", "", 200),
        ("attacker.example", "", 403),  # whose name has been made to resolve to 127.0.0.1
        ("attacker.example:8000", "http://attacker.example:8000", 403),
        ("localhost.attacker.example", "", 403),
        ("127.0.0.1.attacker.example", "", 403),
        ("127.0.0.1@attacker.example", "", 403),
        ("localhost:8000", "http://localhost:8000", 200),
        ("localhost:8000", "http://attacker.example", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "http://[", 403),
        ("localhost:8000", "http://localhost:3000", 403),
        ("[", "", 403),
    ],
)
async def test_websites_do_not_reach_the_port(served: Served, host: str, origin: str, status: int):
    for path, method in (("/v1/models", "GET"), ("/metrics", "GET"), ("/nothing", "GET")):
        answer = await request(served.url, path, method, Host=host, Origin=origin)
        assert answer.status == status or (path == "/nothing" and answer.status == 404 and status == 200)
        assert "access-control-allow-origin" not in answer.headers
    answer = await post(served.url, "/v1/completions", COMPLETION, Host=host, Origin=origin)
    assert answer.status == status
    preflight = await request(served.url, "/v1/completions", "OPTIONS", Host=host, Origin=origin)
    assert preflight.status in (403, 405)


async def test_schemas_that_are_nested_deep(served: Served):
    for depth in (150, 300, 450, 900):
        deep = '{"properties": {"a": ' * depth + "{}" + "}}" * depth
        body = json.dumps({**CHAT, "tools": [with_schema(a="DEEP")], "tool_choice": "required"})
        answer = await post(served.url, "/v1/chat/completions", body.replace('{"a": "DEEP"}', deep).encode())
        assert answer.status == 400, answer.body[:300]
        assert answer.error["param"].startswith(("tools", "body"))


async def test_a_client_that_offers_http_2_is_answered(served: Served):
    offered = {
        "Connection": "Upgrade, HTTP2-Settings, close",
        "Upgrade": "h2c",
        "HTTP2-Settings": "AAMAAABkAAQAoAAAAAIAAAAA",
    }
    answer = await post(served.url, "/v1/completions", COMPLETION, **offered)
    assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 4)
    assert (await request(served.url, "/health", **offered)).status == 200


async def test_sizes(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(call, "MAX_BODY_BYTES", 10_000)
    most = 10_000 + limits.BODY_BYTES_PER_TOKEN * 4096
    large = await post(served.url, "/v1/completions", {"prompt": "x" * most})
    assert (large.status, large.error["code"]) == (413, "body_too_large")
    assert str(most) in large.error["message"]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"%x\r\n%b\r\n" % (100_000, b" " * 100_000)
    chunked = await send(served.url, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 4)
    assert chunked.status == 413
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 100)
    full = await post(served.url, "/v1/completions", {"prompt": "x" * 100})
    assert (full.status, full.headers["retry-after"]) == (503, "1")
    headers = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    assert (await send(served.url, headers + b"A: " + b"a" * 12_000 + b"\r\nConnection: close\r\n\r\n")).status == 200
    for many in (b"A: " + b"a" * 20_000 + b"\r\n\r\n", b"A: a\r\n" * 5000 + b"\r\n", b"A: " + b"a" * 200_000):
        refused = await send(served.url, headers + many)
        assert (refused.status, refused.error["code"]) == (431, "headers_too_large")
    assert (await send(served.url, b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n")).status == 431
    for nonsense in (b"\0\1\2\r\n\r\n", b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        assert (await send(served.url, nonsense)).status == 400


async def test_slow_senders_are_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "HEADER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(call, "BODY_TIMEOUT_S", 0.2)
    slow = await send(served.url, b"GET /health HTTP/1.1\r\nHost: local")
    assert (slow.status, slow.error["code"]) == (408, "slow_request")
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    )
    slow = await send(served.url, head)
    assert (slow.status, slow.error["code"]) == (408, "slow_request")
    reader, writer = await asyncio.open_connection(*served.url.removeprefix("http://").split(":"))
    async with asyncio.timeout(10):
        assert await reader.read() == b""  # nothing was sent, so nothing is said
    writer.close()


async def test_connections_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 3)
    address = served.url.removeprefix("http://").split(":")
    opened = [await asyncio.open_connection(*address) for _ in range(3)]
    await asyncio.sleep(0)
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(10):
        refused = await reader.read()
    assert b"503" in refused.split(b"\r\n")[0]
    assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
    for _, each in [*opened, (reader, writer)]:
        each.close()
        await each.wait_closed()
    async with asyncio.timeout(10):
        while (await request(served.url, "/health")).status != 200:  # noqa: ASYNC110 - closed connections take a moment
            await asyncio.sleep(0.01)


async def test_tokens_of_texts_and_chats(served: Served):
    plain = (await post(served.url, "/tokenize", {"prompt": "def f():", "return_token_strs": True})).json
    assert plain["tokens"] == await served.engine.tokenize("def f():")
    assert "".join(plain["token_strs"]) == "<s>def f():"
    assert (plain["count"], plain["max_model_len"]) == (len(plain["tokens"]), 4096)
    bare = (await post(served.url, "/tokenize", {"prompt": "def f():", "add_special_tokens": False})).json
    assert bare["tokens"] == plain["tokens"][1:]
    chat = (await post(served.url, "/tokenize", {"messages": CHAT["messages"], "model": "bundled"})).json
    asked = (await post(served.url, "/v1/chat/completions", CHAT)).json
    assert chat["count"] == asked["usage"]["prompt_tokens"]
    text = (await post(served.url, "/detokenize", {"tokens": plain["tokens"], "skip_special_tokens": True})).json
    assert text == {"prompt": "def f():"}
    assert (await post(served.url, "/tokenize", {"prompt": "x", "model": "other"})).status == 404
    tools = {"messages": CHAT["messages"], "tools": [F]}
    with_tools = (await post(served.url, "/tokenize", tools)).json
    asked = (await post(served.url, "/v1/chat/completions", {**CHAT, "tools": [F]})).json
    assert with_tools["count"] == asked["usage"]["prompt_tokens"] > chat["count"]
