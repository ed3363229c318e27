"""The command line: serve | generate | warm-drafts | bench | tune | demo.

Everything heavy is imported inside the commands: the thread policy must be set before torch is.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import ipaddress
import logging
import os
import re
import signal
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, get_type_hints

from batchserve import __version__
from batchserve.bench import add_bench_parser
from batchserve.config import DRAFTERS, DTYPES, PRIVATE_SCOPE, TRIE_MODES, DraftConfig, EngineConfig, ServerConfig
from batchserve.errors import BatchserveError, ConfigError, InvalidRequestError
from batchserve.threads import apply_thread_policy
from batchserve.tune import NOT_TUNED_OPTIONS, add_tune_flags, run_tune_command
from batchserve.types import Delta, SamplingParams, SpeculationParams, Started, Usage, check_priority

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of '2GiB', '512MiB', '1.5 GiB' or '1048576'; raises argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2GiB, 512MiB or 1048576 (bytes)")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_on_off(text: str) -> bool:
    """Raises argparse.ArgumentTypeError."""
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """How one field of a configuration is shown on the command line; its flag, type and default are the field's."""

    help: str
    choices: tuple[str, ...] | None = None
    is_size: bool = False
    is_on_off: bool = False  # of a bool: --flag on | off in place of --flag and --no-flag
    default_text: str | None = None  # what a default of None means


ENGINE_OPTIONS = {
    "model": Option("a local folder, a Hugging Face hub id, or 'bundled'"),
    "dtype": Option("what weights and K/V are computed in; auto: the fastest that this machine has", DTYPES),
    "drafter": Option("where the draft tokens come from of requests that do not choose themselves", DRAFTERS),
    "adaptive": Option(
        "choose in every step which draft tokens are worth the time of their rows; off: run all that are drafted",
        is_on_off=True,
    ),
    "decoding_length": Option(
        "so many draft tokens of each request in every step, not adaptive; 0 turns speculation off for all",
        default_text="as many as pay; with --adaptive off the drafter's own: mixture and trie 8, reference "
        "--reference-copy-length, jacobi (W+G)(N-1)",
    ),
    "max_itl_inflation": Option(
        "drafts, and each prompt computed beside them, stretch the steps of running requests to at most so many times "
        "their length; at least 1"
    ),
    "max_itl_ms": Option(
        "the longest step beside running requests that prompts and drafts may make, in milliseconds",
        default_text="as --max-itl-inflation says",
    ),
    "max_priority_wait_s": Option("a request that has waited so long, in seconds, comes before all of higher priority"),
    "tpot_target_ms": Option(
        "prefer the drafts of requests whose time per output token is above this, in milliseconds; a request may name "
        "its own",
        default_text="none",
    ),
    "branch_length": Option(
        "the most draft tokens in one line of descent",
        default_text="the drafter's own: mixture 32, trie 12, reference --reference-copy-length, jacobi N-1",
    ),
    "default_draft_scope": Option(
        "the draft scope of requests that name none: they draft from each other's answers, and timing tells a caller "
        f"what others were answered; '{PRIVATE_SCOPE}' shares nothing. There is no authentication: all callers are "
        "one tenant, and who knows a scope's name can join it",
        default_text=f"'default' on a loopback --host, '{PRIVATE_SCOPE}' otherwise",
    ),
    "wait_for_drafter": Option(
        "do not serve before drafts are ready; otherwise requests go without while the first start ever compiles them"
    ),
    "max_num_seqs": Option("the most requests that run at once"),
    "max_num_batched_tokens": Option("the most rows of one step: prefill chunks, drafts and plain rows together"),
    "prefill_chunk_size": Option("the most prompt tokens of one request in one step", default_text="the step's bound"),
    "prefix_cache": Option(
        "keep K/V of ended requests, in memory that nobody needs, for prompts of the same draft scope that begin alike"
    ),
    "max_waiting": Option("the most requests that wait; further ones get RESOURCE_EXHAUSTED"),
    "max_model_len": Option(
        "the most tokens of prompt and answer together", default_text="the model's own, or what the K/V memory holds"
    ),
    "kv_cache_memory": Option(
        "memory for K/V, such as 2GiB or 512MiB", is_size=True, default_text="a quarter of what is free at start"
    ),
    "num_threads": Option("compute threads on a CPU", default_text="what measures fastest at start"),
    "batch_invariant": Option("answers that are bitwise the same in any batch, at a price in speed"),
    "trust_remote_code": Option("run modelling code that comes with the model"),
    "cache_dir": Option("where measured step times are kept", default_text="batchserve in the user's cache folder"),
    "served_model_name": Option("the name that requests may give", default_text="the value of --model"),
}
DRAFT_OPTIONS = {
    "trie_mode": Option("trie: how branches are put into one draft", TRIE_MODES),
    "trie_capacity": Option("trie: the most nodes of one tree", default_text="16 x the decoding length"),
    "trie_prompt_weight": Option("trie: how much more a prompt's branch counts", default_text="4"),
    "trie_min_retrieved_tokens": Option(
        "trie: with so many tokens found, shorter matches are not looked up", default_text="twice the decoding length"
    ),
    "reference_min_match": Option("reference: the shortest match that is copied from"),
    "reference_copy_length": Option("reference: how many tokens are copied"),
    "jacobi_window": Option("jacobi: W, the window's width", default_text="15, 10 or 7 by the model's size"),
    "jacobi_ngram": Option("jacobi: N, tokens of an n-gram; the window has N-1 levels"),
    "jacobi_guesses": Option("jacobi: G, the most n-grams verified in one step", default_text="W"),
    "max_scope_bytes": Option("memory for the shared texts of one draft scope, such as 64MiB", is_size=True),
    "max_draft_bytes": Option("the same for all scopes of one drafter", is_size=True),
    "draft_cache": Option(
        "a file that shared drafts are loaded from at start and saved to at the end; batchserve warm-drafts makes one",
        default_text="none",
    ),
}
SERVER_OPTIONS = {
    "host": Option("the address to listen on; there is no authentication and no encryption"),
    "port": Option("the port to listen on; 0 picks a free one, which is printed"),
    "max_receive_bytes": Option("the largest message that is accepted, such as 16MiB", is_size=True),
    "drain_timeout_s": Option("how long SIGTERM waits for the requests in flight, in seconds"),
    "has_reflection": Option("answer gRPC reflection, so that tools find the service's methods by themselves"),
    "metrics_port": Option("serve Prometheus metrics over HTTP on this port of --host", default_text="off"),
}
_KINDS: dict[Any, type] = {
    **{int: int, float: float, str: str},
    **{int | None: int, float | None: float, str | None: str},
}


