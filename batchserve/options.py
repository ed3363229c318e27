"""Turns configuration fields into command-line flags. Every field has a flag with its type and default.

Only the help texts are here. Types, defaults and bounds come from the dataclasses.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, get_type_hints

from batchserve.config import (
    ATTENTION_BACKENDS,
    COMPILE_MODES,
    DEVICES,
    DRAFTERS,
    DTYPES,
    FLASHINFER_MASKS,
    GENERATION_CONFIGS,
    ITL_INFLATION,
    JSON_WHITESPACES,
    LOGPROBS_MODES,
    PRIVATE_SCOPE,
    PROMPT_INFLATION,
    TRIE_MODES,
    DraftConfig,
    EngineConfig,
)
from batchserve.native.instruction_set import INSTRUCTION_SETS
from batchserve.server_config import LOG_FORMATS, LOG_LEVELS, TOOL_CALL_PARSERS

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(text: str) -> int:
    """Parses '2GiB', '512MiB', '1.5 GiB' or '1048576' into bytes. Raises argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B?)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2GiB, 512MiB or 1048576 (bytes)")
    return int(Fraction(match[1]) * _UNITS[match[2].upper()])


def parse_integers(text: str) -> tuple[int, ...]:
    """Parses a comma-separated list of integers. Raises argparse.ArgumentTypeError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 2,4,8") from None


def parse_on_off(text: str) -> bool:
    """Parses on or off. Raises argparse.ArgumentTypeError."""
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """How a configuration field appears on the command line. Its flag, type and default come from the field."""

    help: str
    choices: tuple[str, ...] | None = None
    is_size: bool = False
    is_on_off: bool = False  # for a bool: --flag on | off instead of --flag and --no-flag
    default_text: str | None = None  # what a default of None means


ENGINE_OPTIONS = {
    "model": Option("a local folder, a Hugging Face hub id, or 'bundled'"),
    "dtype": Option("the type of weights and K/V; auto: the fastest on this machine", DTYPES),
    "device": Option("where the model runs; auto: a CUDA device if there is one", DEVICES),
    "attention_backend": Option(
        "the attention kernels; auto: compiled kernels on a CPU, on a GPU the first of triton, flashinfer and torch "
        "that is installed and can serve the model; torch is slow, a reference for the others",
        ATTENTION_BACKENDS,
    ),
    "flashinfer_mask": Option(
        "how FlashInfer masks draft trees; custom: its own mask of rows by keys; tree: a variant of its kernel that "
        "reads one bit per ancestor, compiled at the first start; front: the same, but only over a step's own rows",
        FLASHINFER_MASKS,
    ),
    "drafter": Option("the drafter of requests that do not choose one", DRAFTERS),
    "adaptive": Option(
        "choose in every step which draft tokens are worth their time; off: run all of them",
        is_on_off=True,
    ),
    "decoding_length": Option(
        "a fixed number of draft tokens per request and step, not adaptive; 0 turns speculation off for all requests",
        default_text="adaptive; with --adaptive off it depends on the drafter: mixture and trie 8, reference "
        "--reference-copy-length, jacobi (W+G)(N-1)",
    ),
    "max_itl_inflation": Option(
        "how many times as long drafts may make a step, unless no request loses by it, and how many times as long the "
        "prompts in a step may make it; at least 1",
        default_text=f"drafts {ITL_INFLATION}; prompts {PROMPT_INFLATION:g}, or no limit with --max-itl-ms",
    ),
    "max_itl_ms": Option(
        "the longest step, in milliseconds, that prompts and drafts may make while requests are running",
        default_text="see --max-itl-inflation",
    ),
    "max_priority_wait_s": Option(
        "seconds after which a request, waiting or running, takes precedence over all later ones of any priority"
    ),
    "tpot_target_ms": Option(
        "prefer the drafts of requests whose time per output token is above this, in milliseconds; a request may set "
        "its own target",
        default_text="none",
    ),
    "branch_length": Option(
        "the most draft tokens in one branch of a draft tree",
        default_text="the drafter's own: mixture 64, trie 12, reference --reference-copy-length, jacobi N-1",
    ),
    "default_draft_scope": Option(
        "the draft scope of requests that name none. Requests of a scope draft from each other's answers and share "
        f"K/V, so timing may tell a caller what others have asked; '{PRIVATE_SCOPE}' shares nothing. "
        "Without --keys all callers are one tenant, and anyone who knows a scope's name can join it",
        default_text=f"'default'; '{PRIVATE_SCOPE}' if other machines may call without --keys",
    ),
    "wait_for_drafter": Option(
        "serve only once drafts are ready; otherwise requests have none while the first start compiles their kernels"
    ),
    "max_num_seqs": Option("the most requests that run at once"),
    "max_num_batched_tokens": Option("the most rows of a step: prefill chunks, drafts and plain rows together"),
    "prefill_chunk_size": Option("the most prompt tokens of one request in one step", default_text="the step's bound"),
    "prefix_cache": Option(
        "share the K/V of common prefixes between requests of a draft scope; K/V of ended requests is kept until its "
        "memory is needed"
    ),
    "max_waiting": Option(
        "the most requests that wait, in addition to --max-num-seqs; further ones get RESOURCE_EXHAUSTED"
    ),
    "max_model_len": Option(
        "the most tokens of prompt and answer together",
        default_text="the model's maximum, or less if the K/V memory holds less",
    ),
    "kv_cache_memory": Option(
        "memory for K/V, such as 2GiB or 512MiB",
        is_size=True,
        default_text="at most a quarter of what is free at start; on a GPU see --gpu-memory-utilization",
    ),
    "gpu_memory_utilization": Option("the share of a GPU's memory for weights, the largest step and K/V together"),
    "enforce_eager": Option("launch every kernel separately, without CUDA graphs"),
    "max_graph_rows": Option("the most rows of a step that runs as a CUDA graph; larger steps are eager"),
    "compile_model": Option(
        "on a GPU with CUDA graphs, let torch.compile fuse the model's small operations; layers: one program for all "
        "layers of a kind, some seconds at start; whole: one program for the model, longer with more layers; auto: "
        "layers, or off if the model cannot be compiled",
        COMPILE_MODES,
    ),
    "custom_kernels": Option(
        "on a CPU, run steps as one native program if the model allows it; off: always run the model's modules. On a "
        "GPU with CUDA graphs, use batchserve's kernels for norms, and for linears of few rows where they measure "
        "faster, which takes some seconds at start",
        is_on_off=True,
    ),
    "kernel_overlap": Option(
        "let kernels begin while the ones before them end, on Hopper and later GPUs", is_on_off=True
    ),
    "num_threads": Option(
        "compute threads on a CPU; with a GPU, threads for drafting",
        default_text="the fastest number at start; with a GPU torch's number, at most 8",
    ),
    "lookahead_parallel_size": Option(
        "processes that each have the whole model and verify some branches of every draft tree (docs/scaling.md)"
    ),
    "rank_timeout_s": Option("the longest that one of these may take for a step; it hangs then, and the engine ends"),
    "instruction_set": Option(
        "the instruction set of compiled kernels on a CPU, to compare or to rule one out",
        INSTRUCTION_SETS,
    ),
    "batch_invariant": Option(
        "refuse models whose answers could depend on what else is in the batch (docs/program.md)"
    ),
    "tokenizer_end_tokens": Option(
        "also end answers at the tokenizer's end-of-sequence token and at the token that ends a turn in the chat "
        "template, even if the model's configuration does not name them"
    ),
    "trust_remote_code": Option("run modelling code that comes with the model folder"),
    "cache_dir": Option(
        "the folder for measured step times and kept programs", default_text="batchserve in the user's cache folder"
    ),
    "max_kept_bytes": Option(
        "the most disk space for models as native programs, from which later starts are fast; 0: keep and use none",
        is_size=True,
    ),
    "share_weights": Option(
        "let the engines of this machine share the memory of a kept program's weights, in pages of 4 KB; otherwise "
        "each has its own, in huge pages, and is some per cent faster"
    ),
    "generation_config": Option(
        "where requests take sampling parameters from that they leave out: the model's generation_config, or nowhere",
        GENERATION_CONFIGS,
    ),
    "logprobs_mode": Option(
        "log probabilities of tokens: the model's, or those that tokens were drawn by, after penalties, bans, "
        "temperature and cuts",
        LOGPROBS_MODES,
    ),
    "json_whitespace": Option(
        "where a request asks for JSON: one space after a comma or colon and none elsewhere, or any white space",
        JSON_WHITESPACES,
    ),
    "served_model_name": Option("the name that requests may give", default_text="the value of --model"),
}
DRAFT_OPTIONS = {
    "trie_mode": Option("trie: how branches are combined into one draft", TRIE_MODES),
    "trie_capacity": Option("trie: the most nodes of one tree", default_text="16 x the decoding length"),
    "trie_prompt_weight": Option("trie: the weight of a branch from the prompt", default_text="4"),
    "trie_min_retrieved_tokens": Option(
        "trie: once this many tokens are found, shorter matches are not looked up",
        default_text="twice the decoding length",
    ),
    "reference_min_match": Option("reference: the shortest match that is copied from, 1 to 32 tokens"),
    "reference_copy_length": Option(
        "reference: how many tokens are copied", default_text="16, or the decoding length if it is larger"
    ),
    "jacobi_window": Option("jacobi: W, the width of the window", default_text="15, 10 or 7 by the model's size"),
    "jacobi_ngram": Option("jacobi: N, tokens of an n-gram; the window has N-1 levels"),
    "jacobi_guesses": Option("jacobi: G, the most n-grams verified in one step", default_text="W"),
    "max_scope_bytes": Option("memory for the shared texts of one draft scope, such as 64MiB", is_size=True),
    "max_draft_bytes": Option(
        "the same for all scopes and drafters; the default drafter gets twice as much as any other", is_size=True
    ),
    "draft_cache": Option(
        "a file to load shared drafts from at start and to save them to at the end; batchserve warm-drafts makes one",
        default_text="none",
    ),
}
SERVER_OPTIONS = {
    "host": Option("the address to listen on; one that is not loopback needs --keys, or --allow-unauthenticated"),
    "port": Option("the port to listen on with gRPC; 0 picks a free one and prints it"),
    "has_http": Option("serve the OpenAI API over HTTP, too"),
    "http_port": Option("the port to listen on with HTTP; 0 picks a free one and prints it"),
    "tool_call_parser": Option(
        "the format in which the model writes calls of tools; auto: what its chat template shows, or else hermes, "
        "which the model is then told of",
        TOOL_CALL_PARSERS,
    ),
    "keys": Option(
        "a file of the keys that calls need, with tenants and limits (batchserve keys makes it); read again on SIGHUP",
        default_text="none: everybody may call who reaches the port",
    ),
    "allow_unauthenticated": Option("listen without keys on an address that other machines reach"),
    "tls_certificate": Option(
        "a file with the server's certificate, or its chain, in PEM: gRPC and HTTP are encrypted",
        default_text="not encrypted",
    ),
    "tls_key": Option("the file with the certificate's key, not encrypted", default_text="none"),
    "tls_client_ca": Option("clients must show a certificate that one in this file has signed", default_text="anybody"),
    "max_receive_bytes": Option("the largest message that is accepted, such as 16MiB", is_size=True),
    "drain_timeout_s": Option("seconds that SIGTERM waits for the requests in flight"),
    "stall_timeout_s": Option("seconds after which a step that has not ended makes health report NOT_SERVING"),
    "unread_timeout_s": Option(
        "seconds that a message waits for its client to read it before the call ends with RESOURCE_EXHAUSTED"
    ),
    "max_unread_deltas": Option(
        "the most deltas that a client may leave unread in a stream; 64 times as many in all streams together"
    ),
    "has_reflection": Option("answer gRPC reflection, so that tools can discover the service's methods"),
    "has_engine_process": Option("run the engine in a process of its own, so that streams do not delay its steps"),
    "metrics_port": Option(
        "serve Prometheus metrics (/metrics) and the server's health (/healthz) over HTTP on this port of --host",
        default_text="off",
    ),
    "has_tenant_metrics": Option("give metrics by tenant, too"),
    "log_level": Option("the least severe level to log; info has a line for each request", LOG_LEVELS),
    "log_format": Option("the format of log lines; json: one JSON object per line", LOG_FORMATS),
    "has_prompt_logs": Option("log prompts and answers, too, in the lines of requests"),
    "otlp_endpoint": Option(
        "the URL of an OpenTelemetry collector that gets a trace of each call, such as http://HOST:4318/v1/traces; "
        "needs batchserve[tracing]",
        default_text="none",
    ),
}
_KINDS: dict[Any, type] = {
    **{int: int, float: float, str: str},
    **{int | None: int, float | None: float, str | None: str},
}


def flag_of(field: str) -> str:
    """Returns the flag of a configuration field: kebab-case, without is_ and has_."""
    return "--" + re.sub(r"^(is|has)_", "", field).replace("_", "-")


def add_options(parser: argparse._ActionsContainer, config: type, options: dict[str, Option]) -> None:
    """Adds a flag for each of these fields of a configuration dataclass."""
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
        # An absent flag sets nothing, so that only the dataclass defines defaults.
        parser.add_argument(flag_of(field.name), default=argparse.SUPPRESS, **arguments)


def make_config(config: type, arguments: argparse.Namespace) -> Any:
    """Builds the dataclass from the flags that were given. Raises ConfigError."""
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
    """Returns the given flags of the engine's configuration, to pass them on."""
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


def add_engine_options(parser: argparse.ArgumentParser, when: str, without: Sequence[str] = ()) -> None:
    for name, config, options in (("engine", EngineConfig, ENGINE_OPTIONS), ("drafters", DraftConfig, DRAFT_OPTIONS)):
        shown = {field: option for field, option in options.items() if field not in without}
        add_options(parser.add_argument_group(f"{name}{when}"), config, shown)
