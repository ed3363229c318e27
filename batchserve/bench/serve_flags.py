"""The flags of `batchserve bench serve`. Heavy modules are imported when it runs."""

from __future__ import annotations

import argparse
import random
from typing import Any

from batchserve.client_options import add_key_flag, add_tls_flags, api_key, client_tls
from batchserve.files import parse_path, parse_recorded

DESCRIPTION = (
    "Sends requests to a running server, measures at the client, and shows one table. TTFT: from when a request was "
    "due to its first token. E2E: to its last token. TPOT: (E2E - TTFT) / (output tokens - 1). ITL: the time between "
    "deltas; a delta of n tokens counts as n times an n-th of it. Goodput: completed requests a second that meet every "
    "bound of --slo. docs/benchmarking.md has the details."
)


def add_serve_parser(kinds: Any) -> None:
    """Adds the command. kinds: the subcommands of `bench`."""
    serve = kinds.add_parser(
        "serve",
        allow_abbrev=False,
        help="latency and throughput of a running server, ours or any OpenAI-compatible one",
        description=DESCRIPTION,
    )
    _add_target_flags(serve.add_argument_group("server"))
    _add_load_flags(serve.add_argument_group("load"))
    _add_request_flags(serve.add_argument_group("requests"))
    _add_result_flags(serve.add_argument_group("results"))
    serve.set_defaults(run=_serve)


def _add_target_flags(group: argparse._ArgumentGroup) -> None:
    target = group.add_mutually_exclusive_group(required=True)
    target.add_argument("--grpc", metavar="HOST:PORT", help="measure our own gRPC service")
    target.add_argument("--url", metavar="http://HOST:PORT", help="measure an OpenAI-compatible server over HTTP")
    group.add_argument(
        "--endpoint", default="completions", metavar="{completions,chat}", help="what to ask (default: completions)"
    )
    group.add_argument(
        "--usage",
        metavar="{each,last,none}",
        help="ask for token counts in each event (vLLM's continuous_usage_stats, which others may refuse), in the last "
        "one, or not at all; with --url (default: each)",
    )
    group.add_argument("--model", metavar="NAME", help="the model to ask for (default: the server's first)")
    add_key_flag(group)
    add_tls_flags(group)
    group.add_argument(
        "--timeout-s", type=float, default=600.0, metavar="S", help="a request fails after so long (default: 600)"
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency", type=int, metavar="N", help="closed loop: keep N requests in flight (default: 16)"
    )
    group.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="open loop: send R requests a second at random times, however many are in flight; inf: all at once",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        help="the shape of the gamma distribution of the gaps between arrivals: 1 is a Poisson process, less is "
        "burstier (default: 1)",
    )
    group.add_argument("--num-requests", type=int, metavar="N", help="send N requests (default: 100)")
    group.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help="instead, send requests for S seconds; those in flight then are waited for, and count",
    )
    group.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="send N requests before that are not measured (default: 0)"
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of arrivals and random words; a server that has seen the same words before has them in its prefix cache "
        "(default: a new one each time, which is shown)",
    )


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompts",
        type=parse_recorded,
        metavar="FILE.jsonl",
        help='lines of {"prompt": TEXT} or, for chats, {"messages": [...]}, in this order and from the start again; '
        '"max_tokens" of a line counts unless --max-tokens is given, other fields are not sent; or a bundled set',
    )
    group.add_argument(
        "--input-tokens",
        type=int,
        metavar="N",
        help="without --prompts: N random words a prompt, about a token each (default: 128)",
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="the most tokens of an answer (default: 128)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on past the end-of-sequence token, to --max-tokens"
    )


def _add_result_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo",
        metavar="NAME:MS[,...]",
        help="count the requests that meet these bounds in milliseconds: ttft, tpot and e2e, such as ttft:500,tpot:50",
    )
    group.add_argument("--json", type=parse_path, metavar="FILE", help="write all results, and each request, to a file")
    group.add_argument("--allow-failures", action="store_true", help="exit with 0 even if requests failed")


def _serve(arguments: argparse.Namespace) -> int:
    from batchserve.bench.serve_command import run_serve_bench
    from batchserve.bench.serve_options import ServeBenchOptions, Slo

    options = ServeBenchOptions(
        grpc=arguments.grpc,
        url=arguments.url,
        endpoint=arguments.endpoint,
        usage=arguments.usage,
        model=arguments.model,
        concurrency=arguments.concurrency,
        rate=arguments.rate,
        burstiness=arguments.burstiness,
        num_requests=arguments.num_requests,
        duration_s=arguments.duration,
        warmup=arguments.warmup,
        prompts=arguments.prompts,
        input_tokens=arguments.input_tokens,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        ignore_eos=arguments.ignore_eos,
        seed=random.randrange(1 << 31) if arguments.seed is None else arguments.seed,
        timeout_s=arguments.timeout_s,
        slo=None if arguments.slo is None else Slo.parse(arguments.slo),
        json_file=arguments.json,
    )
    return run_serve_bench(options, api_key(arguments), client_tls(arguments), allow_failures=arguments.allow_failures)
