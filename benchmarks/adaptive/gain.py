"""How much faster decoding is than without drafts, and how much of what could be had.

    python -m benchmarks.adaptive.gain FOLDER [--quick]

Recorded answers forced through random Llamas of about 90M and 430M parameters. "wall": the decode phase, adaptive over
off, in pairs of runs that take turns. End to end: the measured time of computing such prompts alone, added to both.
"table": simulation on the measured step times, with two ceilings, both of which know what will be accepted:
"nodes" runs accepted nodes only; "length" is the best decoding length in hindsight of each request in each step.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from batchserve.request import Request, ResolvedSampling
from benchmarks.adaptive.driver import fixed, interleave, summary
from benchmarks.adaptive.simulation import Simulation
from benchmarks.adaptive.workloads import Lab, Options, Workload, lab, new_drafter, read_options, recorded, say, write

SIZES = (1, 2, 4, 8, 16)
SETS = ("llma_rag", "mbpp_gpt4")
TABLE_TOKENS, TABLE_TOKENS_EACH = 3000, 160
PROMPTS = 3


def on_table(simulation: Simulation, options: Options) -> dict[str, Any]:
    driver = simulation.driver()
    cells = {}
    for size in options.sizes(*SIZES):
        load = [(size, 160 if options.is_quick else max(TABLE_TOKENS, size * TABLE_TOKENS_EACH))]
        off = driver.run(simulation.records, load, fixed(0)).tokens_per_s
        runs = {
            "adaptive": driver.run(simulation.records, load, simulation.adaptive()),
            "nodes": simulation.ceiling(driver, load, is_paying_for_misses=False),
            "length": simulation.ceiling(driver, load, is_paying_for_misses=True),
        }
        speeds = {name: run.tokens_per_s / off for name, run in runs.items()}
        cells[str(size)] = {
            "adaptive_over_off": round(speeds["adaptive"], 4),
            "ceilings_over_off": {name: round(speeds[name], 4) for name in ("nodes", "length")},
            "share_of_ceiling": {name: round(speeds["adaptive"] / speeds[name], 4) for name in ("nodes", "length")},
            "acceptance_length": {name: round(run.tokens_per_step, 3) for name, run in runs.items()},
        }
        say(f"x {size}, on the table over off: {speeds}")
    return cells


def prompt_s(bench: Lab, workload: Workload) -> float:
    """Seconds of computing a prompt of this set, nothing beside it: the median."""
    core, seconds = bench.engine.core, []
    for i, record in enumerate(workload.records[: PROMPTS + 1]):
        sampling = ResolvedSampling(0.0, 0, 1.0, 0, 1, frozenset())
        started_s = time.perf_counter()
        core.add(Request(f"prompt-{i}", record.prompt_token_ids, sampling, started_s))
        while core.has_work:
            core.step()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds[1:])  # the first warms up


def on_wall(bench: Lab, workload: Workload, options: Options) -> dict[str, Any]:
    cells = {}
    prefill_s = prompt_s(bench, workload)
    answer = statistics.mean(len(record.response_token_ids) for record in workload.records)
    for size in options.sizes(*SIZES):
        load = bench.load(size, workload, options)
        contenders = (fixed(0), bench.adaptive())
        runs = interleave(bench.driver, workload.records, load, contenders, options.pairs)
        found = {name: summary(of, runs["off"]) for name, of in runs.items()}
        whole_s = {
            name: prefill_s + answer / statistics.median(r.tokens_per_s for r in of) for name, of in runs.items()
        }
        cells[str(size)] = {
            "tokens_of_a_run": load[0][1],
            "contenders": found,
            "end_to_end_over_off": round(whole_s["off"] / whole_s["adaptive"], 4),
        }
        say(f"{workload.name} x {size}, wall clock over off: {found['adaptive']['over_off']}")
    return {"prompt_s": round(prefill_s, 4), "sizes": cells}


def main() -> None:
    started_s = time.perf_counter()
    options = read_options(__doc__, has_folder=True)
    results: dict[str, Any] = {}
    for shape in options.shapes:
        with lab(shape) as bench:
            results[shape] = {**bench.about(), "workloads": {}}
            for name in SETS:
                workload = recorded(options, name)
                simulation = Simulation(bench.table, new_drafter(options.drafter), workload.warm, workload.records)
                say(f"{shape}, {name}")
                table = on_table(simulation, options)
                bench.use(new_drafter(options.drafter), workload.warm)
                wall = on_wall(bench, workload, options)
                results[shape]["workloads"][name] = {**workload.about(), "table": table, "wall": wall}
        write(options, "gain", {"pairs": options.pairs, "models": results}, started_s)


if __name__ == "__main__":
    main()
