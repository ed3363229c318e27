"""Recorded answers as token ids, also where the tokenizer's packages are not installed.

    python -m benchmarks.gpu.answers REPLAY_FOLDER OUT_FOLDER

writes SET.tokens.json for every SET.*.jsonl: what a machine without mistral-common is to be given as --replay. These
files hold the recorded texts: the licences of the sets are theirs too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from batchserve.bench.records import load_records
from batchserve.bench.replay import ReplayRecord
from batchserve.bench.tokenizer import BUNDLED, MISTRAL_V1, load_encoder

# The paper's own case first; the last is a chat of several turns.
SETS = ("llma_rag", "gsm_qwen2_7b", "mbpp_gpt4", "crux_qwen25_7b", "selfrefine_yelp")
EXCERPTS = ("gsm_qwen2_7b", "crux_qwen25_7b", "gsm8k_gpt3_175b")  # of which the package has a few records
MAX_RECORDS = 400  # of one set


def set_names(folder: Path | None) -> tuple[str, ...]:
    """The sets of a folder of recorded answers; without one, those that the package has."""
    return EXCERPTS if folder is None else SETS


def load(folder: Path | None, name: str) -> list[ReplayRecord]:
    """A set's records with at least two tokens of answer; without a folder, the package's, in its own tokens.

    Raises ConfigError where the tokenizer is missing, FileNotFoundError where the set is.
    """
    if folder is None:
        excerpts = Path(str(resources.files("batchserve"))) / "data" / "replay"
        return _answered(load_records(excerpts / f"{name}.jsonl", load_encoder(BUNDLED), MAX_RECORDS))
    ready = folder / f"{name}.tokens.json"
    if ready.exists():
        records = [ReplayRecord(**fields) for fields in json.loads(ready.read_text())]
    else:
        found = sorted(folder.glob(f"{name}.*jsonl"))
        if not found:
            raise FileNotFoundError(f"{folder}: has no set {name}")
        records = load_records(found[0], load_encoder(MISTRAL_V1), MAX_RECORDS)
    return _answered(records)


def _answered(records: list[ReplayRecord]) -> list[ReplayRecord]:
    return [record for record in records if len(record.response_token_ids) > 1]


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
