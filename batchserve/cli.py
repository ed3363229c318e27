"""The command line: serve | generate | run-batch | warm-drafts | bench | tune | demo | cache | keys | doctor.

Heavy imports are inside the commands, because the thread policy must be set before torch is imported.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import errno
import gc
import io
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batchserve import __version__
from batchserve.bench import add_bench_parser
from batchserve.cache_command import add_cache_parser
from batchserve.config import DTYPES, DraftConfig, EngineConfig, default_cache_dir
from batchserve.config_file import flags_of
from batchserve.engine.launch import LaunchedProcess
from batchserve.errors import BatchserveError, ConfigError, InvalidRequestError
from batchserve.files import parse_recorded
from batchserve.free_memory import describe_out_of_memory
from batchserve.generate_command import add_generate_flags, run_generate
from batchserve.keys_command import add_keys_parser
from batchserve.logs import configure_logging, log_format
from batchserve.native.instruction_set import AUTO, choose_instruction_set
from batchserve.native.threads import apply_thread_policy
from batchserve.option_checks import is_model_path
from batchserve.options import (
    DRAFT_OPTIONS,
    ENGINE_OPTIONS,
    SERVER_OPTIONS,
    add_engine_options,
    add_options,
    given_flags,
    make_config,
)
from batchserve.progress import progress
from batchserve.run_batch import add_run_batch_parser
from batchserve.server_config import ServerConfig
from batchserve.tune import NOT_TUNED_OPTIONS, add_tune_flags, run_tune_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchserve.engine.async_engine import AsyncEngine


logger = logging.getLogger("batchserve")  # not __name__: that is __main__ when run as a command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    for stream in (sys.stdout, sys.stderr):  # escape characters that the terminal cannot encode
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    parsed = parser.parse_args(arguments)
    apply_thread_policy()
    configure_logging()
    try:
        if getattr(parsed, "config", None) is not None:
            more = flags_of(parsed.config, parsed.options_parser)
            parsed = parser.parse_args([arguments[0], *more, *arguments[1:]])
        choose_instruction_set(getattr(parsed, "instruction_set", AUTO) or AUTO)
        status: int = parsed.run(parsed)
    except BatchserveError as error:
        _say(f"batchserve: {error}", logging.ERROR)
        return 2 if isinstance(error, ConfigError | InvalidRequestError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output is gone (`| head`)
        _give_up_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC or not _is_output_full():
            return _end_without_memory(error)
        _give_up_output()
        print(f"batchserve: standard output: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except Exception as error:
        return _end_without_memory(error)
    return status


def _end_without_memory(error: Exception) -> int:
    """If the error is for lack of memory, prints one line and returns exit status 1. Raises any other error."""
    message = describe_out_of_memory("to run", error)
    if message is None:
        raise error
    print(f"batchserve: {message}", file=sys.stderr)
    return 1


def _is_output_full() -> bool:
    """True if not even one more character can be written. Otherwise, the disk of another file may be full."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _give_up_output() -> None:
    """Discards further output. Python would report the error once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batchserve", description="LLM serving for small batches, over gRPC and the OpenAI API."
    )
    parser.add_argument("--version", action="version", version=f"batchserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", allow_abbrev=False, help="serve a model over gRPC and HTTP")
    serve.add_argument(
        "--config",
        type=Path,
        metavar="FILE.yaml",
        help="a file of any options below, such as max-num-seqs: 8; flags take precedence",
    )
    add_options(serve.add_argument_group("server"), ServerConfig, SERVER_OPTIONS)
    add_engine_options(serve, "")
    serve.set_defaults(run=_serve, options_parser=serve)

    generate = commands.add_parser("generate", allow_abbrev=False, help="answer one prompt, streaming to the terminal")
    add_generate_flags(generate)
    add_engine_options(generate, ", without --server", without=("wait_for_drafter",))  # generate always waits
    generate.set_defaults(run=run_generate)

    add_run_batch_parser(commands)

    warm = commands.add_parser("warm-drafts", allow_abbrev=False, help="make a draft cache from recorded answers")
    _add_warm_flags(warm)
    warm.set_defaults(run=_warm_drafts)

    add_bench_parser(commands)

    tune = commands.add_parser(
        "tune", allow_abbrev=False, help="which options of serve suit a workload on this machine best"
    )
    add_tune_flags(tune)
    add_engine_options(tune, "", without=NOT_TUNED_OPTIONS)
    tune.set_defaults(run=_tune)

    demo = commands.add_parser(
        "demo", allow_abbrev=False, help="a real server, eight answers at once, speculation on against off"
    )
    demo.add_argument(
        "--model", default="bundled", help="as for serve; other than bundled: with a chat template (default: bundled)"
    )
    demo.add_argument("--max-tokens", type=int, default=200, help="the most tokens of an answer (default: 200)")
    demo.add_argument("--repeats", type=int, default=3, help="measured runs of each kind (default: 3)")
    demo.add_argument("--dtype", choices=DTYPES, default="auto", help="as for serve (default: auto)")
    demo.set_defaults(run=_demo)

    add_cache_parser(commands)
    add_keys_parser(commands)
    doctor = commands.add_parser("doctor", help="the machine as batchserve sees it, and what it would choose")
    doctor.add_argument("--cache-dir", default=default_cache_dir(), metavar="PATH", help="as for serve")
    doctor.set_defaults(run=_doctor)
    completion = commands.add_parser("completion", help="a shell's completion of commands and options, as a script")
    completion.add_argument("shell", choices=("bash", "zsh"))
    completion.set_defaults(run=lambda arguments: _completion(arguments, parser))
    return parser


def _say(message: str, level: int = logging.INFO) -> None:
    """Writes a line to standard error, or a log record if standard error holds only JSON."""
    if log_format() == "json":
        logger.log(level, message)
    else:
        progress(message)


def _serve(arguments: argparse.Namespace) -> int:
    server_config: ServerConfig = make_config(ServerConfig, arguments)
    configure_logging(getattr(logging, server_config.log_level.upper()), server_config.log_format)
    if server_config.log_format == "json":
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # they are not JSON; transformers respects it, too
    # gRPC's own log lines are not JSON, and repeat our error if an address is taken.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    engine_config: EngineConfig = make_config(EngineConfig, arguments)
    if is_model_path(engine_config.model):  # fail before slow imports and the start of an engine process
        from batchserve.runner.model_folder import resolve_model

        resolve_model(engine_config.model)

    launched = LaunchedProcess() if server_config.has_engine_process else None  # it loads while gRPC is imported here
    from batchserve.engine.async_engine import AsyncEngine
    from batchserve.server.lifecycle import serve

    async def start_engine() -> AsyncEngine:
        engine = await AsyncEngine.start(
            engine_config, _say, own_process=server_config.has_engine_process, launched=launched
        )
        # Freeze what exists now: collecting it again would stop every stream for some tenths of a second.
        gc.collect()
        gc.freeze()
        return engine

    try:
        asyncio.run(serve(server_config, __version__, start_engine, lambda line: print(line, flush=True)))
    finally:
        if launched is not None:
            launched.end()  # for a server that never began
        gc.unfreeze()  # extension modules report what is never collected as leaks, on standard error
    return 0


def _add_warm_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=parse_recorded, metavar="FILE.jsonl", help='lines of {"prompt": TEXT, "response": TEXT}'
    )
    parser.add_argument(
        "--draft-scope",
        dest="default_draft_scope",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="whose requests may draft from them (default: default)",
    )
    # Only the model's tokenizer is needed.
    options = {name: ENGINE_OPTIONS[name] for name in ("model", "trust_remote_code")}
    options["drafter"] = dataclasses.replace(
        ENGINE_OPTIONS["drafter"], help="whose drafts; of these mixture's can be kept"
    )
    add_options(parser, EngineConfig, options)
    sizes = ("max_scope_bytes", "max_draft_bytes")
    add_options(parser, DraftConfig, {name: DRAFT_OPTIONS[name] for name in sizes})
    parser.add_argument(
        "--draft-cache", required=True, metavar="PATH", help="the file to make, or to add to if it exists"
    )


def _warm_drafts(arguments: argparse.Namespace) -> int:
    from batchserve.startup.warm_drafts import warm_drafts

    config: EngineConfig = make_config(EngineConfig, arguments)
    warmed = warm_drafts(arguments.file, config)
    progress(
        f"{warmed.num_answers} answers of {warmed.num_tokens} tokens; all of {arguments.draft_cache} will take "
        f"{warmed.num_bytes >> 10} KiB of a server's memory"
    )
    if warmed.num_lost:
        progress(
            f"the oldest {warmed.num_lost} tokens were left out: --max-scope-bytes and --max-draft-bytes leave room "
            f"for {warmed.num_kept}"
        )
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    # Limits that depend on the number of requests are checked for the largest number that is tried.
    largest = argparse.Namespace(**vars(arguments), max_num_seqs=max(1, *arguments.sizes))
    config: EngineConfig = make_config(EngineConfig, largest)
    return run_tune_command(arguments, config, given_flags(arguments))


def _doctor(arguments: argparse.Namespace) -> int:
    from batchserve.doctor import run_doctor

    return run_doctor(arguments)


FILES = ("keys", "tls_certificate", "tls_key", "tls_client_ca", "draft_cache")  # options of serve


def _completion(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import shtab

    for action in _all_actions(parser):
        if action.type is Path or action.dest in FILES or "FILE" in str(action.metavar):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))
    return 0


def _all_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the options and arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _all_actions(command)


def _demo(arguments: argparse.Namespace) -> int:
    from batchserve.demo import run_demo

    return run_demo(arguments.max_tokens, arguments.repeats, arguments.dtype, arguments.model)


if __name__ == "__main__":
    sys.exit(main())
