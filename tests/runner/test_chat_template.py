"""Chats in the templates of models: the token ids of transformers, and what a template does not take is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from batchserve.conversation import Chat
from batchserve.errors import InvalidRequestError
from batchserve.llm import LLM
from batchserve.runner.chat import ChatTemplate
from batchserve.runner.compiled_tokenizer import CompiledTokenizer, compiled_of
from batchserve.types import SamplingParams
from tests.runner.test_chat import CHATML, PARTS, TEXT, tokenizer_with

# With a BOS token, tools, thinking that can be switched off, and contents that are trimmed.
FULL = (
    "{{ bos_token }}{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ (m.content or '') | trim }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments.x }}</call>{% endfor %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 7}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "ünïcode 😀\nand <s> more"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "{}", "tool_call_id": "1"},
    {"role": "assistant", "content": "so far", "reasoning_content": "hm"},
    {"role": "user", "content": "go on"},
]


def both(template: Any) -> tuple[PreTrainedTokenizerFast, CompiledTokenizer]:
    loaded = tokenizer_with(template, bos_token="<s>", eos_token="</s>")
    compiled = compiled_of(loaded, ["a"])
    assert isinstance(compiled, CompiledTokenizer)
    return loaded, compiled


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL, TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}])
@pytest.mark.parametrize("length", range(1, len(TALK) + 1))
def test_token_ids_are_those_of_transformers(length: int, options: dict[str, Any]) -> None:
    loaded, compiled = both(FULL)
    chat = Chat(TALK[:length], **options)
    more = {**options, **options.get("chat_template_kwargs", {})}
    more.pop("chat_template_kwargs", None)
    expected = loaded.apply_chat_template(TALK[:length], add_generation_prompt=True, return_dict=False, **more)
    assert ChatTemplate(compiled).token_ids(chat) == ChatTemplate(loaded).token_ids(chat) == expected
    assert expected.count(loaded.bos_token_id) == 1 + (length > 1)  # once by the template, once said by the user


@pytest.mark.parametrize("text", ["Once upon", "Once upon ", " Once\n", "x"])
@pytest.mark.parametrize("template", [FULL, CHATML, TEXT, PARTS])
def test_the_last_message_is_continued_where_it_ends(text: str, template: str) -> None:
    loaded, compiled = both(template)
    chat = Chat([TALK[1], {"role": "assistant", "content": text}], continue_final_message=True)
    found = ChatTemplate(compiled).text(chat)
    assert found.endswith(text.strip() if template == FULL else text)
    if template != PARTS:  # which transformers gives a text
        theirs = loaded.apply_chat_template([*chat.messages], continue_final_message=True, tokenize=False)
        assert found == theirs
    assert loaded.decode(ChatTemplate(loaded).token_ids(chat)) == loaded.decode(ChatTemplate(compiled).token_ids(chat))
    whole = ChatTemplate(compiled).text(Chat([*chat.messages], add_generation_prompt=False))
    assert whole.startswith(found.rstrip())


def test_of_several_templates_chats_with_tools_take_their_own() -> None:
    _, compiled = both({"default": TEXT, "tool_use": FULL})
    assert ChatTemplate(compiled).text(Chat(TALK[:1])) == "<system>Be brief. "
    assert "tools\n" in ChatTemplate(compiled).text(Chat(TALK[:1], tools=[TOOL]))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("template", "given", "field", "bound"),
    [
        (TEXT, {"tools": [TOOL]}, "tools", "empty: the model's template uses none"),
        (FULL, {"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs[thinking]", "knows no such variable"),
        ("{{ raise_exception('roles must alternate') }}{{ messages }}", {}, "messages", "roles must alternate"),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            {},
            *("messages", "no system"),
        ),
        (None, {}, "messages", "has no chat template; put the model's chat_template.jinja into its folder"),
        (
            "{{ messages[0].content | upper }}",
            {},
            "messages",
            "leaves out what the user says",
        ),
    ],
)
def test_what_a_template_does_not_take_is_refused(
    template: str | None, given: dict[str, Any], field: str, bound: str
) -> None:
    _, compiled = both(template)
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(compiled).token_ids(Chat(TALK[:1], **given))
    assert caught.value.field == field
    assert bound in caught.value.bound


def test_chats_with_the_bundled_model() -> None:
    llm = LLM(dtype="float32", max_model_len=512)
    user = {"role": "user", "content": "Convert this record to JSON.\nname: alpha\ncount: 7"}
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    (found,) = llm.chat([user], greedy, show_progress=False)
    (plain,) = llm.generate(f"<|user|>{user['content']}<|assistant|>", greedy, show_progress=False)
    assert (found.prompt_token_ids, found.text) == (plain.prompt_token_ids, plain.text)
    assert json.loads(found.text)["count"] == 7
    several = llm.chat([[user], [user, {"role": "assistant", "content": '{"name"'}]], greedy, show_progress=False)
    assert several[0].text == found.text
    begun = [user, {"role": "assistant", "content": found.text[:9]}]
    (rest,) = llm.chat(begun, greedy, continue_final_message=True, show_progress=False)
    assert len(rest.prompt_token_ids) > len(found.prompt_token_ids)
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: messages = .*: must be at most|prompts\[1\]"):
        llm.chat([[user], [{"role": "user", "content": "x " * 1000}]], greedy, show_progress=False)
    with pytest.raises(InvalidRequestError, match=r"must be text that can be encoded as UTF-8"):
        llm.chat([{"role": "user", "content": "\ud800"}], greedy, show_progress=False)


def test_a_model_without_a_tokenizer(tiny_model: dict[str, Path]) -> None:
    llm = LLM(str(tiny_model["llama"]), dtype="float32")
    with pytest.raises(InvalidRequestError, match="messages = '<messages>': must be token ids: the model has no token"):
        llm.chat([{"role": "user", "content": "hi"}], show_progress=False)
