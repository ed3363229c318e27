"""Acceptance length of every drafter on recorded responses, cold and warm; the tables of docs/drafting.md.

python -m benchmarks.replay FOLDER [--sets gsm_qwen2_7b,...] [--drafters mixture,trie,reference]
                                   [--max-draft-tokens 16,32,64] [--tokenizer mistral-v1] [--out FOLDER]

FOLDER holds one JSONL a set, in the form of batchserve/data/replay. Cold: empty at the start, accumulating. Warm: the
first 60% by file order were seen before, measured on the rest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from batchserve.bench.replay_command import ReplayOptions, as_json, measure, read_requests
from benchmarks.common import RESULTS, environment

WARM_SHARE = 0.6


def set_name(path: Path) -> str:
    """gsm_qwen2_7b of gsm_qwen2_7b.dev.jsonl."""
    return path.name.partition(".")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", help="default: every .jsonl of the folder")
    parser.add_argument("--drafters", default="mixture,trie,reference")
    parser.add_argument("--max-draft-tokens", default="16,32,64")
    parser.add_argument("--tokenizer", default="mistral-v1")
    parser.add_argument("--out", type=Path, default=RESULTS / "replay")
    args = parser.parse_args()
    found = {set_name(path): path for path in sorted(args.folder.glob("*.jsonl"))}
    names = args.sets.split(",") if args.sets else list(found)
    if not names or not set(names) <= set(found):
        parser.error(f"{args.folder} has the sets {', '.join(found) or '(none)'}, not {args.sets or 'any'}")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        for kind, warm_share in (("cold", None), ("warm", WARM_SHARE)):
            options = ReplayOptions(
                file=found[name],
                tokenizer=args.tokenizer,
                drafters=tuple(args.drafters.split(",")),
                max_draft_tokens=tuple(int(number) for number in args.max_draft_tokens.split(",")),
                warm_share=warm_share,
            )
            results = measure(options, *read_requests(options))
            payload = {"environment": environment(), "tokenizer": args.tokenizer, **as_json(options, results)}
            (args.out / f"{name}_{kind}.json").write_text(json.dumps(payload, indent=1) + "\n")
            for result in results:
                print(
                    f"{name} {kind}: {result.drafter} {result.max_draft_tokens}: {result.acceptance_length:.2f} tokens "
                    f"a step, {result.draft_tokens_per_step:.1f} drafted, retrieve {result.retrieve_us:.1f} us, "
                    f"update {result.update_us:.2f} us, {result.memory_bytes / 2**20:.1f} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
