"""What a prompt takes where thousands wait, over what it takes where few do.

    python -m benchmarks.waiting [--few 500] [--many 8000] [--rounds 5]

The bundled model, offline: all prompts, of three tokens, are handed over at once and are given two tokens each, so that
most of the time goes into letting requests in and out. Runs of few and of many take turns.
"""

from __future__ import annotations

import argparse
import time

from batchserve import LLM, SamplingParams
from benchmarks.common import spread, write_results

TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


def prompt_ms(llm: LLM, count: int) -> float:
    """Milliseconds of each of so many prompts."""
    prompts = [[5 + i % 4000, 6, 7 + i % 90] for i in range(count)]
    started_s = time.perf_counter()
    llm.generate(prompts, TWO, show_progress=False)
    return (time.perf_counter() - started_s) / count * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", type=int, default=500)
    parser.add_argument("--many", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm = LLM("bundled")
    prompt_ms(llm, args.few)  # warms up
    rounds = [(prompt_ms(llm, args.few), prompt_ms(llm, args.many)) for _ in range(args.rounds)]
    found = {
        "few": args.few,
        "many": args.many,
        "prompt_ms_few": spread([few for few, _ in rounds]),
        "prompt_ms_many": spread([many for _, many in rounds]),
        "many_over_few": spread([many / few for few, many in rounds]),
    }
    print(found, flush=True)
    print(write_results("waiting", found), flush=True)


if __name__ == "__main__":
    main()