def flag_of(field: str) -> str:
    """The flag of a configuration field: kebab-case, without is_ and has_."""
    return "--" + re.sub(r"^(is|has)_", "", field).replace("_", "-")


def add_options(parser: argparse._ActionsContainer, config: type, options: dict[str, Option]) -> None:
    """A flag for each of these fields of a configuration dataclass."""
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name not in options:
            continue
        option = options[field.name]
        shown = option.default_text or _shown_default(field.default, option)
        arguments: dict[str, Any] = {"dest": field.name, "help": f"{option.help} (default: {shown})"}
        if option.is_on_off:
            arguments.update(type=parse_on_off, metavar="{on,off}")
        elif hints[field.name] is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        else:
            arguments["type"] = parse_size if option.is_size else _KINDS[hints[field.name]]
            arguments["choices"] = option.choices
        # An absent flag sets nothing, so that the dataclass alone knows the defaults.
        parser.add_argument(flag_of(field.name), default=argparse.SUPPRESS, **arguments)


def make_config(config: type, arguments: argparse.Namespace) -> Any:
    """The dataclass from the flags that were given; raises ConfigError."""
    hints = get_type_hints(config)
    given = {name: value for name, value in vars(arguments).items() if name in hints}
    nested: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parts = {name: make_config(part, arguments) for name, part in nested.items()}
    return config(**given, **parts)


def _shown_default(value: object, option: Option) -> str:
    if option.is_size and isinstance(value, int):
        return f"{value >> 20}MiB"
    names = ("off", "on") if option.is_on_off else ("no", "yes")
    return names[value] if isinstance(value, bool) else str(value)


