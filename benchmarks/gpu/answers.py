"""Recorded answers as token ids, also where the tokenizer's packages are not installed.

    python -m benchmarks.gpu.answers REPLAY_FOLDER OUT_FOLDER

writes SET.tokens.json for every SET.*.jsonl: what a machine without mistral-common is to be given as --replay. These
files hold the recorded texts: the licences of the sets are theirs too.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

from batchserve.bench.records import load_records
from batchserve.bench.replay import ReplayRecord
from batchserve.bench.tokenizer import MISTRAL_V1, load_encoder

SETS = ("llma_rag", "gsm_qwen2_7b", "mbpp_gpt4", "crux_qwen25_7b")  # the paper's own case first
VOCAB_SIZE = 32_000
MOST_RECORDS = 400  # of one set


def load(folder: Path | None, name: str) -> list[ReplayRecord]:
    """A set's records with at least two tokens of answer; without a folder, made-up ones.

    Raises ConfigError where the tokenizer is missing, FileNotFoundError where the set is.
    """
    if folder is None:
        return made_up()
    ready = folder / f"{name}.tokens.json"
    if ready.exists():
        records = [ReplayRecord(**fields) for fields in json.loads(ready.read_text())]
    else:
        found = sorted(folder.glob(f"{name}.*jsonl"))
        if not found:
            raise FileNotFoundError(f"{folder}: has no set {name}")
        records = load_records(found[0], load_encoder(MISTRAL_V1), MOST_RECORDS)
    return [record for record in records if len(record.response_token_ids) > 1]


def made_up(count: int = 40, prompt: int = 48, answer: int = 40) -> list[ReplayRecord]:
    """Answers half of which are quoted from their prompts, a few tokens at a time."""
    rng, records = random.Random(0), []
    for _ in range(count):
        asked = [rng.randrange(3, VOCAB_SIZE) for _ in range(prompt)]
        given: list[int] = []
        while len(given) < answer:
            start = rng.randrange(prompt - 8)
            given += asked[start : start + 8] if rng.random() < 0.5 else [rng.randrange(3, VOCAB_SIZE)] * 4
        records.append(ReplayRecord(asked, given[:answer], []))
    return records


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        try:
            records = load(source, name)
        except FileNotFoundError as error:
            print(error)
            continue
        path = out / f"{name}.tokens.json"
        path.write_text(json.dumps([asdict(record) for record in records]))
        print(f"{path}: {len(records)} records, {path.stat().st_size / (1 << 20):.1f} MiB")


if __name__ == "__main__":
    main()
