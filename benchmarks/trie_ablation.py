"""What each part of the trie drafter is worth: Lookahead's (KDD'24) tables 3 and 4 and figures 4, 5 and 7, by replay.

python -m benchmarks.trie_ablation FILE.jsonl [FILE.jsonl ...] [--limit 150] [--tokenizer mistral-v1] [--out FOLDER]

Every row is the acceptance length (tokens a step) over the first --limit requests of a file, cold, in one scope; those
of figure 7 are over its last --limit / 2 requests, after as many of the first ones as the row says.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchserve.bench.records import load_records
from batchserve.bench.replay import ReplayRecord, preload, simulate
from batchserve.bench.tokenizer import load_encoder
from batchserve.draft.base import DraftRequest
from batchserve.draft.trie import TrieDrafter, compile_kernels
from benchmarks.common import RESULTS, environment, refusing_bad_input

DECODING_LENGTH, BRANCH_LENGTH = 64, 12  # the paper's choice on most data sets
CAPACITY = 16 * DECODING_LENGTH
UNPRUNED = 1 << 30  # more nodes than a scope has room for
PARTS: dict[str, dict[str, Any]] = {
    "everything": {},
    "without prompt": {"is_inserting_prompts": False},
    "without output": {"is_inserting_outputs": False},
    "without pruning": {"capacity": UNPRUNED},
    "without eliminating": {"is_eliminating": False},
}
CAPACITIES = (1, 2, 4, 8, 16, 32, 64, 128)  # times the decoding length
DECODING_LENGTHS = (4, 8, 16, 32, 64, 128)
BRANCH_LENGTHS = (4, 8, 12, 16, 24, 32)
WARM_UPS = (0, 10, 30, 100, 200, 300, 400, 500)


class AblatedTrie(TrieDrafter):
    """The drafter without one of its parts, as in table 3: prompts or outputs are not drafted, or a prompt's branches
    stay in its scope's trie when its request ends (which shows them to other requests).
    """

    def __init__(
        self,
        *,
        is_inserting_prompts: bool = True,
        is_inserting_outputs: bool = True,
        is_eliminating: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._is_inserting_prompts = is_inserting_prompts
        self._is_inserting_outputs = is_inserting_outputs
        self._is_eliminating = is_eliminating
        self._prompts: dict[str, Sequence[int]] = {}  # by request id

    def start(self, request: DraftRequest) -> None:
        self._prompts[request.request_id] = request.prompt_token_ids
        if not self._is_inserting_prompts:
            request = replace(request, prompt_token_ids=[], references=())
        super().start(request)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        if self._is_inserting_outputs:
            super().accept(request_id, token_ids)
        else:  # a context for what is drafted, and nothing more
            self._requests[request_id].text.append(token_ids, len(token_ids))

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        if self._is_inserting_outputs:
            super().share(request_id, token_ids)

    def end(self, request_id: str) -> None:
        prompt, trie = self._prompts.pop(request_id), self._requests[request_id].trie
        if trie is not None and not self._is_eliminating:
            self._insert(trie, self._branches(), prompt)
        super().end(request_id)


def measure(records: list[ReplayRecord], warm: list[ReplayRecord] | None = None, **options: Any) -> dict[str, Any]:
    """One replay with these options of the drafter."""
    options = {"decoding_length": DECODING_LENGTH, "branch_length": BRANCH_LENGTH, **options}
    drafter = AblatedTrie(**options)
    preload(warm or [], drafter)
    stats = simulate(records, drafter, options["decoding_length"])
    return {
        **options,
        "acceptance_length": round(stats.acceptance_length, 4),
        "draft_tokens_per_step": round(stats.draft_tokens_per_step, 2),
        "retrieve_us": round(stats.retrieve_us, 1),
        "update_us": round(stats.update_us, 2),
        "memory_bytes": stats.memory_bytes,
        "steps": stats.num_steps,
        "tokens": stats.num_tokens,
    }


def lengths(records: list[ReplayRecord]) -> list[dict[str, Any]]:
    """Figures 4 and 5. The capacity stays that of the default lengths; a single branch is as long as the draft."""
    rows = []
    for mode in ("hierarchical", "parallel"):
        for decoding_length in DECODING_LENGTHS:
            for branch_length in BRANCH_LENGTHS:
                options = {"decoding_length": decoding_length, "branch_length": branch_length}
                rows.append(measure(records, mode=mode, capacity=CAPACITY, **options))
    for length in BRANCH_LENGTHS:
        options = {"decoding_length": length, "branch_length": length}
        rows.append(measure(records, mode="single", capacity=CAPACITY, **options))
    return rows


def ablate(records: list[ReplayRecord], limit: int) -> dict[str, list[dict[str, Any]]]:
    """One file: parts is table 3, capacities table 4, lengths_and_modes figures 4 and 5, warm_ups figure 7."""
    first, last = records[:limit], records[-(limit // 2) :]
    before = records[: len(records) - len(last)]
    return {
        "parts": [{"name": name, **measure(first, **options)} for name, options in PARTS.items()],
        "capacities": [measure(first, capacity=times * DECODING_LENGTH) for times in CAPACITIES],
        "lengths_and_modes": lengths(first),
        "warm_ups": [
            {"warm_up_responses": count, **measure(last, warm=before[:count])}
            for count in WARM_UPS
            if count <= len(before)
        ],
    }


@refusing_bad_input()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--limit", type=int, default=150)
    parser.add_argument("--tokenizer", default="mistral-v1")
    parser.add_argument("--out", type=Path, default=RESULTS / "ablation")
    args = parser.parse_args()
    if args.limit < 2:
        parser.error(f"--limit {args.limit}: must be at least 2")
    compile_kernels()
    args.out.mkdir(parents=True, exist_ok=True)
    encode = load_encoder(args.tokenizer)
    for file in args.files:
        records = load_records(file, encode)
        found = {"file": file.name, "tokenizer": args.tokenizer, "limit": min(args.limit, len(records))}
        tables = ablate(records, args.limit)
        name = file.name.partition(".")[0]
        payload = {"environment": environment(), **found, "requests": len(records), **tables}
        (args.out / f"trie_{name}.json").write_text(json.dumps(payload, indent=1) + "\n")
        for title, rows in tables.items():
            print(f"{name}: {title}", flush=True)
            for row in rows:
                names = ("name", "mode", "decoding_length", "branch_length", "capacity", "warm_up_responses")
                what = ", ".join(f"{key} {row[key]}" for key in names if key in row)
                drafted = f"{row['acceptance_length']:.2f} tokens a step, {row['draft_tokens_per_step']:.1f} drafted"
                print(f"  {drafted}: {what}")


if __name__ == "__main__":
    main()