def given_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags of the engine's configuration that were given, to be given again."""
    flags: list[str] = []
    for name, option in (ENGINE_OPTIONS | DRAFT_OPTIONS).items():
        if name not in arguments:
            continue
        flag, value = flag_of(name), getattr(arguments, name)
        if option.is_on_off:
            flags += [flag, "on" if value else "off"]
        elif isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags += [flag, str(value)]
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parsed = _parser().parse_args(arguments)
    apply_thread_policy()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        status: int = parsed.run(parsed)
    except BatchserveError as error:
        print(f"batchserve: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | InvalidRequestError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="batchserve", description="LLM serving for small batches, over gRPC.")
    parser.add_argument("--version", action="version", version=f"batchserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", allow_abbrev=False, help="serve a model over gRPC")
    add_options(serve.add_argument_group("server"), ServerConfig, SERVER_OPTIONS)
    _add_engine_options(serve, "")
    serve.set_defaults(run=_serve)

    generate = commands.add_parser("generate", allow_abbrev=False, help="answer one prompt, streaming to the terminal")
    _add_generate_flags(generate)
    _add_engine_options(generate, ", without --server")
    generate.set_defaults(run=_generate)

    warm = commands.add_parser("warm-drafts", allow_abbrev=False, help="make a draft cache from recorded answers")
    _add_warm_flags(warm)
    warm.set_defaults(run=_warm_drafts)

    add_bench_parser(commands)

    tune = commands.add_parser(
        "tune", allow_abbrev=False, help="which options of serve suit a workload on this machine best"
    )
    add_tune_flags(tune)
    _add_engine_options(tune, "", without=NOT_TUNED_OPTIONS)
    tune.set_defaults(run=_tune)

    demo = commands.add_parser(
        "demo", allow_abbrev=False, help="a real server with the bundled model, speculation on against off"
    )
    demo.add_argument("--max-tokens", type=int, default=200, help="the most tokens of an answer (default: 200)")
    demo.add_argument("--repeats", type=int, default=3, help="measured runs of each kind (default: 3)")
    demo.add_argument("--dtype", choices=DTYPES, default="auto", help="as for serve (default: auto)")
    demo.set_defaults(run=_demo)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser, when: str, without: Sequence[str] = ()) -> None:
    for name, config, options in (("engine", EngineConfig, ENGINE_OPTIONS), ("drafters", DraftConfig, DRAFT_OPTIONS)):
        shown = {field: option for field, option in options.items() if field not in without}
        add_options(parser.add_argument_group(f"{name}{when}"), config, shown)


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than localhost is taken to be reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serve(arguments: argparse.Namespace) -> int:
    server_config: ServerConfig = make_config(ServerConfig, arguments)
    if not is_loopback(server_config.host) and "default_draft_scope" not in arguments:
        arguments.default_draft_scope = PRIVATE_SCOPE
        _progress(
            f"host = {server_config.host} is not loopback: requests that name no draft scope share no drafts "
            "(--default-draft-scope NAME lets them)"
        )
    engine_config: EngineConfig = make_config(EngineConfig, arguments)

    from batchserve.engine.async_engine import AsyncEngine
    from batchserve.server.lifecycle import serve

    async def start_engine() -> AsyncEngine:
        return await AsyncEngine.start(engine_config, _progress)

    asyncio.run(serve(server_config, __version__, start_engine, lambda line: print(line, flush=True)))
    return 0


def _add_generate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", help="the prompt (default: standard input)")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--server", metavar="HOST:PORT", help="ask a running server (default: load the model here)")
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
    sampling.add_argument("--temperature", type=float, help="0 is greedy")
    sampling.add_argument("--top-p", type=float, help="in (0, 1]")
    sampling.add_argument("--top-k", type=int, help="0 is off")
    sampling.add_argument("--seed", type=int, help="makes sampling repeatable")
    sampling.add_argument("--max-tokens", type=int, help="the most tokens of the answer")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on behind the end-of-sequence token")
    sampling.add_argument("--no-speculation", action="store_true", help="one token a step")


def _add_warm_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.jsonl", help='lines of {"prompt": TEXT, "response": TEXT}')
    parser.add_argument(
        "--draft-scope",
        dest="default_draft_scope",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="whose requests may draft from them (default: default)",
    )
    # The model's tokenizer is all that is needed of it.
    used = ("model", "drafter", "trust_remote_code")
    add_options(parser, EngineConfig, {name: ENGINE_OPTIONS[name] for name in used})
    sizes = ("max_scope_bytes", "max_draft_bytes")
    add_options(parser, DraftConfig, {name: DRAFT_OPTIONS[name] for name in sizes})
    parser.add_argument(
        "--draft-cache", required=True, metavar="PATH", help="the file to make, or to add to if it exists"
    )


