"""Time to first token of 16 requests that share a prefix of 1,000 tokens, cold and warm.

    python -m benchmarks.adaptive.prefix [--quick]

A random Llama of about 90M parameters; the requests come at once, each with a few tokens of its own behind the prefix.
"cold": nobody has computed the prefix, and everybody has another one; "shared": nobody has computed it, but all have
the same; "warm": some requests have been answered before.
"""

from __future__ import annotations

import random
import statistics
import time
from itertools import count
from typing import Any

from batchserve.types import SamplingParams, SpeculationParams
from benchmarks.adaptive.driver import median_interval
from benchmarks.adaptive.workloads import Lab, Options, lab, read_options, say, write
from benchmarks.common import spread

REQUESTS, PREFIX_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 16, 1000, 24, 4
ROUNDS = 5


class Wave:
    """Requests that arrive together."""

    def __init__(self, bench: Lab, prefix_tokens: int) -> None:
        self._engine, self._prefix_tokens = bench.engine, prefix_tokens
        self._rng, self._ids = random.Random(0), count()

    def prefix(self) -> list[int]:
        return self._tokens(self._prefix_tokens)

    def _tokens(self, number: int) -> list[int]:
        return [self._rng.randrange(3, self._engine.info.vocab_size) for _ in range(number)]

    def first_token_s(self, prefixes: list[list[int]]) -> list[float]:
        """Answer a request behind each prefix, all at once; the time to first token of each."""
        core, arrival_s = self._engine.core, time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        requests = [
            self._engine.processor.make_request(
                f"prefix-{next(self._ids)}", prefix + self._tokens(OWN_TOKENS), params, SpeculationParams(), arrival_s
            )
            for prefix in prefixes
        ]
        for request in requests:
            core.add(request)
        while core.has_work:
            core.step()
        return [request.timing(0.0).first_token_s for request in requests]


def measure(bench: Lab, options: Options) -> dict[str, Any]:
    number, rounds = (2, 1) if options.is_quick else (REQUESTS, ROUNDS)
    wave = Wave(bench, 100 if options.is_quick else PREFIX_TOKENS)
    seconds: dict[str, list[float]] = {"cold": [], "shared": [], "warm": []}
    wave.first_token_s([wave.prefix()])
    for _ in range(rounds):
        prefix = wave.prefix()
        waves = {"cold": [wave.prefix() for _ in range(number)], "shared": [prefix] * number, "warm": [prefix] * number}
        for name, prefixes in waves.items():
            seconds[name].append(statistics.median(wave.first_token_s(prefixes)))
            say(f"{name}: median time to first token {seconds[name][-1]:.3f} s")
    return {
        "requests": number,
        "median_first_token_s": {name: spread(of) for name, of in seconds.items()},
        "cold_over": {
            name: median_interval([cold / each for cold, each in zip(seconds["cold"], seconds[name], strict=True)])
            for name in ("shared", "warm")
        },
    }


def main() -> None:
    started_s = time.perf_counter()
    options = read_options(__doc__)
    with lab("90m") as bench:
        write(options, "prefix", {"model": bench.about(), **measure(bench, options)}, started_s)


if __name__ == "__main__":
    main()
