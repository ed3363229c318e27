"""What the length of an answer means for the gain, and for the request that gains least, in simulation.

    python -m benchmarks.adaptive.lengths FOLDER [--quick]

On the step times that benchmarks.adaptive.gain measured, with the same sets: parts of answers of so many tokens, with
drafts and without. A simulated machine has no moments, so what one request loses is what others' drafts cost it: it is
held against itself.
"""

from __future__ import annotations

import statistics

from benchmarks.adaptive.driver import Contender, Run, fixed, interleave
from benchmarks.adaptive.gain import SETS
from benchmarks.adaptive.simulation import Simulation, on_times_of_gain
from benchmarks.adaptive.workloads import Options, read_options, say
from benchmarks.common import refusing_bad_input

SIZES, TOKENS = (4, 16), (20, 64, 128)


def measure(simulation: Simulation, size: int, options: Options) -> dict[str, dict[str, float]]:
    return {str(tokens): of_length(simulation, size, tokens, options) for tokens in options.sizes(*TOKENS)}


def of_length(simulation: Simulation, size: int, num_tokens: int, options: Options) -> dict[str, float]:
    driver = simulation.driver()

    def run(contender: Contender, number: int) -> Run:
        return driver.run_parts(simulation.records, size, num_tokens, contender, seed=number)

    off, adaptive = interleave((fixed(0), simulation.adaptive()), options.pairs, run).values()
    rates = [sum(r.tokens for r in runs) / sum(r.seconds for r in runs) for runs in (off, adaptive)]
    each = [
        with_drafts / without
        for one, other in zip(adaptive, off, strict=True)
        for with_drafts, without in zip(one.request_rates, other.request_rates, strict=True)
    ]
    found = {
        "adaptive_over_off": round(rates[1] / rates[0], 4),
        "median_request_over_off": round(statistics.median(each), 4),
        "p10_request_over_off": round(statistics.quantiles(each, n=10)[0], 4),
        "slowest_request_over_off": round(min(each), 4),
    }
    say(f"x {size}, {num_tokens} tokens: {found}")
    return found


@refusing_bad_input()
def main() -> None:
    on_times_of_gain(read_options(__doc__, SETS), "lengths", measure, SIZES)


if __name__ == "__main__":
    main()