def _warm_drafts(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from batchserve.engine.warm_drafts import warm_drafts

    config: EngineConfig = make_config(EngineConfig, arguments)
    warmed = warm_drafts(Path(arguments.file), config)
    _progress(
        f"{warmed.num_answers} answers of {warmed.num_tokens} tokens; {arguments.draft_cache} holds "
        f"{warmed.num_bytes >> 10} KiB"
    )
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    # Nothing here outlives the process, and loading cannot be interrupted otherwise: Ctrl-C ends it at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if arguments.server is not None:
        _refuse_engine_options(arguments)
    text = _prompt_text(arguments)
    config: EngineConfig = make_config(EngineConfig, arguments)
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )
    prompt = _chat_token_ids(text, config) if arguments.chat else text
    references = tuple(map(_reference_text, arguments.reference))
    speculation = SpeculationParams(is_enabled=not arguments.no_speculation, references=references)
    asked = (prompt, params, speculation, check_priority(arguments.priority))
    events = _local_events(config, *asked) if arguments.server is None else _remote_events(arguments.server, *asked)
    asyncio.run(_show(events))
    return 0


def _refuse_engine_options(arguments: argparse.Namespace) -> None:
    """What would be ignored: the engine is the server's. With --chat the model here has the template."""
    used = ("model", "trust_remote_code") if arguments.chat else ()
    given = [flag_of(name) for name in (*ENGINE_OPTIONS, *DRAFT_OPTIONS) if name in arguments and name not in used]
    if given:
        raise ConfigError(f"{', '.join(given)}: must not be given with --server, whose engine has its own options")


def _prompt_text(arguments: argparse.Namespace) -> str:
    try:
        text: str = sys.stdin.read() if arguments.prompt is None else arguments.prompt
        text.encode()  # bytes of the command line that are no text arrive as lone surrogates
    except UnicodeError as error:
        raise InvalidRequestError("INVALID_TEXT", "text", "<bytes>", "UTF-8 text") from error
    return text


def _reference_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise InvalidRequestError("INVALID_TEXT", "reference", path, f"a file of UTF-8 text ({error})") from error
    except (OSError, ValueError) as error:  # ValueError: no file has a name with a NUL
        raise InvalidRequestError("INVALID_REFERENCES", "reference", path, f"a file to read ({error})") from error


def _chat_token_ids(text: str, config: EngineConfig) -> list[int]:
    """The prompt in the model's chat template, as token ids: as text it would be given a second BOS."""
    from transformers import AutoTokenizer

    from batchserve.runner.loader import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(config.model), trust_remote_code=config.trust_remote_code)
    if not tokenizer.chat_template:
        raise ConfigError(f"model = {config.model!r}: has no chat template, which --chat needs")
    messages = [{"role": "user", "content": text}]
    ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return list(ids)


async def _local_events(
    config: EngineConfig,
    prompt: str | Sequence[int],
    params: SamplingParams,
    speculation: SpeculationParams,
    priority: int,
) -> AsyncGenerator[Started | Delta, None]:
    from batchserve.engine.async_engine import AsyncEngine

    engine = await AsyncEngine.start(config, _progress)
    try:
        async with aclosing(engine.stream(prompt, params, speculation=speculation, priority=priority)) as events:
            async for event in events:
                yield event
    finally:
        await engine.shutdown()


async def _remote_events(
    target: str, prompt: str | Sequence[int], params: SamplingParams, speculation: SpeculationParams, priority: int
) -> AsyncGenerator[Started | Delta, None]:
    from batchserve.server.client import GenerationClient
    from batchserve.server.convert import from_stream_response, to_generate_request

    async with GenerationClient(target) as client:
        request = to_generate_request(prompt, params, speculation, priority)
        async with aclosing(client.stream(request)) as messages:
            async for message in messages:
                yield from_stream_response(message)


async def _show(events: AsyncGenerator[Started | Delta, None]) -> None:
    """Text to standard output as it comes; what it took, to standard error."""
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
        _progress(
            f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} tokens in {total_s:.2f} s ({rate:.0f}/s), "
            f"{usage.accepted_draft_tokens} of {usage.draft_tokens} draft tokens accepted"
        )


def _tune(arguments: argparse.Namespace) -> int:
    return run_tune_command(arguments, make_config(EngineConfig, arguments), given_flags(arguments))


def _demo(arguments: argparse.Namespace) -> int:
    from batchserve.demo import run_demo

    return run_demo(max_tokens=arguments.max_tokens, repeats=arguments.repeats, dtype=arguments.dtype)


if __name__ == "__main__":
    sys.exit(main())
