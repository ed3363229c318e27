"""Chats as callers give them: what is taken, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from batchserve.conversation import Chat, with_parts, with_text
from batchserve.errors import InvalidRequestError

USER = {"role": "user", "content": "hi"}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("given", "field", "bound"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hi"}, "messages", "a list of mappings"),
        ({"messages": USER}, "messages", "a list of mappings"),
        ({"messages": ["hi"]}, "messages[0]", "a mapping"),
        ({"messages": [USER] * 1025}, "messages", "at most 1024"),
        ({"messages": [USER, {"content": "hi"}]}, "messages[1].role", "the name of a role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a text, or a list of parts"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a text, or a list of parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            *("messages[0].content[0].type", "'text': only text is served"),
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "a text"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            *("messages[0].tool_calls[0].function", "a mapping"),
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            *("messages[0].tool_calls[0].function.arguments", "JSON"),
        ),
        ({"messages": [USER], "tools": {"a": 1}}, "tools", "a list of mappings"),
        ({"messages": [USER], "tools": [{}] * 129}, "tools", "at most 128"),
        ({"messages": [USER], "continue_final_message": 1}, "continue_final_message", "True or False"),
        (
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            *("add_generation_prompt", "False, as continue_final_message is True"),
        ),
        (
            {"messages": [{"role": "user", "content": ""}], "continue_final_message": True},
            *("messages[0].content", "a text, which is continued"),
        ),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "chat_template_kwargs", "a mapping of names"),
        ({"messages": [USER], "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs[tools]", "absent"),
    ],
)
def test_what_is_refused(given: dict[str, Any], field: str, bound: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Chat(**given)
    assert caught.value.field == field
    assert bound in caught.value.bound


def test_contents_as_text_and_as_parts() -> None:
    chat = Chat([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, USER])
    assert [with_text(each)["content"] for each in chat.messages] == ["a\nb", "hi"]
    assert [len(with_parts(each)["content"]) for each in chat.messages] == [2, 1]
    assert len(chat) == len("a\nb") + len("hi")


def test_arguments_of_tool_calls_are_given_to_templates_as_mappings() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    (message,) = Chat([{"role": "assistant", "content": None, "tool_calls": [call]}]).messages
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": [1]}}
    assert call["function"] == {"name": "f", "arguments": '{"x": [1]}'}  # the caller's own is left alone
