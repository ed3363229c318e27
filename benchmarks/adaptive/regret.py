"""What it costs not to know the best decoding length: the adaptive one against every fixed one.

    python -m benchmarks.adaptive.regret FOLDER [--quick]

Models: the bundled one's deeper copy (about 90M parameters) with its own text, and random Llamas of about 90M and 430M
through which recorded answers are forced. "table": every cell on the measured step times, in simulation, without noise,
the records in three orders; also a trace whose load moves between 1 and 32 requests. "wall": off, the length that is
best on the table, and adaptive, in pairs of runs that take turns in one process; most of a second of plain decoding
each. With one model also a trace between 1 and 16 requests, some two seconds of plain decoding, beside the length that
is best of this trace.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.adaptive.driver import Contender, Driver, Run, fixed, interleave, over, summary
from benchmarks.adaptive.simulation import Simulation
from benchmarks.adaptive.workloads import (
    Lab,
    Options,
    Workload,
    lab,
    new_drafter,
    own_text,
    read_options,
    recorded_sets,
    say,
    write,
)
from benchmarks.common import refusing_bad_input

LENGTHS = (0, 2, 4, 8, 16)
SIZES = (1, 4, 16)
RECORDED = ("llma_rag", "gsm_qwen2_7b")
# Tokens of each request before the load changes: each part of the trace then takes about as long as the others.
TRACE, TRACE_TOKENS = (1, 2, 4, 8, 16, 32, 16, 8, 4, 2, 1), 96
# On the wall clock, of one model; the lab's engine has no more requests. In so few tokens the load would hardly fall if
# requests left only as they end.
WALL_TRACE, WALL_TRACE_TOKENS, WALL_TRACE_MODEL = (1, 2, 4, 8, 16, 8, 4, 2, 1), 10, "90m"
# Of one cell in simulation; at least so many of each request.
TABLE_TOKENS, TABLE_TOKENS_EACH = 3000, 160
ORDERS = 3  # of the records: whose requests meet decides who may draft at whose cost


def on_table(simulation: Simulation, options: Options) -> dict[str, Any]:
    """Every length, and adaptive, at every size and on the trace."""
    driver = simulation.driver()
    most, each = (200, 20) if options.is_quick else (TABLE_TOKENS, TABLE_TOKENS_EACH)
    cells = {
        str(size): _compare(driver, simulation, [(size, max(most, size * each))]) for size in options.sizes(*SIZES)
    }
    tokens = 8 if options.is_quick else TRACE_TOKENS
    return {"sizes": cells, "trace": _compare(driver, simulation, [(size, size * tokens) for size in TRACE])}


def _compare(
    driver: Driver, simulation: Simulation, load: list[tuple[int, int]], *, is_cut: bool = False
) -> dict[str, Any]:
    runs: dict[str, list[Run]] = {}
    for seed in range(ORDERS):
        adaptive = simulation.adaptive()
        for contender in (*map(fixed, LENGTHS), adaptive):
            run = driver.run(simulation.records, load, contender, seed=seed, is_cut=is_cut)
            runs.setdefault(contender.name, []).append(run)
    rates = {name: sum(run.tokens for run in of) / sum(run.seconds for run in of) for name, of in runs.items()}
    best = max((name for name in rates if name != "adaptive"), key=lambda name: rates[name])
    assert adaptive.adaptive is not None
    reliability = adaptive.adaptive.acceptance.reliability
    return {
        "best_length": best,
        "adaptive_over_best": round(rates["adaptive"] / rates[best], 4),
        "tokens": sum(run.tokens for run in runs["adaptive"]),
        "contenders": {name: summary(of, runs["off"]) for name, of in runs.items()},
        "calibration_error": {name: round(kept.error(), 4) for name, kept in reliability.items()},
        "reliability": {
            name: {"count": kept.count, "expected": kept.expected, "hits": kept.hits}
            for name, kept in reliability.items()
        },
    }


def on_wall(bench: Lab, workload: Workload, cells: dict[str, Any], options: Options) -> dict[str, Any]:
    """Every size, beside the best fixed length by the table."""
    found: dict[str, Any] = {}
    for size in options.sizes(*SIZES):
        load = [(size, size * bench.tokens_each(size, workload, options))]
        found[str(size)] = _in_pairs(bench, workload, load, cells[str(size)]["best_length"], options)
    return found


def trace_on_wall(bench: Lab, workload: Workload, simulation: Simulation, options: Options) -> dict[str, Any]:
    """A load that moves, beside the length that is best of it in simulation."""
    loads = [
        [(size, size * (2 if options.is_quick else tokens)) for size in WALL_TRACE]
        for tokens in (TRACE_TOKENS, WALL_TRACE_TOKENS)
    ]
    table = _compare(simulation.driver(), simulation, loads[0], is_cut=True)
    found = _in_pairs(bench, workload, loads[1], table["best_length"], options, is_cut=True)
    return {**found, "adaptive_over_best_on_table": table["adaptive_over_best"]}


def _in_pairs(
    bench: Lab, workload: Workload, load: list[tuple[int, int]], best: str, options: Options, *, is_cut: bool = False
) -> dict[str, Any]:
    """Off, the fixed length `best`, and adaptive."""

    def run(contender: Contender, number: int) -> Run:
        return bench.driver.run(workload.records, load, contender, seed=number, is_cut=is_cut)

    contenders: list[Contender] = [fixed(0), bench.adaptive()]
    if best != "off":
        contenders.insert(1, fixed(int(best)))
    runs = interleave(contenders, options.pairs, run)
    found: dict[str, Any] = {
        "best_length": best,
        "tokens_of_a_run": sum(tokens for _, tokens in load),
        "adaptive_over_best": over(runs["adaptive"], runs[best]),
        "contenders": {name: summary(of, runs["off"]) for name, of in runs.items()},
    }
    shown = {name: cell["over_off"]["median"] for name, cell in found["contenders"].items()}
    say(f"{workload.name} x {[size for size, _ in load]}, wall clock over off: {shown}")
    return found


def measure(bench: Lab, workload: Workload, options: Options, *, has_wall_trace: bool = False) -> dict[str, Any]:
    simulation = Simulation(bench.table, new_drafter(options.drafter), workload.warm, workload.records)
    table = on_table(simulation, options)
    for size, cell in [*table["sizes"].items(), ("trace", table["trace"])]:
        shown = {name: each["over_off"]["median"] for name, each in cell["contenders"].items()}
        say(f"{workload.name} x {size}, on the table over off: {shown}")
    bench.use(new_drafter(options.drafter), workload.warm)
    wall = on_wall(bench, workload, table["sizes"], options)
    if has_wall_trace:
        wall["trace"] = trace_on_wall(bench, workload, simulation, options)
    return {**workload.about(), "table": table, "wall": wall}


@refusing_bad_input()
def main() -> None:
    started_s = time.perf_counter()
    options = read_options(__doc__, RECORDED)
    sets = recorded_sets(options)
    results: dict[str, Any] = {}
    text = own_text(options)
    with lab("deepened") as bench:
        results["deepened"] = {**bench.about(), "workloads": {text.name: measure(bench, text, options)}}
    for shape in options.shapes:
        with lab(shape) as bench:
            has_trace = shape == WALL_TRACE_MODEL
            workloads = {each.name: measure(bench, each, options, has_wall_trace=has_trace) for each in sets}
            results[shape] = {**bench.about(), "workloads": workloads}
        write(options, "regret", {"pairs": options.pairs, "models": results}, started_s)


if __name__ == "__main__":
    main()
