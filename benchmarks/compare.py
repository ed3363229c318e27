"""tokens/s of this checkout over those of another one, paired.

    git worktree add /tmp/base COMMIT
    python -m benchmarks.compare /tmp/base [--model bundled] [--sizes 1 4 16] [--rounds 9] [--name compare]

Each checkout answers in a process of its own, which stays; in every round both answer the same prompts, one after the
other in changing order. A ratio is the median of the rounds'. Tokens must be the same (exit status 1 otherwise).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, spread, write_results

# The program of each checkout: a line of JSON comes in for every batch, one goes out.
WORKER = """
import json, sys, time
from batchserve import LLM, SamplingParams, SpeculationParams
from benchmarks.common import chat_prompts
llm, prompts = LLM(sys.argv[1], max_num_seqs=16, **json.loads(sys.argv[2])), chat_prompts(1000, 7)
print("ready", flush=True)
for line in sys.stdin:
    first, size, is_on, tokens, temperature = json.loads(line)
    speculation = SpeculationParams(is_enabled=is_on, draft_scope="request")
    params, began_s = SamplingParams(temperature=temperature, seed=first, max_tokens=tokens), time.perf_counter()
    outputs = llm.generate(prompts[first : first + size], params, speculation=speculation, show_progress=False)
    seconds = time.perf_counter() - began_s
    print(json.dumps([seconds, [[*each.token_ids] for each in outputs]]), flush=True)
"""


class Checkout:
    """A process that answers with the code of one checkout."""

    def __init__(self, folder: Path, model: str, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, model, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )

    def answer(self, *question: Any) -> Any:
        self.tell(json.dumps(question))
        return json.loads(self.line())

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="folder of the other checkout")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="num_threads of both; each chooses its own by default")
    parser.add_argument("--name", default="compare", help="of the JSON under benchmarks/results")
    args = parser.parse_args()
    options = {"dtype": args.dtype, "num_threads": args.threads}
    checkouts = [Checkout(folder, args.model, options) for folder in (args.base.resolve(), ROOT)]
    try:
        if any(each.line() != "ready\n" for each in checkouts):
            raise SystemExit("a checkout cannot answer; its error is above")
        cells = {
            f"{size} requests, {'on' if is_on else 'off'}": compare(checkouts, size, is_on, args)
            for size in args.sizes
            for is_on in (False, True)
        }
    finally:
        for each in checkouts:
            each.close()
    base = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=args.base, capture_output=True, text=True)
    asked = {"base": base.stdout.strip(), "model": args.model, **options, "rounds": args.rounds}
    print(f"written to {write_results(args.name, asked | {'cells': cells})}")
    return int(any(cell["different_answers"] for cell in cells.values()))


def compare(checkouts: list[Checkout], size: int, is_on: bool, args: argparse.Namespace) -> dict[str, Any]:
    """The first round warms up."""
    ratios, speeds, different = [], [], 0
    for number in range(args.rounds + 1):
        order = checkouts if number % 2 else checkouts[::-1]
        answers = {each: each.answer(number * size, size, is_on, args.tokens, args.temperature) for each in order}
        (base_s, base), (new_s, new) = (answers[each] for each in checkouts)
        different += sum(a != b for a, b in zip(base, new, strict=True))
        if number:
            count = sum(map(len, new))
            ratios.append(base_s / new_s)
            speeds.append((count / base_s, count / new_s))
    found = {
        "ratio": spread(ratios),
        "base_tokens_per_s": statistics.median(base for base, _ in speeds),
        "tokens_per_s": statistics.median(new for _, new in speeds),
        "different_answers": different,
    }
    print(f"{size} requests, {'on' if is_on else 'off'}: {found['ratio']}, {different} answers differ", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
