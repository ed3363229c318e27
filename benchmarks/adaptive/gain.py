"""How much faster decoding is than without drafts.

    python -m benchmarks.adaptive.gain FOLDER [--quick]

Recorded answers forced through random Llamas of about 90M and 430M parameters: the decode phase, adaptive over off, in
pairs of runs that take turns and give the same tokens, a part of each request's answer. "pooled": of all pairs
together, the time of one over that of the other. "off again": without drafts a second time in the same turns, which
shows what any figure is where nothing differs. End to end is calculated: the measured time of such a prompt computed
alone, and a whole answer of mean length at the rate of all requests together. How much of what could be had that is:
benchmarks.adaptive.ceiling, on the step times measured here.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from batchserve.request import GREEDY, Request
from benchmarks.adaptive.driver import Contender, Run, control, fixed, interleave, summary
from benchmarks.adaptive.workloads import (
    Lab,
    Options,
    Workload,
    lab,
    new_drafter,
    read_options,
    recorded_sets,
    say,
    write,
)
from benchmarks.common import refusing_bad_input

SIZES = (1, 2, 4, 8, 16)
SETS = ("llma_rag", "mbpp_gpt4")
PROMPTS = 3
FEW = 4  # requests


def prompt_s(bench: Lab, workload: Workload) -> float:
    """Seconds of computing a prompt of this set, nothing beside it: the median."""
    core, seconds = bench.engine.core, []
    for i, record in enumerate(workload.records[: PROMPTS + 1]):
        started_s = time.perf_counter()
        core.add(Request(f"prompt-{i}", record.prompt_token_ids, GREEDY, started_s))
        while core.has_work:
            core.step()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds[1:])  # the first warms up


def on_wall(bench: Lab, workload: Workload, options: Options) -> dict[str, Any]:
    cells = {}
    prefill_s = prompt_s(bench, workload)
    answer = statistics.mean(len(record.response_token_ids) for record in workload.records)
    for size in options.sizes(*SIZES):
        tokens = bench.tokens_each(size, workload, options)

        def run(contender: Contender, number: int, size: int = size, tokens: int = tokens) -> Run:
            return bench.driver.run_parts(workload.records, size, tokens, contender, seed=number)

        # The fewer requests at once, the more depends on which texts they are.
        pairs = options.pairs * (2 if size < FEW and not options.is_quick else 1)
        runs = interleave((fixed(0), bench.adaptive(), control()), pairs, run)
        found = {name: summary(of, runs["off"]) for name, of in runs.items()}
        rates = {name: sum(r.tokens for r in of) / sum(r.seconds for r in of) for name, of in runs.items()}
        whole_s = {name: prefill_s + answer / rate for name, rate in rates.items()}
        cells[str(size)] = {
            "tokens_of_a_request": tokens,
            "contenders": found,
            "pooled_over_off": round(rates["adaptive"] / rates["off"], 4),
            "end_to_end_over_off": round(whole_s["off"] / whole_s["adaptive"], 4),
        }
        say(f"{workload.name} x {size}: {cells[str(size)]['pooled_over_off']}, pairs {found['adaptive']['over_off']}")
    return {"prompt_s": round(prefill_s, 4), "sizes": cells}


@refusing_bad_input()
def main() -> None:
    started_s = time.perf_counter()
    options = read_options(__doc__, SETS)
    workloads = recorded_sets(options)
    results: dict[str, Any] = {}
    for shape in options.shapes:
        with lab(shape) as bench:
            results[shape] = {**bench.about(), "workloads": {}}
            for workload in workloads:
                say(f"{shape}, {workload.name}")
                bench.use(new_drafter(options.drafter), workload.warm)
                wall = on_wall(bench, workload, options)
                results[shape]["workloads"][workload.name] = {**workload.about(), "wall": wall}
        write(options, "gain", {"pairs": options.pairs, "models": results}, started_s)


if __name__ == "__main__":
    main()
