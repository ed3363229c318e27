"""A chat as a caller gives it: messages and tools in the form of the OpenAI API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchserve.errors import InvalidRequestError
from batchserve.field_checks import check_bool

MAX_MESSAGES = 1024
MAX_TOOLS = 128
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "return_dict")


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that the model's own chat template makes of messages. Raises InvalidRequestError.

    messages: mappings with a `role` and a `content`, which is a text, a list of parts {"type": "text", "text": ...}, or
    None beside `tool_calls`; what else they hold is for the template. tools: as the template takes them, mostly
    {"type": "function", "function": {...}}. add_generation_prompt: end with what begins an answer; None: unless
    continue_final_message, with which the answer continues the last message. chat_template_kwargs: further variables
    of the template, such as enable_thinking.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        messages = _mappings("messages", self.messages, MAX_MESSAGES)
        if not messages:
            raise InvalidRequestError("EMPTY_PROMPT", "messages", self.messages, "at least one message")
        checked = tuple(_checked(f"messages[{i}]", each) for i, each in enumerate(messages))
        object.__setattr__(self, "messages", checked)
        object.__setattr__(self, "tools", _mappings("tools", self.tools or (), MAX_TOOLS))
        check_bool("INVALID_CHAT", "continue_final_message", self.continue_final_message)
        if self.add_generation_prompt is None:
            object.__setattr__(self, "add_generation_prompt", not self.continue_final_message)
        check_bool("INVALID_CHAT", "add_generation_prompt", self.add_generation_prompt)
        if self.continue_final_message and self.add_generation_prompt:
            bound = "False, as continue_final_message is True"
            raise InvalidRequestError("INVALID_CHAT", "add_generation_prompt", True, bound)
        if self.continue_final_message and not _text_of(checked[-1]):
            where = f"messages[{len(checked) - 1}].content"
            raise InvalidRequestError("INVALID_CHAT", where, checked[-1]["content"], "a text, which is continued")
        variables = self.chat_template_kwargs or {}
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise InvalidRequestError("INVALID_CHAT", "chat_template_kwargs", variables, "a mapping of names to values")
        for name in OWN_VARIABLES:
            if name in variables:
                raise InvalidRequestError("INVALID_CHAT", f"chat_template_kwargs[{name}]", variables[name], "absent")
        object.__setattr__(self, "chat_template_kwargs", dict(variables))

    def __len__(self) -> int:
        """Returns the number of characters, without the template's."""
        return sum(len(_text_of(message)) for message in self.messages)


def _text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is one text, or None."""
    return {**message, "content": None if message["content"] is None else _text_of(message)}


def with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is a list of parts, or None."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def _mappings(name: str, given: object, most: int) -> tuple[Mapping[str, Any], ...]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InvalidRequestError("INVALID_CHAT", name, given, "a list of mappings")
    found = tuple(given)
    if len(found) > most:
        raise InvalidRequestError("INVALID_CHAT", name, len(found), f"at most {most}")
    for i, each in enumerate(found):
        if not isinstance(each, Mapping):
            raise InvalidRequestError("INVALID_CHAT", f"{name}[{i}]", each, "a mapping")
    return found


def _checked(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is a text, a list of parts, or None, and whose tool calls have mappings."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError("INVALID_CHAT", f"{name}.role", role, "the name of a role, such as 'user'")
    if content is None and not message.get("tool_calls"):
        raise InvalidRequestError("INVALID_CHAT", f"{name}.content", content, "a text, or a list of parts with text")
    if content is not None and not isinstance(content, str):
        if isinstance(content, bytes | Mapping) or not isinstance(content, Iterable):
            raise InvalidRequestError(
                "INVALID_CHAT", f"{name}.content", content, "a text, or a list of parts with text"
            )
        content = [_part(f"{name}.content[{i}]", part) for i, part in enumerate(content)]
    found = {**message, "content": content}
    if message.get("tool_calls"):
        calls = _mappings(f"{name}.tool_calls", message["tool_calls"], MAX_TOOLS)
        found["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", each) for i, each in enumerate(calls)]
    return found


def _part(name: str, part: object) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise InvalidRequestError("INVALID_CHAT", f"{name}.type", kind, "'text': only text is served")
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError("INVALID_CHAT", f"{name}.text", part.get("text"), "a text")
    return {"type": "text", "text": part["text"]}


def _call(name: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool call whose arguments are a mapping, as templates take them: the OpenAI API has them as text."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError("INVALID_CHAT", f"{name}.function", function, "a mapping with name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            where = f"{name}.function.arguments"
            raise InvalidRequestError("INVALID_CHAT", where, arguments, f"JSON ({error})") from None
    return {**call, "function": {**function, "arguments": arguments}}
