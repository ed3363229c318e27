"""`batchserve bench`: measures drafters and servers. Heavy modules are imported when a measurement runs."""

from __future__ import annotations

import argparse
from typing import Any

from batchserve.bench.serve_flags import add_serve_parser
from batchserve.files import bundled_sets, parse_path, parse_recorded
from batchserve.options import parse_integers


def add_bench_parser(commands: Any) -> None:
    """Adds `bench` and its subcommands. commands: the result of ArgumentParser.add_subparsers()."""
    bench = commands.add_parser(
        "bench", allow_abbrev=False, help="measure drafters on recorded responses, or a running server"
    )
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    replay = kinds.add_parser(
        "replay",
        allow_abbrev=False,
        help="drafters on recorded responses, without a model",
        description=(
            "Target-guided replay: what each drafter would be worth to the model that gave the recorded responses. "
            'FILE has one JSON object a line: "prompt", "response" and, optionally, "reference" (a list of documents).'
        ),
    )
    _add_replay_flags(replay)
    replay.set_defaults(run=_replay)
    add_serve_parser(kinds)


def _add_replay_flags(parser: argparse.ArgumentParser) -> None:
    sets = ", ".join(bundled_sets())
    parser.add_argument(
        "file", type=parse_recorded, metavar="FILE", help=f"the recorded requests, as JSONL, or a bundled set: {sets}"
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="T",
        help="a Hugging Face folder, a tokenizer.json, a SentencePiece .model, 'bundled', or 'mistral-v1' (the "
        "SentencePiece model that comes with batchserve[bench])",
    )
    parser.add_argument("--drafter", required=True, type=_names, metavar="D[,D...]", help="the drafters to compare")
    parser.add_argument(
        "--max-draft-tokens",
        type=parse_integers,
        default=(16,),
        metavar="K[,K...]",
        help="the most draft tokens of one request in one step (default: 16)",
    )
    warm = parser.add_mutually_exclusive_group()
    warm.add_argument("--warm", type=parse_recorded, metavar="FILE", help="let the drafters see these requests before")
    warm.add_argument(
        "--warm-share",
        type=float,
        metavar="S",
        help="let them see the first S of FILE before, in (0, 1), and measure on the rest",
    )
    parser.add_argument("--streams", type=int, default=1, metavar="N", help="requests that run at once (default: 1)")
    parser.add_argument("--limit", type=int, metavar="N", help="read only the first N requests of FILE (default: all)")
    parser.add_argument("--json", type=parse_path, metavar="OUT", help="write the results to this file")
    parser.add_argument(
        "--plot", type=parse_path, metavar="PNG", help="plot acceptance length against draft tokens a step"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _replay(arguments: argparse.Namespace) -> int:
    from batchserve.bench.options import ReplayOptions
    from batchserve.bench.replay_command import run_replay

    options = ReplayOptions(
        file=arguments.file,
        tokenizer=arguments.tokenizer,
        drafters=arguments.drafter,
        max_draft_tokens=arguments.max_draft_tokens,
        warm_file=arguments.warm,
        warm_share=arguments.warm_share,
        streams=arguments.streams,
        limit=arguments.limit,
        json_file=arguments.json,
        plot_file=arguments.plot,
    )
    return run_replay(options)
