"""/v1/responses: texts and calls of functions, whole or as a stream. Nothing is stored between calls."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from batchserve.errors import InvalidRequestError
from batchserve.server.http.chat import make_chat, template_arguments
from batchserve.server.http.generation import Asked, read_common, read_max_tokens, read_prediction, read_response_format
from batchserve.server.http.logprobs import TokenNames
from batchserve.server.http.response_items import ResponseItems
from batchserve.server.http.tools.choice import ToolChoice, read_tools
from batchserve.server.http.usage import UsageCount
from batchserve.types import Chat, FinishReason, Started

if TYPE_CHECKING:
    from batchserve.server.http.call import HttpCall
    from batchserve.server.http.fields import Fields
    from batchserve.server.http.front import Front

NAMES = {"prompt": "input", "messages": "input", "logprobs": "top_logprobs"}
LOGPROBS = "message.output_text.logprobs"
TEXT_PARTS = ("input_text", "output_text", "text")


async def responses(front: Front, call: HttpCall, fields: Fields) -> None:
    """Answers an input, whole or as a stream."""
    asked, tools, chat, shown = read_response(front, fields)
    call.names, call.names_events = NAMES | asked.names, True
    call.record.asked(asked.request_id)
    answer_id = await front.identify(call.caller, asked, "resp")
    usage = UsageCount(prediction=await front.predicted(asked))
    generation = asked.call(chat)
    make_parser = tools.parser_of(front.chat_facts, front.tool_call_parser)
    names = TokenNames(front.token_bytes)
    items = ResponseItems(answer_id, names, make_parser() if make_parser else None, is_parallel=tools.is_parallel)
    body = _head(front, answer_id, asked, shown)
    async with aclosing(call.events(generation, asked.is_streaming)) as events:
        async for event in events:
            if isinstance(event, Started):
                usage.started(0, event.prompt_tokens)
                made = [{"type": f"response.{name}", "response": body} for name in ("created", "in_progress")]
            else:
                usage.add(0, event)
                made = [*items.add(event)]
                if event.finish_reason is not None:
                    is_cut = event.finish_reason is FinishReason.LENGTH
                    made += items.end("incomplete" if is_cut else "completed")
                    body = _ended(body, items.output, usage, is_cut)
                    made.append({"type": f"response.{body['status']}", "response": body})
            for each in made if asked.is_streaming else ():
                await call.event({**each, "sequence_number": call.num_events}, name=str(each["type"]))
    if asked.is_streaming:
        await call.end_events(b"")
    else:
        await call.answer(body)


def read_response(front: Front, fields: Fields) -> tuple[Asked, ToolChoice, Chat, dict[str, Any]]:
    """Reads a request. Raises InvalidRequestError. Returns also what the response repeats of it."""
    names = ("instructions", "metadata", "tools", "tool_choice", "text", "max_output_tokens", "user")
    shown = fields.given(*names, "parallel_tool_calls")
    fields.only("prompt_logprobs")  # a response has no place for these
    fields.only("return_token_ids", False)
    fields.only("return_tokens_as_token_ids", False)
    asked = read_common(fields)
    read_max_tokens(fields, asked, "max_output_tokens")
    read_prediction(fields, asked)
    if "n" in asked.sampling:
        raise fields.refused("n", asked.sampling["n"], "absent: a response is one answer")
    if (top := fields.integer("top_logprobs")) is not None:
        asked.sampling["logprobs"] = top
    for i, each in enumerate(fields.items("include") or []):
        if each != LOGPROBS:
            raise InvalidRequestError("INVALID_INCLUDE", f"include[{i}]", each, repr(LOGPROBS))
        asked.sampling.setdefault("logprobs", 0)
    fields.only("truncation", "disabled")
    fields.only("background", False)
    fields.only("previous_response_id")
    fields.only("conversation")
    has_format = False
    if (text := fields.nested("text")) is not None:
        has_format = read_response_format(text, asked, "format")
        text.end()
    tools = read_tools(fields, is_flat=True)
    instructions, given = fields.text("instructions"), fields.raw("input")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    chat = make_chat(front, asked, tools, has_format, messages, **template_arguments(fields))
    fields.end()
    return asked, tools, chat, shown


def _messages(given: Any) -> list[dict[str, Any]]:
    """Returns the messages of a list of input items."""
    if not isinstance(given, list) or not given:
        raise InvalidRequestError("INVALID_INPUT", "input", given, "a text, or a list of items")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(f"input[{i}].content", item.get("content"))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            made = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1].get("tool_calls"):
                messages[-1]["tool_calls"].append(made)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
        elif kind == "function_call_output":
            content = _content(f"input[{i}].output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            bound = "message, function_call or function_call_output"
            raise InvalidRequestError("INVALID_INPUT", f"input[{i}].type", kind, bound)
    return messages


def _content(path: str, content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise InvalidRequestError("INVALID_INPUT", f"{path}[{i}].type", kind, f"one of {', '.join(TEXT_PARTS)}")
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _head(front: Front, answer_id: str, asked: Asked, shown: dict[str, Any]) -> dict[str, Any]:
    """Returns the response as it is before there is an answer."""
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": shown.get("instructions"),
        "max_output_tokens": shown.get("max_output_tokens"),
        "metadata": shown.get("metadata", {}),
        "model": front.engine.info.name,
        "output": [],
        "parallel_tool_calls": shown.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "store": False,
        "temperature": asked.sampling.get("temperature"),
        "text": shown.get("text", {"format": {"type": "text"}}),
        "tool_choice": shown.get("tool_choice", "auto"),
        "tools": shown.get("tools", []),
        "top_logprobs": asked.sampling.get("logprobs", 0),
        "top_p": asked.sampling.get("top_p"),
        "truncation": "disabled",
        "usage": None,
        "user": shown.get("user"),
    }


def _ended(body: dict[str, Any], output: list[dict[str, Any]], usage: UsageCount, is_cut: bool) -> dict[str, Any]:
    return {
        **body,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": usage.responses_body(),
    }
