"""/v1/chat/completions."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchserve.errors import InvalidRequestError
from batchserve.sampling_params import MAX_LOGPROBS
from batchserve.server.http.generation import (
    Asked,
    read_common,
    read_max_tokens,
    read_prediction,
    read_response_format,
)
from batchserve.server.http.logprobs import TokenNames, num_parts
from batchserve.server.http.tools.choice import ToolChoice, read_tools, with_instructions
from batchserve.server.http.tools.pieces import CallBegin, Text
from batchserve.server.http.usage import UsageCount
from batchserve.types import Chat, FinishReason, Started

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchserve.server.http.call import HttpCall
    from batchserve.server.http.fields import Fields
    from batchserve.server.http.front import Front
    from batchserve.server.http.tools.pieces import Piece, ToolParser
    from batchserve.types import Delta, TokenLogprobs

NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}


async def chat_completions(front: Front, call: HttpCall, fields: Fields) -> None:
    """Answers a chat, whole or as a stream."""
    asked, tools, chat = read_chat(front, fields)
    call.names = NAMES | asked.names
    call.record.asked(asked.request_id)
    answer_id = await front.identify(call.caller, asked, "chatcmpl")
    prediction = await front.predicted(asked)
    names = TokenNames(front.token_bytes, asked.names_token_ids)
    make_parser = tools.parser_of(front.chat_facts, front.tool_call_parser)
    generation = asked.call(chat)
    answer = ChatAnswer(asked, tools, names, UsageCount(generation.num_samples, prediction))
    head = {
        "id": answer_id,
        "object": "chat.completion.chunk" if asked.is_streaming else "chat.completion",
        "created": int(time.time()),
        "model": front.engine.info.name,
        "system_fingerprint": None,
    }
    whole: list[Delta] = []
    async with aclosing(call.events(generation, asked.is_streaming)) as events:
        async for event in events:
            if isinstance(event, Started):
                answer.started(event, make_parser)
            elif asked.is_streaming:
                for delta in answer.add(event):
                    await call.event({**head, **delta})
            else:
                whole.append(event)
    if not asked.is_streaming:
        await call.answer_made(lambda: {**head, **answer.body_of(whole)}, sum(map(num_parts, whole)))
        return
    if asked.gives_usage:
        await call.event({**head, "choices": [], "usage": answer.usage.body()})
    await call.end_events()


def read_chat(front: Front, fields: Fields) -> tuple[Asked, ToolChoice, Chat]:
    """Reads a request. Raises InvalidRequestError."""
    asked = read_common(fields)
    read_max_tokens(fields, asked, "max_completion_tokens", "max_tokens")
    read_prediction(fields, asked)
    read_logprobs(fields, asked)
    has_format = read_response_format(fields, asked)
    tools = read_tools(fields)
    fields.only("modalities", ["text"])
    chat = make_chat(
        front,
        asked,
        tools,
        has_format,
        fields.items("messages") or [],
        **chat_options(fields),
    )
    fields.end()
    return asked, tools, chat


def chat_options(fields: Fields) -> dict[str, Any]:
    """Reads further arguments of Chat."""
    return fields.given("add_generation_prompt", "continue_final_message") | template_arguments(fields)


def template_arguments(fields: Fields) -> dict[str, Any]:
    arguments = fields.mapping("chat_template_kwargs")
    return {} if arguments is None else {"chat_template_kwargs": arguments}


def make_chat(
    front: Front, asked: Asked, tools: ToolChoice, has_format: bool, messages: list[Any], **options: Any
) -> Chat:
    """Returns a chat with its tools. A forced choice of tools becomes the answer's grammar."""
    if tools.is_forced:
        if asked.grammar is not None:
            bound = f"absent, as tool_choice is {tools.mode}"
            raise InvalidRequestError("CONFLICTING_GRAMMARS", asked.names[asked.grammar], "<grammar>", bound)
        for name in ("stop", "stop_token_ids"):
            if name in asked.sampling:
                bound = f"absent, as tool_choice is {tools.mode}: it could end a call before it is complete"
                raise InvalidRequestError("CONFLICTING_STOP", name, asked.sampling[name], bound)
        asked.sampling["json_schema"], asked.names["json_schema"] = tools.schema(), "tools"
    elif has_format and tools.mode != "none":
        bound = "absent or text: an answer that may call tools follows no format, unless tool_choice is none"
        raise InvalidRequestError("CONFLICTING_GRAMMARS", "response_format", "<format>", bound)
    if tools.mode == "none":
        return Chat(messages, **options)
    if tools.shows_marker(front.chat_facts, front.tool_call_parser):
        asked.sampling.setdefault("skip_special_tokens", False)
    if front.chat_facts.takes_tools:
        return Chat(messages, tools.tools, **options)
    return Chat(with_instructions(messages, tools.tools, front.chat_facts), **options)


def read_logprobs(fields: Fields, asked: Asked) -> None:
    """Reads whether log probabilities are wanted, and of how many of the likeliest tokens."""
    top = fields.integer("top_logprobs")
    if fields.flag("logprobs"):
        asked.sampling["logprobs"] = top or 0
    elif top:
        raise fields.refused("top_logprobs", top, f"0 unless logprobs is true; then in 0..{MAX_LOGPROBS}")


