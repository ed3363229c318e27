"""What drafting costs, and what a bound on memory costs in acceptance.

    python -m benchmarks.draft_cost FOLDER [--tokenizer mistral-v1] [--drafters mixture,trie]

FOLDER holds replay sets (as benchmarks.replay takes). One core. Drafting: 16 requests of 16 nodes in one call, against
a scope that has seen the first 60% of a set. Update: microseconds a token, accepted three at a time. Prompt: 100,000
tokens. Stream: 2 million tokens go through one scope (all sets' responses, under renamings of the vocabulary that leave
nothing to match, then as they are); acceptance length at 16 nodes over the last tenth, by the scope's bound.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from batchserve.bench.records import load_records
from batchserve.bench.replay import SCOPE, ReplayRecord, preload, simulate
from batchserve.bench.tokenizer import Encode, load_encoder
from batchserve.config import DraftConfig, EngineConfig, MiB
from batchserve.draft.base import Drafter, DraftQuery, DraftRequest
from batchserve.draft.factory import SHARING, create_drafter
from batchserve.draft.kernels import KernelLoader
from batchserve.errors import ConfigError
from benchmarks.common import find_sets, refusing_bad_input, write_results

REQUESTS, NODES, STEPS = 16, 16, 200
STREAMED = 2_000_000
MIN_TOKENS = STREAMED // 1000  # of all answers: token ids of more copies would not fit
BOUNDS = (4, 16, 64, 1024)


def make(name: str, scope_mib: int = 64) -> Drafter:
    draft = DraftConfig(max_scope_bytes=scope_mib * MiB, max_draft_bytes=max(256, 2 * scope_mib) * MiB)
    drafter = create_drafter(name, EngineConfig(decoding_length=NODES, draft=draft), 0)
    KernelLoader(in_background=False).prepare(type(drafter).__module__)
    return drafter


def cost(name: str, records: list[ReplayRecord]) -> dict[str, float]:
    drafter, split = make(name), len(records) * 3 // 5
    preload(records[:split], drafter)
    running = {f"r{i}": record for i, record in enumerate(records[split : split + REQUESTS])}
    for request_id, record in running.items():
        drafter.start(DraftRequest(request_id, record.prompt_token_ids, scope=SCOPE))
    proposals, updates = [], []
    queries = [DraftQuery(request_id, NODES, NODES) for request_id in running]
    for step in range(STEPS):
        begun_s = time.perf_counter()
        drafter.propose(queries)
        proposals.append(time.perf_counter() - begun_s)
        for request_id, record in running.items():
            at = 3 * step % max(1, len(record.response_token_ids) - 3)
            tokens = record.response_token_ids[at : at + 3]
            begun_s = time.perf_counter()
            drafter.accept(request_id, tokens)
            drafter.share(request_id, tokens)
            updates.append((time.perf_counter() - begun_s) / len(tokens))
    prompt = [token for record in records for token in record.prompt_token_ids + record.response_token_ids][:100_000]
    begun_s = time.perf_counter()
    drafter.start(DraftRequest("long", prompt))
    prompt_s = time.perf_counter() - begun_s
    return {
        "propose_16x16_ms_median": statistics.median(proposals) * 1e3,
        "update_us_median": statistics.median(updates) * 1e6,
        "prompt_tokens": len(prompt),
        "prompt_s": prompt_s,
    }


def stream(name: str, scope_mib: int, records: list[ReplayRecord]) -> dict[str, float]:
    drafter = make(name, scope_mib)
    total = sum(len(record.response_token_ids) for record in records)
    last, count = [], 0
    for record in reversed(records):
        if count >= STREAMED // 10:
            break
        last.append(record)
        count += len(record.response_token_ids)
    first = records[: len(records) - len(last)]
    size = 1 + max(max(record.response_token_ids) for record in records)
    copies = -(-(STREAMED - total) // total)
    most = 0
    for copy in range(copies, -1, -1):
        part = records if copy else first
        for at in range(0, len(part), 50):
            renamed = [
                ReplayRecord([0], [token + copy * size for token in r.response_token_ids], [])
                for r in part[at : at + 50]
            ]
            preload(renamed, drafter)
            most = max(most, drafter.memory_bytes())
    stats = simulate(last[::-1], drafter, NODES)
    return {
        "scope_mib": scope_mib,
        "streamed_tokens": (copies + 1) * total,
        "most_bytes": max(most, drafter.memory_bytes()),
        "acceptance_length_of_the_last_tenth": stats.acceptance_length,
    }


def read_answers(path: Path, encode: Encode) -> list[ReplayRecord]:
    """Those of at least two tokens: of others nothing is drafted. Raises ConfigError."""
    records = [record for record in load_records(path, encode) if len(record.response_token_ids) > 1]
    if not records:
        raise ConfigError(f"{path}: no answer has two tokens")
    return records


@refusing_bad_input()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", default="mistral-v1")
    parser.add_argument("--drafters", default="mixture,trie")
    args = parser.parse_args()
    names = args.drafters.split(",")
    if not set(names) <= set(SHARING):
        raise ConfigError(f"--drafters {args.drafters}: must be of {', '.join(SHARING)}")
    encode = load_encoder(args.tokenizer)
    sets = [read_answers(path, encode) for path in find_sets(args.folder).values()]
    everything = [record for records in sets for record in records]
    total = sum(len(record.response_token_ids) for record in everything)
    if total < MIN_TOKENS:
        raise ConfigError(f"{args.folder}: its answers have {total} tokens together; must be at least {MIN_TOKENS}")
    random.Random(0).shuffle(everything)
    results: dict[str, Any] = {}
    for name in names:
        results[name] = {"cost": cost(name, max(sets, key=len)), "stream": []}
        print(name, results[name]["cost"], flush=True)
        for scope_mib in BOUNDS:
            results[name]["stream"].append(stream(name, scope_mib, everything))
            print(name, results[name]["stream"][-1], flush=True)
    write_results("draft_cost", results)


if __name__ == "__main__":
    main()
