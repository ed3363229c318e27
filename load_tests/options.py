"""Locust's further options for the users of this folder."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING, Any, NoReturn

from locust import events

from load_tests.shapes import SHAPES, add_shape_arguments
from load_tests.targets import AUTO, GRPC, HTTP

if TYPE_CHECKING:
    from argparse import ArgumentParser


def positive(text: str) -> int:
    """Returns a number of at least 1. argparse turns a ValueError into its own message."""
    if (number := int(text)) < 1:
        raise ArgumentTypeError(f"{text}: must be at least 1")
    return number


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    hidden: dict[str, Any] = {"include_in_web_ui": False}  # Locust's own parser knows this
    parser.add_argument(
        "--protocol",
        choices=(AUTO, GRPC, HTTP),
        default=AUTO,
        help="how to speak to the server; auto: HTTP if --host is http://... or https://..., gRPC otherwise",
    )
    parser.add_argument("--max-tokens", type=positive, default=128, help="the most tokens of an answer")
    parser.add_argument("--speculation", choices=("on", "off"), default="on", help="whether calls ask for drafts")
    parser.add_argument("--seed", default="", help="of the prompts (default: another one each run)")
    parser.add_argument(
        "--api-key",
        default="",
        env_var="BATCHSERVE_API_KEY",
        help="the key that calls are made with (default: $BATCHSERVE_API_KEY, or none)",
        **hidden,  # a page would show it to everybody
    )
    parser.add_argument(
        "--workload",
        default="",
        metavar="FILE.jsonl",
        help="the requests, a line each (load_tests/workload_file.py); default: the bundled model's kinds of tasks",
        **hidden,
    )
    # Locust has --tls-cert and --tls-key for its web UI.
    parser.add_argument("--server-tls", action="store_true", help="speak TLS with the server")
    parser.add_argument("--server-tls-ca", metavar="FILE", help="speak TLS, and trust the certificates in this file")
    parser.add_argument("--server-tls-certificate", metavar="FILE", help="show this certificate to the server")
    parser.add_argument("--server-tls-key", metavar="FILE", help="the key of --server-tls-certificate")
    parser.add_argument(
        "--shape",
        choices=tuple(SHAPES),
        help="how the number of users changes with time, with -u, -r and -t (default: as Locust does)",
        **hidden,
    )
    add_shape_arguments(parser, hidden)
    parser.add_argument(
        "--stage-seconds",
        type=float,
        help="walk through stages of 2, 8 and 16 users, speculation on against off, each so long",
        **hidden,
    )
    parser.add_argument("--samples-out", default="", help="where to write what each stage measured, as JSON", **hidden)


def refuse(message: str) -> NoReturn:
    """Ends the process because of its options."""
    print(f"load: {message}", file=sys.stderr, flush=True)
    sys.exit(2)
