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

from batchserve.bench.options import ReplayOptions
from batchserve.bench.replay_command import as_json, measure, read_requests
from batchserve.errors import ConfigError
from batchserve.options import parse_integers
from benchmarks.common import RESULTS, environment, find_sets, refusing_bad_input

WARM_SHARE = 0.6


@refusing_bad_input()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", help="default: every .jsonl of the folder")
    parser.add_argument("--drafters", default="mixture,trie,reference")
    parser.add_argument("--max-draft-tokens", type=parse_integers, default=(16, 32, 64))
    parser.add_argument("--tokenizer", default="mistral-v1")
    parser.add_argument("--out", type=Path, default=RESULTS / "replay")
    args = parser.parse_args()
    todo = []
    for name, path in find_sets(args.folder, args.sets.split(",") if args.sets else ()).items():
        for kind, warm_share in (("cold", None), ("warm", WARM_SHARE)):
            options = ReplayOptions(
                file=path,
                tokenizer=args.tokenizer,
                drafters=tuple(args.drafters.split(",")),
                max_draft_tokens=args.max_draft_tokens,
                warm_share=warm_share,
            )
            try:  # all of them before any is measured
                todo.append((name, kind, options, read_requests(options)))
            except ConfigError as error:
                raise ConfigError(f"{name}, {kind}: {error}") from error
    args.out.mkdir(parents=True, exist_ok=True)
    for name, kind, options, requests in todo:
        results = measure(options, *requests)
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
