"""The prompts of a measurement: of a file, in its order, or random words by a seed."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchserve.bench.serve_options import DEFAULT_MAX_TOKENS
from batchserve.conversation import Chat
from batchserve.errors import ConfigError, InvalidRequestError
from batchserve.jsonl import Line, read_lines, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from batchserve.bench.serve_options import ServeBenchOptions

# Common short words, which most vocabularies hold as one token with the space before it.
WORDS = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but "
    "some what there we can out other were all your when up use word how said an each she which do their time if will "
    "way about many then them would write like so these her long make thing see him two has look more day could go "
    "come did my sound no most number who over know water than call first people may down side been now find any new "
    "work part take get place made live where after back little only round man year came show every good me give our "
    "under name very through just form much great think say help low line before turn cause same mean right boy old "
    "too does tell set three want air well also play small end put home read hand port large add even land here must "
    "big high such follow act why ask men change went light kind off need house picture try us again animal point"
).split()


@dataclass(frozen=True, slots=True)
class LoadPrompt:
    """The input of one request: a text or messages, and the most tokens of the answer."""

    content: str | list[dict[str, Any]]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class LoadPrompts:
    """Prompts by number, without end. num_different: None if no two are the same; otherwise they come round again."""

    at: Callable[[int], LoadPrompt]
    description: str
    num_different: int | None = None


def load_prompts(options: ServeBenchOptions) -> LoadPrompts:
    """Reads the file of prompts, or makes a source of random words. Raises ConfigError."""
    is_chat, max_tokens = options.endpoint == "chat", options.max_tokens
    if options.prompts is not None:
        with closing(read_lines(options.prompts, "prompts")) as lines:
            read = [_prompt(line, is_chat, max_tokens) for line in lines]
            if options.grpc is not None:
                _check_chats(options.prompts, read)
        if not read:
            raise ConfigError(f"prompts = {str(options.prompts)!r}: holds no prompts")
        return LoadPrompts(lambda number: read[number % len(read)], f"prompts of {options.prompts.name}", len(read))
    num_words, seed = options.input_tokens or 1, options.seed

    def make(number: int) -> LoadPrompt:
        text = " ".join(random.Random(f"prompt {seed} {number}").choices(WORDS, k=num_words))
        return LoadPrompt(_message(text) if is_chat else text, max_tokens or DEFAULT_MAX_TOKENS)

    return LoadPrompts(make, f"prompts of {num_words} random words")


def _prompt(line: Line, is_chat: bool, max_tokens: int | None) -> LoadPrompt:
    if max_tokens is None:
        max_tokens = line.fields.get("max_tokens", DEFAULT_MAX_TOKENS)
        if type(max_tokens) is not int or max_tokens < 1:
            raise ConfigError(f"{line.where}: field 'max_tokens' must be an integer of at least 1")
    if "messages" not in line.fields:
        text = text_of(line, "prompt")
        return LoadPrompt(_message(text) if is_chat else text, max_tokens)
    messages = line.fields["messages"]
    if not is_chat:
        raise ConfigError(f"{line.where}: field 'messages' must be with --endpoint chat")
    if "prompt" in line.fields:
        raise ConfigError(f"{line.where}: fields 'messages' and 'prompt' must not both be given")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ConfigError(f"{line.where}: field 'messages' must be a list of objects, at least one")
    return LoadPrompt(messages, max_tokens)


def _check_chats(file: Path, prompts: Sequence[LoadPrompt]) -> None:
    """Raises ConfigError for messages that our own server would refuse."""
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt.content, str):
            try:
                Chat(prompt.content)
            except InvalidRequestError as error:
                raise ConfigError(f"{file} prompt {number}: {error}") from None


def _message(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
