"""How much of what could be had adaptive gets, in simulation.

    python -m benchmarks.adaptive.ceiling FOLDER [--quick]

On the step times that benchmarks.adaptive.gain measured, with the same sets. "hindsight": what is drafted is decided
with the outcome known; "nodes" runs accepted nodes only, "length" is the best decoding length of each request in each
step. "odds": outcomes are drawn from the calibrated probabilities; the best choice by these probabilities, which are
then exact, over the best length in hindsight of the same draws. That is what chance alone keeps from a choice with such
probabilities; drafts that come with better ones could have more.
"""

from __future__ import annotations

from typing import Any

from benchmarks.adaptive.driver import fixed
from benchmarks.adaptive.gain import SETS, SIZES
from benchmarks.adaptive.simulation import Simulation, on_times_of_gain
from benchmarks.adaptive.workloads import Options, read_options, say
from benchmarks.common import refusing_bad_input

TOKENS, TOKENS_EACH = 3000, 160


def measure(simulation: Simulation, size: int, options: Options) -> dict[str, Any]:
    driver = simulation.driver()
    load = [(size, 160 if options.is_quick else max(TOKENS, size * TOKENS_EACH))]
    off = driver.run(simulation.records, load, fixed(0)).tokens_per_s
    runs = {
        "adaptive": driver.run(simulation.records, load, simulation.adaptive()),
        "nodes": simulation.ceiling(driver, load, is_paying_for_misses=False),
        "length": simulation.ceiling(driver, load, is_paying_for_misses=True),
    }
    odds = simulation.known_odds(driver, load)
    speeds = {name: run.tokens_per_s / off for name, run in runs.items()}
    found = {
        "adaptive_over_off": round(speeds["adaptive"], 4),
        "hindsight_over_off": {name: round(speeds[name], 4) for name in ("nodes", "length")},
        "share_of_hindsight": {name: round(speeds["adaptive"] / speeds[name], 4) for name in ("nodes", "length")},
        "acceptance_length": {name: round(run.tokens_per_step, 3) for name, run in runs.items()},
        "odds": {
            "foresight_over_off": round(odds.foresight.rate / off, 4),
            "share_of_hindsight": round(odds.foresight.rate / odds.hindsight.rate, 4),
        },
    }
    say(f"x {size}: {found}")
    return found


@refusing_bad_input()
def main() -> None:
    on_times_of_gain(read_options(__doc__, SETS), "ceiling", measure, SIZES)


if __name__ == "__main__":
    main()
