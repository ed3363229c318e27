"""`batchserve run-batch`: answers a file of requests. Heavy modules are imported when it runs."""

from __future__ import annotations

import argparse
from typing import Any

from batchserve.client_options import add_key_flag, add_tls_flags, api_key, client_tls, refuse_engine_options
from batchserve.config import EngineConfig
from batchserve.errors import ConfigError
from batchserve.files import parse_path
from batchserve.options import add_engine_options, make_config

DESCRIPTION = (
    "Answers the requests of a file in the format of OpenAI's Batch API. Each line of INPUT is "
    '{"custom_id", "method": "POST", "url", "body"}, with the url /v1/chat/completions, /v1/completions or '
    "/v1/responses. OUTPUT gets a line for each, in the order in which they end. If OUTPUT exists, its requests are "
    "not asked again. The exit status is 0 if every request has an answer, 1 if some have an error."
)


def add_run_batch_parser(commands: Any) -> None:
    """Adds the command. commands: the result of ArgumentParser.add_subparsers()."""
    batch = commands.add_parser(
        "run-batch",
        allow_abbrev=False,
        help="answer a file of requests (OpenAI's batch format)",
        description=DESCRIPTION,
    )
    batch.add_argument("input", type=parse_path, metavar="INPUT.jsonl", help="the requests, one a line")
    batch.add_argument("output", type=parse_path, metavar="OUTPUT.jsonl", help="the file to write or to go on with")
    batch.add_argument(
        "--concurrency", type=int, metavar="N", help="requests in flight (default: --max-num-seqs; with --url 16)"
    )
    batch.add_argument(
        "--retries",
        type=int,
        default=5,
        metavar="N",
        help="ask again so often if a server is too busy (429, 503) or cannot be reached (default: 5)",
    )
    server = batch.add_argument_group("a running server")
    server.add_argument("--url", metavar="http://HOST:PORT", help="ask this server (default: load the model here)")
    add_key_flag(server)
    add_tls_flags(server)
    add_engine_options(batch, ", without --url")
    batch.set_defaults(run=_run_batch)


def _run_batch(arguments: argparse.Namespace) -> int:
    from batchserve.run_batch.command import BatchOptions, run_batch

    tls = client_tls(arguments)
    config: EngineConfig | None = None
    if arguments.url is None:
        if tls is not None or arguments.api_key is not None:
            raise ConfigError("--tls, --tls-ca, --tls-certificate, --tls-key, --api-key: must be with --url")
        config = make_config(EngineConfig, arguments)
    else:
        refuse_engine_options(arguments, "--url")
    default = 16 if config is None else config.max_num_seqs
    options = BatchOptions(
        input=arguments.input,
        output=arguments.output,
        concurrency=default if arguments.concurrency is None else arguments.concurrency,
        retries=arguments.retries,
        url=arguments.url,
    )
    return run_batch(options, config, None if config is not None else api_key(arguments), tls)
