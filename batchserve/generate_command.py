"""`batchserve generate`: streams one answer, from an engine in this process or from a running server.

Heavy imports happen when it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import signal
import sys
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from batchserve.client_options import (
    add_key_flag,
    add_tls_flags,
    api_key,
    check_address,
    client_tls,
    refuse_engine_options,
)
from batchserve.config import EngineConfig
from batchserve.errors import ConfigError, InvalidRequestError, invalid
from batchserve.grammar.json_schema import checked_schema
from batchserve.options import flag_of, make_config
from batchserve.progress import progress
from batchserve.types import Chat, Delta, Prompt, SamplingParams, SpeculationParams, Started, Usage, check_priority

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from batchserve.server.grpc.tls import ClientTls


# Parameters that are one number.
SAMPLING_FLAGS: dict[str, tuple[Callable[[str], float], str]] = {
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "in (0, 1]"),
    "top_k": (int, "0 is off"),
    "min_p": (float, "in [0, 1]; 0 is off"),
    "presence_penalty": (float, "in [-2, 2]; 0 is off"),
    "frequency_penalty": (float, "in [-2, 2]; 0 is off"),
    "repetition_penalty": (float, "in [0.01, 100]; 1 is off"),
    "no_repeat_ngram_size": (int, "0 is off"),
    "seed": (int, "makes sampling repeatable"),
    "max_tokens": (int, "the most tokens of the answer"),
    "min_tokens": (int, "the least, before the model may end it"),
}


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the prompt and sampling. The command line adds the options of an engine."""
    parser.add_argument("--prompt", help="the prompt (default: standard input)")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="put the prompt into the model's chat template",
    )
    parser.add_argument("--server", metavar="HOST:PORT", help="ask a running server (default: load the model here)")
    add_tls_flags(parser)
    add_key_flag(parser)
    parser.add_argument(
        "--priority", type=int, default=0, metavar="N", help="higher comes first, in -1000..1000 (default: 0)"
    )
    parser.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar="FILE",
        help="a text that the answer may quote: drafts are copied from it, the model does not read it; repeatable",
    )
    sampling = parser.add_argument_group("sampling (default: the model's own)")
    for name, (kind, text) in SAMPLING_FLAGS.items():
        sampling.add_argument(flag_of(name), type=kind, help=text)
    for name, text in (("stop", "end before this text; repeatable"), ("bad_words", "never say this; repeatable")):
        sampling.add_argument(flag_of(name), action="append", default=[], metavar="TEXT", help=text)
    grammar = sampling.add_mutually_exclusive_group()
    grammar.add_argument(
        "--json-schema",
        metavar="JSON|FILE",
        help="the answer is JSON that follows this schema, or the one in this file",
    )
    grammar.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    grammar.add_argument("--regex", metavar="REGEX", help="the answer matches this regular expression")
    grammar.add_argument("--ebnf", metavar="FILE", help="the answer follows the grammar in this file: GBNF or Lark")
    grammar.add_argument(
        "--choice", action="append", default=[], metavar="TEXT", help="the answer is one of these; repeatable"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    sampling.add_argument("--no-speculation", action="store_true", help="one token a step")


def run_generate(arguments: argparse.Namespace) -> int:
    """Prints the answer to the terminal and returns the exit status."""
    if sys.stdout is None:
        raise ConfigError("standard output: must be open, for the answer")
    # Nothing here outlives the process, and loading cannot be interrupted otherwise, so Ctrl-C ends it at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if arguments.server is not None:
        check_address("server", arguments.server)
        refuse_engine_options(arguments, "--server")
    elif not arguments.no_speculation:
        # Otherwise, one answer is over before the drafter is compiled, and the process ends the compilation every time.
        vars(arguments).setdefault("wait_for_drafter", True)
    tls = _client_tls(arguments)
    text = _prompt_text(arguments)
    config: EngineConfig = make_config(EngineConfig, arguments)
    params = SamplingParams(
        **{name: value for name in SAMPLING_FLAGS if (value := getattr(arguments, name)) is not None},
        stop=tuple(arguments.stop),
        bad_words=tuple(arguments.bad_words),
        json_schema=_schema(arguments.json_schema),
        json_object=arguments.json_object,
        regex=arguments.regex,
        ebnf=None if arguments.ebnf is None else _text_of_file("ebnf", arguments.ebnf),
        choice=tuple(arguments.choice),
        ignore_eos=arguments.ignore_eos,
    )
    if arguments.reference and arguments.no_speculation:
        raise ConfigError("--reference: must not be given with --no-speculation, which drafts from no text")
    nothing = {"--drafter none": config.drafter == "none", "--decoding-length 0": config.decoding_length == 0}
    if arguments.reference and arguments.server is None and any(nothing.values()):
        why = next(option for option, is_given in nothing.items() if is_given)
        raise ConfigError(f"--reference: must not be given with {why}, which drafts from no text")
    references = tuple(_text_of_file("reference", path) for path in arguments.reference)
    speculation = SpeculationParams(is_enabled=not arguments.no_speculation, references=references)
    priority = check_priority(arguments.priority)
    _check_without_model(arguments, text, config, params)
    prompt: Prompt = Chat([{"role": "user", "content": text}]) if arguments.chat else text
    asked = (prompt, params, speculation, priority)
    if arguments.server is None:
        events = _local_events(config, *asked)
    else:
        events = _remote_events(arguments.server, tls, api_key(arguments), *asked)
    asyncio.run(_show(events))
    return 0


def _check_without_model(
    arguments: argparse.Namespace, text: str, config: EngineConfig, params: SamplingParams
) -> None:
    """Raises InvalidRequestError for what an engine would refuse only after its model is loaded."""
    if not text and not arguments.chat:
        raise InvalidRequestError("EMPTY_PROMPT", "prompt", text, "at least one character")
    room = config.max_model_len if arguments.server is None else None
    if room is not None and params.max_tokens is not None and params.max_tokens >= room:
        bound = f"at most {room - 1}: max_model_len is {room}"
        raise InvalidRequestError("CONTEXT_EXCEEDED", "max_tokens", params.max_tokens, bound)


def _prompt_text(arguments: argparse.Namespace) -> str:
    if arguments.prompt is None and sys.stdin is None:
        raise ConfigError("--prompt: must be given: standard input is closed")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="")  # keep the line ends of a prompt
    try:
        text: str = sys.stdin.read() if arguments.prompt is None else arguments.prompt
        text.encode()  # bytes of the command line that are not text arrive as lone surrogates
    except UnicodeError as error:
        raise InvalidRequestError("INVALID_TEXT", "prompt", "<bytes>", "UTF-8 text") from error
    return text


