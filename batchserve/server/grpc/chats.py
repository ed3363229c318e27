"""Converts chats between messages and the domain type."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from batchserve.conversation import Chat
from batchserve.errors import InvalidRequestError
from batchserve.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping

OWN_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")  # of a message; others are in extra_fields


def from_chat(chat: pb.Chat) -> Chat:
    """Raises InvalidRequestError, to be passed to convert.with_path."""
    kwargs = chat.chat_template_kwargs
    return Chat(
        [_message(f"messages[{i}]", each) for i, each in enumerate(chat.messages)],
        [_object(f"tools[{i}]", text) for i, text in enumerate(chat.tools)],
        chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
        chat.continue_final_message,
        _object("chat_template_kwargs", kwargs) if kwargs else {},
    )


def to_chat(chat: Chat) -> pb.Chat:
    """Raises InvalidRequestError for values that JSON cannot hold."""
    return pb.Chat(
        messages=[_to_message(f"messages[{i}]", each) for i, each in enumerate(chat.messages)],
        tools=[_text(f"tools[{i}]", each) for i, each in enumerate(chat.tools)],
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        chat_template_kwargs=_text("chat_template_kwargs", chat.chat_template_kwargs)
        if chat.chat_template_kwargs
        else "",
    )


def _message(name: str, message: pb.ChatMessage) -> dict[str, Any]:
    found = _object(f"{name}.extra_fields", message.extra_fields) if message.extra_fields else {}
    for key in OWN_KEYS:
        if key in found:
            raise InvalidRequestError("INVALID_CHAT", f"{name}.extra_fields", key, "other keys than the message's own")
    found |= {"role": message.role, "content": None}
    match message.WhichOneof("content"):
        case "text":
            found["content"] = message.text
        case "parts":
            found["content"] = [{"type": "text", "text": text} for text in message.parts.texts]
    if message.name:
        found["name"] = message.name
    if message.tool_calls:
        found["tool_calls"] = [_object(f"{name}.tool_calls[{i}]", text) for i, text in enumerate(message.tool_calls)]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _to_message(name: str, message: Mapping[str, Any]) -> pb.ChatMessage:
    content = message["content"]
    extra = {key: value for key, value in message.items() if key not in OWN_KEYS and value is not None}
    return pb.ChatMessage(
        role=message["role"],
        text=content if isinstance(content, str) else None,
        parts=pb.TextParts(texts=[part["text"] for part in content]) if isinstance(content, list) else None,
        name=message.get("name") or "",
        tool_calls=[_text(f"{name}.tool_calls[{i}]", each) for i, each in enumerate(message.get("tool_calls") or ())],
        tool_call_id=message.get("tool_call_id") or "",
        extra_fields=_text(name, extra) if extra else "",
    )


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("INVALID_CHAT", name, text, f"JSON ({error})") from None
    if not isinstance(found, dict):
        raise InvalidRequestError("INVALID_CHAT", name, text, "a JSON object")
    return found


def _text(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError("INVALID_CHAT", name, value, f"what JSON can hold ({error})") from None
