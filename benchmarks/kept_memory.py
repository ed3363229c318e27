"""What it gains on a CPU that freed memory is kept (batchserve/malloc.py): tokens/s, kept against glibc's own way.

    python -m benchmarks.kept_memory [--pairs 8]

The bundled model's own tasks, 16 requests at once, speculation off and on. The setting is a whole process's, so every
run is a process of its own; runs with and without it take turns, and a ratio is of two runs that follow each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.common import chat_prompts, spread, write_results

from batchserve import LLM, SamplingParams  # isort: skip

REQUESTS, PROMPTS, ROUNDS, TOKENS = 16, 48, 6, 128
DRAFTERS = {"off": "none", "on": "mixture"}
GLIBCS_OWN = {"LD_PRELOAD": ""}  # a user who has chosen an allocator himself is left alone


def tokens_per_s(drafter: str) -> float:
    """Median of some rounds of the same prompts, each with a draft scope of its own."""
    llm = LLM(max_num_seqs=REQUESTS, drafter=drafter, default_draft_scope="request")
    prompts, params = chat_prompts(PROMPTS, seed=5), SamplingParams(temperature=0.0, max_tokens=TOKENS)
    rates = []
    for number in range(ROUNDS + 1):
        begun_s = time.perf_counter()
        outputs = llm.generate(prompts, params, show_progress=False)
        if number:
            rates.append(sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - begun_s))
    return statistics.median(rates)


def in_a_process(drafter: str, extra: dict[str, str]) -> float:
    command = [sys.executable, "-m", "benchmarks.kept_memory", "--child", drafter]
    done = subprocess.run(command, env={**os.environ, **extra}, check=True, stdout=subprocess.PIPE, text=True)
    rate: float = json.loads(done.stdout.splitlines()[-1])
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--child", metavar="DRAFTER", help="measure in this process, and print it")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(tokens_per_s(args.child)))
        return
    results: dict[str, Any] = {}
    for name, drafter in DRAFTERS.items():
        pairs = [(in_a_process(drafter, {}), in_a_process(drafter, GLIBCS_OWN)) for _ in range(args.pairs)]
        results[name] = {
            "kept_tokens_per_s": spread([kept for kept, _ in pairs]),
            "returned_tokens_per_s": spread([returned for _, returned in pairs]),
            "ratio": spread([kept / returned for kept, returned in pairs]),
        }
        print(name, {key: round(value["median"], 3) for key, value in results[name].items()}, flush=True)
    write_results("kept_memory", {"requests": REQUESTS, "prompts": PROMPTS, "speculation": results})


if __name__ == "__main__":
    main()