def _schema(given: str | None) -> str | None:
    """Returns a schema that is given as text, or in a file; checked here, before a model is loaded."""
    if given is None:
        return None
    with suppress(ValueError, RecursionError):
        json.loads(given)
        checked_schema(given)
        return given
    is_text = not given.strip() or given.lstrip()[0] in "[{"
    text = given if is_text else _text_of_file("json_schema", given)
    checked_schema(text)
    return text


def _text_of_file(field: str, path: str) -> str:
    try:
        with open(os.path.expanduser(path), encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise InvalidRequestError("INVALID_TEXT", field, path, f"a file of UTF-8 text ({error})") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in a file's name
        raise InvalidRequestError(invalid(field), field, path, f"a file to read ({error})") from error


async def _local_events(
    config: EngineConfig,
    prompt: Prompt,
    params: SamplingParams,
    speculation: SpeculationParams,
    priority: int,
) -> AsyncGenerator[Started | Delta, None]:
    from batchserve.engine.async_engine import AsyncEngine

    engine = await AsyncEngine.start(config, progress)
    try:
        async with aclosing(engine.stream(prompt, params, speculation=speculation, priority=priority)) as events:
            async for event in events:
                yield event
    finally:
        await engine.shutdown()


def _client_tls(arguments: argparse.Namespace) -> ClientTls | None:
    tls = client_tls(arguments)
    if tls is not None and arguments.server is None:
        raise ConfigError("--tls, --tls-ca, --tls-certificate, --tls-key: must be with --server")
    if arguments.api_key is not None and arguments.server is None:
        raise ConfigError("--api-key: must be with --server")
    return tls


async def _remote_events(
    target: str,
    tls: ClientTls | None,
    key: str | None,
    prompt: Prompt,
    params: SamplingParams,
    speculation: SpeculationParams,
    priority: int,
) -> AsyncGenerator[Started | Delta, None]:
    from batchserve.server.grpc.answers import from_stream_response
    from batchserve.server.grpc.client import GenerationClient
    from batchserve.server.grpc.convert import to_generate_request

    async with GenerationClient(target, tls, key) as client:
        request = to_generate_request(prompt, params, speculation, priority)
        async with aclosing(client.stream(request)) as messages:
            async for message in messages:
                yield from_stream_response(message)


async def _show(events: AsyncGenerator[Started | Delta, None]) -> None:
    """Writes text to standard output as it arrives, and the usage and time to standard error."""
    usage: Usage | None = None
    total_s = 0.0
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Started):
                continue
            sys.stdout.write(event.text)
            sys.stdout.flush()
            if event.usage is not None and event.timing is not None:
                usage, total_s = event.usage, event.timing.total_s
    sys.stdout.write("\n")
    sys.stdout.flush()
    if usage is not None:
        rate = usage.completion_tokens / total_s if total_s > 0 else 0.0
        progress(
            f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} tokens in {total_s:.2f} s ({rate:.0f}/s), "
            f"{usage.accepted_draft_tokens} of {usage.draft_tokens} draft tokens accepted"
        )
