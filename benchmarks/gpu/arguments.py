"""What run.py is told on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

# In order of importance, with their shares of the time; what one leaves goes to those behind it.
PARTS = {
    "correctness": 0.13,
    "equivalence": 0.11,
    "step_time": 0.30,
    "replay": 0.21,
    "transformers": 0.14,
    "memory": 0.04,
    "gap": 0.07,
}


def parse(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Ends the process where they are wrong, before any minute is spent."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together (default: 9)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--replay", type=Path, help="folder of recorded answers (default: the package's few)")
    parser.add_argument("--parts", type=_parts, default=tuple(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--cells", type=_patterns, default=(), metavar="A,B", help="only cells that one of these patterns fits"
    )
    parser.add_argument("--most-rows", type=int, metavar="N", help="of step_time's steps, and of graphs for them")
    parser.add_argument("--backend", default="auto", help="attention backend of the engines (default: the fastest)")
    parser.add_argument("--compile", action="store_true", help="let FlashInfer compile modules that are not there")
    parser.add_argument("--resume", action="store_true", help="keep what --out has, and measure what is missing")
    parser.add_argument("--eager", action="store_true", help="engines without graphs")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    args = parser.parse_args(arguments)
    if args.minutes <= 0:
        parser.error("--minutes: must be above 0")
    if args.most_rows is not None and args.most_rows < 1:
        parser.error(f"--most-rows {args.most_rows}: must be at least 1")
    if args.replay is not None and not args.replay.is_dir():
        parser.error(f"--replay {args.replay}: is no folder")
    if args.replay is not None and (missing := _missing(args.replay)):
        parser.error(f"--replay {args.replay}: {missing}")
    return args


def _missing(replay: Path) -> str | None:
    """What keeps recorded answers from being read, said before any minute is spent."""
    from batchserve.bench.tokenizer import MISTRAL_V1, load_encoder
    from batchserve.errors import ConfigError
    from benchmarks.gpu.answers import SETS

    if any((replay / f"{name}.tokens.json").exists() for name in SETS):
        return None
    if not any(path for name in SETS for path in replay.glob(f"{name}.*jsonl")):
        return f"has none of the sets {', '.join(SETS)}"
    try:
        load_encoder(MISTRAL_V1)
    except ConfigError as error:
        return f"{error}; `python -m benchmarks.gpu.answers` makes of it, elsewhere, a folder that needs no tokenizer"
    return None


def _parts(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(PARTS)):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return tuple(name for name in PARTS if name in names)


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
