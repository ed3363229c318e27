"""How long a match and how long a copy: LLMA's figures 3 and 4, and its cache-assisted scenario, on recorded answers.

    python -m benchmarks.reference_ablation SET.jsonl [SET.jsonl ...] [--tokenizer mistral-v1] [--out FOLDER]

A set is a JSONL of requests in the form of batchserve/data/replay. For n (the least match) 1 to 3 and k (the copy's
length) 4 to 18: steps, steps with a draft (triggers), and accepted tokens, by target-guided replay. Every request is
by itself: answers are not cached.

The cache-assisted scenario has no public data, so it is made of each set: prompts are near-duplicates if the sets of
their rare tokens overlap by 0.3 (Jaccard); rare is a token that at most a fifth of the prompts have, so that what all
of them share, the instructions, counts for nothing. In file order, a prompt joins the first one of the group that it is
most similar to, or begins a group. The first answers are cached, the others are measured, with the cache and without.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchserve.bench.records import load_records
from batchserve.bench.replay import ReplayRecord, ReplayStats, preload, simulate
from batchserve.bench.tokenizer import load_encoder
from batchserve.draft.base import DraftQuery, DraftTree
from batchserve.draft.reference import ReferenceDrafter
from benchmarks.common import RESULTS, environment, refusing_bad_input

MIN_MATCHES = (1, 2, 3)
COPY_LENGTHS = (4, 6, 8, 10, 12, 14, 16, 18)
RARE_SHARE = 0.2
NEAR_DUPLICATE = 0.3


class CountingDrafter(ReferenceDrafter):
    """Counts the drafts that are not empty."""

    triggers = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        trees = super().propose(queries)
        self.triggers += sum(len(tree) > 0 for tree in trees)
        return trees


def figures(records: list[ReplayRecord]) -> list[dict[str, Any]]:
    rows = []
    for least in MIN_MATCHES:
        for length in COPY_LENGTHS:
            drafter = CountingDrafter(least, length, similar=0)
            stats = simulate(records, drafter, length)
            rows.append({"n": least, "k": length, "triggers": drafter.triggers, **summary(stats)})
            print(rows[-1], flush=True)
    return rows


def summary(stats: ReplayStats) -> dict[str, Any]:
    return {
        "steps": stats.num_steps,
        "tokens": stats.num_tokens,
        "accepted_tokens": stats.num_tokens - stats.num_steps,
        "draft_tokens": stats.num_draft_tokens,
        "acceptance_length": round(stats.acceptance_length, 3),
    }


def near_duplicates(records: list[ReplayRecord]) -> list[list[ReplayRecord]]:
    """Groups of at least two."""
    frequency = Counter(token for record in records for token in set(record.prompt_token_ids))
    rare = [
        {token for token in record.prompt_token_ids if frequency[token] <= RARE_SHARE * len(records)}
        for record in records
    ]
    groups: list[list[int]] = []
    for i, tokens in enumerate(rare):
        overlaps = [overlap(tokens, rare[group[0]]) for group in groups]
        best = max(range(len(groups)), key=overlaps.__getitem__, default=-1)
        if best >= 0 and overlaps[best] >= NEAR_DUPLICATE:
            groups[best].append(i)
        else:
            groups.append([i])
    return [[records[i] for i in group] for group in groups if len(group) > 1]


def overlap(a: set[int], b: set[int]) -> float:
    union = len(a | b)
    return len(a & b) / union if union else 0.0


def cache_assisted(records: list[ReplayRecord]) -> dict[str, Any]:
    groups = near_duplicates(records)
    result: dict[str, Any] = {"groups": len(groups), "measured_requests": sum(len(group) - 1 for group in groups)}
    if groups:
        firsts, others = [group[0] for group in groups], [record for group in groups for record in group[1:]]
        for name, similar in (("with_cache", 4), ("without_cache", 0)):
            drafter = ReferenceDrafter(similar=similar)
            preload(firsts, drafter)
            result[name] = summary(simulate(others, drafter, 16))
    print(result, flush=True)
    return result


@refusing_bad_input()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", type=Path, nargs="+")
    parser.add_argument("--tokenizer", default="mistral-v1")
    parser.add_argument("--out", type=Path, default=RESULTS / "ablation")
    args = parser.parse_args()
    encode = load_encoder(args.tokenizer)
    args.out.mkdir(parents=True, exist_ok=True)
    for path in args.sets:
        name = path.name.partition(".")[0]
        records = load_records(path, encode)
        payload = {
            "environment": environment(),
            "set": name,
            "tokenizer": args.tokenizer,
            "requests": len(records),
            "figures_3_and_4": figures(records),
            "cache_assisted": cache_assisted(records),
        }
        (args.out / f"reference_{name}.json").write_text(json.dumps(payload, indent=1) + "\n")


if __name__ == "__main__":
    main()