@dataclass(slots=True)
class Choice:
    """One answer to a chat, as far as it has come. Log probabilities and ids of held text wait for it."""

    parser: ToolParser | None
    texts: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    has_begun: bool = False
    is_cut: bool = False  # further calls of tools are not given

    def pieces(self, text: str, *, is_last: bool) -> Iterable[Piece]:
        if self.parser is None:
            return (Text(text),) if text else ()
        found = [*self.parser.feed(text)]
        return [*found, *self.parser.end()] if is_last else found


class ChatAnswer:
    """The answers to one chat: each delta as a chunk's fields, and all of them as a body's."""

    def __init__(self, asked: Asked, tools: ToolChoice, names: TokenNames, usage: UsageCount) -> None:
        self.usage = usage
        self._asked, self._tools, self._names = asked, tools, names
        self._choices: list[Choice] = []
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def started(self, event: Started, make_parser: Any) -> None:
        self.usage.started(0, event.prompt_tokens)
        self._prompt_token_ids = event.prompt_token_ids
        self._choices = [Choice(make_parser() if make_parser else None) for _ in range(self.usage.num_samples)]

    def add(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """Yields the fields of the chunks that a delta makes."""
        choice, asked = self._choices[delta.index], self._asked
        self.usage.add(delta.index, delta)
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        if asked.gives_token_ids:
            choice.token_ids += delta.token_ids
        if delta.logprobs:
            choice.logprobs += self._names.chat_content(delta.token_ids, delta.logprobs)
        is_last = delta.finish_reason is not None
        changed = self._changed(choice, choice.pieces(delta.text, is_last=is_last))
        if is_last:
            choice.finish_reason, choice.stop_reason = self._finish_reason(choice, delta), delta.stop_reason
        if not asked.is_streaming:
            return
        choice.texts.clear()  # they are sent
        if not choice.has_begun:
            choice.has_begun = True
            begun: dict[str, Any] = {"role": "assistant", "content": ""}
            shown = {"prompt_token_ids": self._prompt_token_ids} if asked.gives_token_ids and delta.index == 0 else {}
            yield self._chunk(delta.index, begun) | shown
        if changed or is_last:
            yield self._chunk(delta.index, changed, choice, is_last=is_last)

    def body_of(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Returns the fields of a whole response, which is made of these deltas."""
        for delta in deltas:
            for _ in self.add(delta):
                pass
        choices = []
        for index, choice in enumerate(self._choices):
            message: dict[str, Any] = {
                "role": "assistant",
                "content": "".join(choice.texts) or (None if choice.tool_calls else ""),
                "refusal": None,
            }
            if choice.tool_calls:
                message["tool_calls"] = choice.tool_calls
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(choice),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                | ({"token_ids": choice.token_ids} if self._asked.gives_token_ids else {})
            )
        found: dict[str, Any] = {"choices": choices, "usage": self.usage.body()}
        if self._asked.gives_token_ids:
            found["prompt_token_ids"] = self._prompt_token_ids
        if self._prompt_logprobs is not None:
            found["prompt_logprobs"] = self._names.prompt_content(self._prompt_token_ids, self._prompt_logprobs)
        return found

    def _changed(self, choice: Choice, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Adds pieces to an answer. Returns them as a chunk's delta."""
        texts: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if isinstance(piece, Text):
                texts.append(piece.text)
                continue
            choice.is_cut |= isinstance(piece, CallBegin) and bool(choice.tool_calls) and not self._tools.is_parallel
            if choice.is_cut:
                continue
            if isinstance(piece, CallBegin):
                function = {"name": piece.name, "arguments": ""}
                choice.tool_calls.append({"id": piece.call_id, "type": "function", "function": function})
                calls[len(choice.tool_calls) - 1] = {**choice.tool_calls[-1], "function": {**function}}
                continue
            at = len(choice.tool_calls) - 1
            choice.tool_calls[at]["function"]["arguments"] += piece.text
            calls.setdefault(at, {"function": {"arguments": ""}})["function"]["arguments"] += piece.text
        choice.texts += texts
        delta: dict[str, Any] = {"content": "".join(texts)} if texts else {}
        if calls:
            delta["tool_calls"] = [{"index": at, **each} for at, each in calls.items()]
        return delta

    def _chunk(
        self, index: int, delta: dict[str, Any], choice: Choice | None = None, *, is_last: bool = False
    ) -> dict[str, Any]:
        one: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if choice is not None:
            one["logprobs"], choice.logprobs = self._logprobs(choice), []
            if self._asked.gives_token_ids:
                one["token_ids"], choice.token_ids = choice.token_ids, []
            if is_last:
                one |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        usage = self.usage.body() if self._asked.gives_usage_always else None
        return {"choices": [one]} | ({"usage": usage} if self._asked.gives_usage else {})

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if "logprobs" not in self._asked.sampling:
            return None
        return {"content": choice.logprobs, "refusal": None}

    def _finish_reason(self, choice: Choice, delta: Delta) -> str:
        if delta.finish_reason is FinishReason.STOP and choice.tool_calls and self._tools.mode != "named":
            return "tool_calls"
        return str(delta.finish_reason.value) if delta.finish_reason else ""
