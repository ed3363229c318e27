"""Speed and memory of weights in the engine's own huge pages, and in pages of 4 KiB of the file (--share-weights).

    python -m benchmarks.pages [--models bundled smollm2] [--rounds 3]

One request without drafts, in turns, each in a process of its own that begins with the kept program. Memory is that of
the process, and of this its own pages: those of the mapped file are the machine's once, however many engines map them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOKENS, PROMPT_TOKENS, REPEATS = 64, 32, 12
MODES = ("own pages", "shared")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bundled", "smollm2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(args.worker[0], args.worker[1] == MODES[1])))
        return
    # Only here: the worker's memory is measured.
    from benchmarks.common import write_results
    from benchmarks.peers.models import model_folder

    results: dict[str, Any] = {}
    for name in args.models:
        folder = str(model_folder(name))
        run(folder, MODES[0])  # which keeps the program
        found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for _ in range(args.rounds):
            for mode in MODES:
                found[mode].append(run(folder, mode))
        results[name] = {
            mode: {key: statistics.median(each[key] for each in runs) for key in runs[0]}
            for mode, runs in found.items()
        }
        results[name]["speed of shared over own"] = [
            shared["tokens_per_s"] / own["tokens_per_s"] for own, shared in zip(*found.values(), strict=True)
        ]
        print(f"{name}: {json.dumps(results[name], indent=1)}", flush=True)
    print(f"written to {write_results('pages', results)}")


def run(folder: str, mode: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.pages", "--worker", folder, mode],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(folder: str, is_shared: bool) -> dict[str, float]:
    from batchserve import LLM, SamplingParams

    llm = LLM(folder, drafter="none", share_weights=is_shared)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    prompt = [*range(3, 3 + PROMPT_TOKENS)]
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        llm.generate([prompt], params)
        seconds.append(time.perf_counter() - start)
    return {"tokens_per_s": TOKENS / statistics.median(seconds), **memory()}


def memory() -> dict[str, float]:
    """Returns MiB: resident, of these the process's own (written) pages, and those in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return {"resident": sizes["Rss"], "own": sizes["Private_Dirty"], "huge pages": sizes["AnonHugePages"]}


if __name__ == "__main__":
    main()
