"""The adaptive decoding length against every fixed one: three drafters on every recorded text.

    python -m benchmarks.adaptive.breadth FOLDER [--sets NAME,NAME] [--quick]

benchmarks.adaptive.regret looks closely at the default drafter on some texts; this looks whether it was luck. In
simulation, on the step times of a random Llama of about 90M parameters, measured first. The drafters are those that
need no model's help: a Jacobi window cannot be simulated.
"""

from __future__ import annotations

import time
from typing import Any

from batchserve.config import DRAFTERS
from benchmarks.adaptive.regret import on_table
from benchmarks.adaptive.simulation import Simulation
from benchmarks.adaptive.workloads import Workload, lab, new_drafter, read_options, recorded_sets, say, write
from benchmarks.common import refusing_bad_input

SHAPE = "90m"
RECORDED = ("llma_rag", "gsm_qwen2_7b", "crux_qwen25_7b", "gsm8k_gpt3_175b", "mbpp_gpt4", "selfrefine_yelp")
SIMULATED = [name for name in DRAFTERS if name not in ("jacobi", "none")]


def against_best(table: dict[str, Any]) -> dict[str, Any]:
    """By number of requests, and for the trace: the best fixed length, and adaptive over it and over off."""
    cells = {**table["sizes"], "trace": table["trace"]}
    return {
        size: {
            "best_length": cell["best_length"],
            "adaptive_over_best": cell["adaptive_over_best"],
            "adaptive_over_off": cell["contenders"]["adaptive"]["over_off"]["median"],
        }
        for size, cell in cells.items()
    }


@refusing_bad_input()
def main() -> None:
    started_s = time.perf_counter()
    options = read_options(__doc__, RECORDED, has_drafter=False)
    workloads = recorded_sets(options)
    with lab(SHAPE) as bench:
        about, table = bench.about(), bench.table

    def measure(drafter: str, workload: Workload) -> dict[str, Any]:
        simulation = Simulation(table, new_drafter(drafter), workload.warm, workload.records)
        found = against_best(on_table(simulation, options))
        shown = {size: f"{cell['adaptive_over_best']:.1%}" for size, cell in found.items()}
        say(f"{drafter}, {workload.name}: adaptive over the best length {shown}")
        return found

    drafters = {each: {of.name: measure(each, of) for of in workloads} for each in SIMULATED}
    write(options, "breadth", {"model": SHAPE, **about, "drafters": drafters}, started_s)


if __name__ == "__main__":
    main()
