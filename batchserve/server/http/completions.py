"""/v1/completions."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field, replace
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
from batchserve.server.http.logprobs import CompletionLogprobs, TokenNames, num_parts
from batchserve.server.http.usage import UsageCount
from batchserve.types import Started

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from batchserve.server.http.call import HttpCall
    from batchserve.server.http.fields import Fields
    from batchserve.server.http.front import Front
    from batchserve.types import Delta, GenerateCall, TokenLogprobs

DEFAULT_MAX_TOKENS = 16  # the OpenAI API's
MAX_PROMPTS = 128


async def completions(front: Front, call: HttpCall, fields: Fields) -> None:
    """Answers one or several prompts, whole or as a stream."""
    asked, prompts = read_completion(fields)
    call.names = asked.names
    call.record.asked(asked.request_id)
    answer_id = await front.identify(call.caller, asked, "cmpl")
    prediction = await front.predicted(asked)
    if "max_tokens" not in asked.sampling:
        prompts = [await _tokens(front, prompt) for prompt in prompts]
    generations = [_generation(front, asked, prompt, f"-{i}" if i else "") for i, prompt in enumerate(prompts)]
    usage = UsageCount(generations[0].num_samples, prediction)
    names = TokenNames(front.token_bytes, asked.names_token_ids)
    is_skipping = asked.sampling.get("skip_special_tokens", True)
    skipped = front.chat_facts.special_tokens if is_skipping else frozenset()
    answer = CompletionAnswer(asked, names, skipped, usage, len(prompts))
    head = {
        "id": answer_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": front.engine.info.name,
        "system_fingerprint": None,
    }
    whole: list[tuple[int, Started | Delta]] = []
    async with aclosing(_all_events(call, generations, asked.is_streaming)) as events:
        async for prompt, event in events:
            if not asked.is_streaming:
                whole.append((prompt, event))
                continue
            for choice in answer.add(prompt, event):
                await call.event({**head, **choice})
    if not asked.is_streaming:
        size = sum(num_parts(event) for _, event in whole if not isinstance(event, Started))
        await call.answer_made(lambda: {**head, **answer.body_of(whole)}, size)
        return
    if asked.gives_usage:
        await call.event({**head, "choices": [], "usage": usage.body()})
    await call.end_events()


def read_completion(fields: Fields) -> tuple[Asked, list[str | list[int]]]:
    """Reads a request. Raises InvalidRequestError."""
    asked = read_common(fields)
    read_max_tokens(fields, asked, "max_tokens")
    read_prediction(fields, asked)
    read_response_format(fields, asked)
    asked.sampling |= fields.given("echo")
    logprobs = fields.integer("logprobs")
    if logprobs is not None:
        if not 0 <= logprobs <= MAX_LOGPROBS:
            raise fields.refused("logprobs", logprobs, f"in 0..{MAX_LOGPROBS}")
        asked.sampling["logprobs"] = logprobs
        if asked.sampling.get("echo") is True:
            asked.sampling.setdefault("prompt_logprobs", logprobs)
    fields.only("best_of", 1, asked.sampling.get("n", 1))
    fields.only("suffix", "")
    prompts = _prompts(fields)
    fields.end()
    return asked, prompts


def _prompts(fields: Fields) -> list[str | list[int]]:
    """Returns the prompts: one, or a list of them, each a text or token ids."""
    given = fields.raw("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        return [given]
    if not isinstance(given, list) or not given:
        raise InvalidRequestError("INVALID_PROMPT", "prompt", given, "a text, token ids, or a list of them")
    if len(given) > MAX_PROMPTS:
        raise InvalidRequestError("INVALID_PROMPT", "prompt", len(given), f"at most {MAX_PROMPTS} prompts")
    for i, prompt in enumerate(given):
        if not isinstance(prompt, str | list):
            raise InvalidRequestError("INVALID_PROMPT", f"prompt[{i}]", prompt, "a text or token ids")
    return given


async def _tokens(front: Front, prompt: str | list[int]) -> list[int]:
    return await front.engine.tokenize(prompt) if isinstance(prompt, str) else prompt


def _generation(front: Front, asked: Asked, prompt: str | list[int], suffix: str) -> GenerateCall:
    """Returns what the engine is asked. The default number of tokens is what the context has room for, at most."""
    if "max_tokens" not in asked.sampling:
        room = front.engine.info.max_model_len - len(prompt)
        asked = replace(asked, sampling={**asked.sampling, "max_tokens": max(1, min(DEFAULT_MAX_TOKENS, room))})
    return asked.call(prompt, suffix)


async def _all_events(
    call: HttpCall, generations: Sequence[GenerateCall], is_streaming: bool
) -> AsyncGenerator[tuple[int, Started | Delta], None]:
    """Yields the events of all prompts with the prompt's index, as they come. An error of one ends all."""
    if len(generations) == 1:
        async with aclosing(call.events(generations[0], is_streaming)) as events:
            async for event in events:
                yield 0, event
        return
    # One event waits here, so that unread ones stay where they are counted.
    queue: asyncio.Queue[tuple[int, Started | Delta]] = asyncio.Queue(1)

    async def follow(prompt: int, generation: GenerateCall) -> None:
        async with aclosing(call.events(generation, is_streaming)) as events:
            async for event in events:
                await queue.put((prompt, event))

    following = [asyncio.create_task(follow(*each)) for each in enumerate(generations)]
    all_over = asyncio.gather(*following)
    taking: asyncio.Task[tuple[int, Started | Delta]] | None = None
    try:
        while True:
            taking = taking or asyncio.create_task(queue.get())
            await asyncio.wait((taking, all_over), return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                yield taking.result()
                taking = None
            elif all_over.result() is not None and queue.empty():  # raises the first error of a prompt
                return
    finally:
        tasks = [*following, *((taking,) if taking else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(all_over, *tasks, return_exceptions=True)


@dataclass(slots=True)
class Choice:
    """One answer, as far as it has come."""

    logprobs: CompletionLogprobs | None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class CompletionAnswer:
    """The answers to all prompts: each delta as a chunk's fields, and all of them as a body's."""

    def __init__(
        self, asked: Asked, names: TokenNames, skipped: frozenset[str], usage: UsageCount, num_prompts: int
    ) -> None:
        self.usage = usage
        self._asked, self._names = asked, names
        most = asked.sampling.get("logprobs")
        self._choices = [
            Choice(None if most is None else CompletionLogprobs(names, most, skipped))
            for _ in range(num_prompts * usage.num_samples)
        ]
        self._prompt_token_ids: dict[int, list[int]] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}

    def add(self, prompt: int, event: Started | Delta) -> Iterable[dict[str, Any]]:
        """Yields the fields of the chunk that an event makes, of a stream."""
        if isinstance(event, Started):
            self.usage.started(prompt, event.prompt_tokens)
            self._prompt_token_ids[prompt] = event.prompt_token_ids
            return
        index = prompt * self.usage.num_samples + event.index
        choice = self._choices[index]
        self.usage.add(index, event)
        choice.texts.append(event.text)
        choice.token_ids += event.token_ids
        if event.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = event.prompt_logprobs
        if choice.logprobs is not None:
            if event.prompt_logprobs is not None and self._asked.sampling.get("echo") is True:
                choice.logprobs.add_prompt(self._prompt_token_ids[prompt], event.prompt_logprobs)
            choice.logprobs.add(event.token_ids, event.logprobs or ())
        if event.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = event.finish_reason.value, event.stop_reason
        if self._asked.is_streaming:
            usage = self.usage.body() if self._asked.gives_usage_always else None
            yield {"choices": [self._taken(index)]} | ({"usage": usage} if self._asked.gives_usage else {})

    def body_of(self, events: Sequence[tuple[int, Started | Delta]]) -> dict[str, Any]:
        """Returns the fields of a whole response, which is made of these events."""
        for prompt, event in events:
            for _ in self.add(prompt, event):
                pass
        choices = []
        for index in range(len(self._choices)):
            prompt = index // self.usage.num_samples
            one = self._taken(index)
            if self._asked.gives_token_ids:
                one["prompt_token_ids"] = self._prompt_token_ids[prompt]
            if prompt in self._prompt_logprobs:
                one["prompt_logprobs"] = self._names.prompt_content(
                    self._prompt_token_ids[prompt], self._prompt_logprobs[prompt]
                )
            choices.append(one)
        return {"choices": choices, "usage": self.usage.body()}

    def _taken(self, index: int) -> dict[str, Any]:
        """Returns what has come of a choice since the last call."""
        choice = self._choices[index]
        one: dict[str, Any] = {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": None if choice.logprobs is None else choice.logprobs.take(),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._asked.gives_token_ids:
            one["token_ids"] = [*choice.token_ids]
        choice.texts.clear()
        choice.token_ids.clear()
        return one
