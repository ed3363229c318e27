"""How much of its time an engine should give to prompts: a closed load of long prompts under several bounds.

    python -m benchmarks.adaptive.prompt_load [--quick]

The bundled model, 16 requests at once, each with 400 random tokens in front of one of its tasks and 100 tokens of
answer; whoever ends is followed by the next at once, and no text is shared. The bounds (max_itl_inflation: how many
times as long all prompts together may make a step) take turns on one engine with the same requests, every round begins
with another one. Tokens are counted from the moment when as many requests have ended as there are at once.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from batchserve.config import PROMPT_INFLATION, EngineConfig
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.request import Request
from batchserve.types import SamplingParams, SpeculationParams
from benchmarks.adaptive.driver import median_interval
from benchmarks.adaptive.prefill import p99
from benchmarks.adaptive.warm_drafter import WarmDrafter
from benchmarks.adaptive.workloads import Lab, Options, lab, new_drafter, read_options, say, write
from benchmarks.common import chat_prompts, refusing_bad_input, spread

SIZE, IN_FRONT, ANSWER = 16, 400, 100
REQUESTS, ROUNDS = 80, 5  # of a run, and of each bound
BOUNDS = (1.25, 1.5, PROMPT_INFLATION, 4.0)
PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
ALONE = SpeculationParams(draft_scope="request")


@dataclasses.dataclass(slots=True)
class Served:
    """One run; seconds."""

    seconds: float = 0.0
    tokens: int = 0
    first_token_s: list[float] = dataclasses.field(default_factory=list)  # of those that have one
    between_s: list[float] = dataclasses.field(default_factory=list)  # of a request in a step behind its first token

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Load:
    """Requests without an end for one engine."""

    def __init__(self, bench: Lab) -> None:
        self._bench = bench
        self._prompts = [bench.engine.processor.tokenize(each) for each in chat_prompts(200, seed=5)]
        self._ids = count()

    def _requests(self, rng: random.Random) -> Iterator[Request]:
        processor = self._bench.engine.processor
        while True:
            front = [rng.randrange(3, processor.vocab_size) for _ in range(IN_FRONT)]
            prompt = front + rng.choice(self._prompts)
            name = f"load-{next(self._ids)}"
            yield processor.make_request(name, prompt, PARAMS, ALONE, time.perf_counter())

    def serve(self, bound: float, num_requests: int, seed: int) -> Served:
        """SIZE requests at once under one bound, until num_requests have ended."""
        core = self._bench.engine.core
        drafter = core.drafts.drafter
        assert isinstance(drafter, WarmDrafter)
        drafter.renew()
        core.scheduler._config = dataclasses.replace(core.scheduler._config, max_itl_inflation=bound)
        new, running, served, num_ended = self._requests(random.Random(seed)), list[Request](), Served(), 0
        while num_ended < num_requests:
            for request in islice(new, SIZE - len(running)):
                core.add(request)
                running.append(request)
            had = [request.num_output_tokens for request in running]
            step_s = time.perf_counter()
            core.step()
            step_s = time.perf_counter() - step_s
            more = [before for before, each in zip(had, running, strict=True) if 0 < before < each.num_output_tokens]
            if num_ended >= SIZE:
                served.seconds += step_s
                served.tokens += sum(each.num_output_tokens for each in running) - sum(had)
                served.between_s += [step_s] * len(more)
                for before, each in zip(had, running, strict=True):
                    if before == 0 and each.first_token_s is not None:
                        served.first_token_s.append(each.first_token_s - each.arrival_s)
            num_ended += sum(each.finish_reason is not None for each in running)
            running = [each for each in running if each.finish_reason is None]
        self._bench.driver.clear()
        return served


def measure(load: Load, options: Options) -> dict[str, Any]:
    runs: dict[float, list[Served]] = {bound: [] for bound in BOUNDS}
    for number in range((1 if options.is_quick else ROUNDS) + 1):
        for place in range(len(BOUNDS)):
            bound = BOUNDS[(place + number) % len(BOUNDS)]
            served = load.serve(bound, 2 * SIZE if options.is_quick else REQUESTS, seed=number)
            say(f"{bound}: {served.tokens_per_s:.0f} tokens/s")
            if number:  # the first round warms up
                runs[bound].append(served)
    return {str(bound): _figures(of, runs[PROMPT_INFLATION]) for bound, of in runs.items()}


def _figures(runs: list[Served], by_default: list[Served]) -> dict[str, Any]:
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(runs, by_default, strict=True)]
    return {
        "tokens_per_s": spread([run.tokens_per_s for run in runs]),
        "tokens_per_s_over_default": median_interval(ratios),
        "first_token_s": spread([statistics.median(run.first_token_s) for run in runs]),
        "p95_first_token_s": spread([sorted(run.first_token_s)[int(0.95 * len(run.first_token_s))] for run in runs]),
        "inter_token_ms": spread([statistics.median(run.between_s) * 1e3 for run in runs]),
        "p99_inter_token_ms": spread([p99(run.between_s) * 1e3 for run in runs]),
    }


@refusing_bad_input()
def main() -> None:
    started_s = time.perf_counter()
    options = read_options(__doc__)
    with lab("bundled") as bench:
        bench.use(new_drafter(options.drafter))
        core, inflation = bench.engine.core, EngineConfig().draft_inflation
        assert core.scheduler._step_time is not None
        core.drafts.policy = AdaptiveDrafting(core.scheduler._step_time, inflation)
        bounds = measure(Load(bench), options)
        write(options, "prompt_load", {"requests": SIZE, "model": bench.about(), "bounds": bounds}, started_s)


if __name__ == "__main__":
    main()
