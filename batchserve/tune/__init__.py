"""`batchserve tune`: finds the best options for a workload on this machine. Heavy modules are imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchserve.files import bundled_sets, parse_path, parse_recorded
from batchserve.options import parse_integers

if TYPE_CHECKING:
    from batchserve.config import EngineConfig

# Engine options that the sweep decides, and options that do not affect its measurements.
NOT_TUNED_OPTIONS = (
    *("max_num_seqs", "num_threads", "adaptive", "decoding_length", "tpot_target_ms"),
    *("wait_for_drafter", "draft_cache", "served_model_name", "max_waiting", "max_priority_wait_s"),
)


def add_tune_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the sweep. The command line adds those of the engine."""
    parser.add_argument(
        "--workload",
        type=parse_recorded,
        required=True,
        metavar="FILE",
        help='the requests, as JSONL: "prompt", and "max_tokens" or "response" (whose length counts); "reference"; '
        f"or a bundled set: {', '.join(bundled_sets())}",
    )
    parser.add_argument(
        "--tpot-target-ms",
        dest="target_ms",  # not EngineConfig's field of that name
        type=float,
        metavar="X",
        help="the time per output token that 99%% of the requests are to stay within (default: none)",
    )
    parser.add_argument(
        "--max-num-seqs",
        dest="sizes",
        type=parse_integers,
        default=(2, 4, 8, 16),
        metavar="N[,N...]",
        help="how many requests run at once (default: 2,4,8,16)",
    )
    parser.add_argument(
        "--threads",
        type=parse_integers,
        metavar="T[,T...]",
        help="compute threads (default: this machine's cores, half and a quarter of them; beside a GPU all)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="measure each setting on the first N requests of FILE (default: 4 x the largest --max-num-seqs, if FILE "
        "has as many)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="measure every setting so many times, in turn with the others (default: 3; fewer tell nothing apart)",
    )
    parser.add_argument(
        "--out",
        type=parse_path,
        metavar="DIR",
        help="a folder for tune.json, which has every figure (default: it is not written)",
    )
    parser.add_argument(
        "--html",
        type=parse_path,
        default=Path("tune_report.html"),
        metavar="FILE",
        help="the report with its plots (default: tune_report.html)",
    )
    parser.add_argument("--no-html", dest="html", action="store_const", const=None, help="write no report")


def run_tune_command(arguments: argparse.Namespace, config: EngineConfig, serve_flags: Sequence[str]) -> int:
    """Tunes a server of `config` and returns the exit status. serve_flags: `config` as command-line flags."""
    from batchserve.tune.command import run_tune
    from batchserve.tune.options import TuneOptions

    options = TuneOptions(
        config=config,
        workload=arguments.workload,
        max_num_seqs=arguments.sizes,
        threads=arguments.threads,
        tpot_target_ms=arguments.target_ms,
        num_requests=arguments.requests,
        num_repeats=arguments.repeats,
        out=arguments.out,
        html=arguments.html,
        serve_flags=tuple(serve_flags),
    )
    return run_tune(options)
