"""An engine of several ranks beside one of one process: the same tokens? Steps, bytes and tokens a second.

    python -m benchmarks.lookahead_ranks [--ranks 2] [--rounds 5]

The bundled model answers its prompts, `--concurrency` at once, in both engines, which take turns. Drafts come from each
request's own text, by a fixed decoding length, so that both engines draft alike. Step compression is tokens over steps.
On a machine with few cores the ranks share what one process has for itself.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from batchserve.demo.prompts import PROMPTS
from batchserve.llm import LLM
from batchserve.parallel.lookahead import LookaheadExecutor
from batchserve.types import SamplingParams, SpeculationParams
from benchmarks.common import spread, write_results

PARAMS, ALONE = SamplingParams(temperature=0.0, max_tokens=96), SpeculationParams(draft_scope="request")
DECODING_LENGTH = 32


class Counted:
    """An engine whose steps are counted."""

    def __init__(self, num_ranks: int, concurrency: int) -> None:
        options = {"lookahead_parallel_size": num_ranks, "max_num_seqs": concurrency}
        self.llm = LLM("bundled", decoding_length=DECODING_LENGTH, **options)  # type: ignore[arg-type]
        self.executor, self.num_steps = self.llm._core.executor, 0
        launch = self.executor.launch

        def counting(batch: Any) -> Any:
            self.num_steps += 1
            return launch(batch)

        self.executor.launch = counting  # type: ignore[method-assign]

    @property
    def num_bytes(self) -> int:
        return self.executor.ranks.num_bytes if isinstance(self.executor, LookaheadExecutor) else 0

    def answer(self) -> tuple[list[list[int]], dict[str, float]]:
        begun_s, steps, num_bytes = time.perf_counter(), self.num_steps, self.num_bytes
        prompts = [each.text for each in PROMPTS]
        outputs = self.llm.generate(prompts, PARAMS, speculation=ALONE, show_progress=False)
        seconds, steps = time.perf_counter() - begun_s, self.num_steps - steps
        tokens = [[*output.token_ids] for output in outputs]
        count = sum(map(len, tokens))
        return tokens, {
            "tokens_per_s": count / seconds,
            "tokens_per_step": count / steps,
            "bytes_per_step": (self.num_bytes - num_bytes) / steps,
        }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    engines = {1: Counted(1, args.concurrency), args.ranks: Counted(args.ranks, args.concurrency)}
    found: dict[int, list[dict[str, float]]] = {number: [] for number in engines}
    num_different = 0
    for number in range(args.rounds + 1):
        tokens = {}
        for num_ranks, engine in engines.items():
            tokens[num_ranks], figures = engine.answer()
            if number:  # the first round warms up
                found[num_ranks].append(figures)
        num_different += sum(a != b for a, b in zip(tokens[1], tokens[args.ranks], strict=True))
    one, several = found[1], found[args.ranks]
    return {
        "ranks": args.ranks,
        "concurrency": args.concurrency,
        "decoding_length": DECODING_LENGTH,
        "answers": len(PROMPTS) * (args.rounds + 1),
        "answers_that_differ": num_different,
        "one": {name: spread([each[name] for each in one]) for name in one[0]},
        "several": {name: spread([each[name] for each in several]) for name in several[0]},
        "several_over_one": {
            name: spread([b[name] / a[name] for a, b in zip(one, several, strict=True)])
            for name in ("tokens_per_s", "tokens_per_step")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    found = measure(parser.parse_args())
    print(json.dumps(found, indent=1))
    print(write_results("lookahead_ranks", found), flush=True)


if __name__ == "__main__":
    main()
