"""What it costs to choose, at 16 requests with 64 candidates each: the budget alone, and all of the choice.

    python -m benchmarks.adaptive.budget [--quick]

Random trees, grown best first from hopeless to confident, that come true as often as they claim; step times of the
model of 90M parameters, as benchmarks.adaptive.regret has measured them. Every request is drafted in every step, and
nothing is left out for being unlikely: more than the engine ever asks for. "cold": 64 MiB are read between two steps,
as a forward would; "warm": the steps follow each other. Fails where the median of choose_drafts exceeds its bound.
"""

from __future__ import annotations

import heapq
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from batchserve.config import EngineConfig
from batchserve.decoding_length import adaptive as choosing
from batchserve.decoding_length.acceptance import Given
from batchserve.decoding_length.accounts import compile_kernels
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.policy import Drafted, StepOutcome
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from batchserve.draft.base import DraftTree
from batchserve.draft.forest import DraftForest
from benchmarks.adaptive.workloads import Options, read_options, say, write
from benchmarks.common import RESULTS

REQUESTS, CANDIDATES = 16, 64
BOUND_MS = 0.2  # of choose_drafts
MODEL = "90m"
STEPS, WARM_UP = 600, 100
TREES = 400
VOCAB_SIZE = 32_000
CONTEXTS = (100, 1000)
MACHINE_NOISE = 0.05  # standard deviation of a step's log time
CACHES_BYTES = 64 << 20


class Bidder(NamedTuple):
    """One decoding request."""

    slot: int
    token_ids: list[int]


def grown_tree(rng: random.Random, num_nodes: int, confidence: float) -> DraftTree:
    """A tree grown best first by path probability; confidence: the mean share that a likeliest child gets."""
    tree, line, order = DraftTree(), [], iter(range(1 << 30))

    def offer(parent: int, mass: float) -> None:
        share = rng.betavariate(4 * confidence, 4 * (1 - confidence))
        heapq.heappush(line, (-mass * share, next(order), parent, mass * (1 - share)))

    offer(-1, 1.0)
    while len(tree) < num_nodes:
        negative, _, parent, rest = heapq.heappop(line)
        node = tree.add(rng.randrange(VOCAB_SIZE), parent, -negative)
        offer(node, -negative)
        offer(parent, rest)
    return tree


def truth_of(rng: random.Random, tree: DraftTree) -> list[int]:
    """The tokens that come, as likely as the tree says, and one behind them that it does not have."""
    node, mass, tokens = -1, 1.0, []
    for child, parent in enumerate(tree.parents):
        if parent != node:
            continue
        above = tree.probs[node] if node >= 0 else 1.0
        if rng.random() * mass < tree.probs[child] / above:
            tokens.append(tree.token_ids[child])
            node, mass = child, 1.0
        else:
            mass -= tree.probs[child] / above
    return [*tokens, VOCAB_SIZE]


def accepted(tree: DraftTree, chosen: np.ndarray, truth: list[int]) -> list[int]:
    """What a step gives that runs these nodes."""
    node, depth = -1, 0
    for i in np.flatnonzero(chosen).tolist():
        if tree.parents[i] == node and tree.token_ids[i] == truth[depth]:
            node, depth = i, depth + 1
    return truth[: depth + 1]


def measured_table() -> StepTimeTable:
    found = json.loads((RESULTS / "adaptive" / "regret.json").read_text())["models"][MODEL]["table"]
    return StepTimeTable(tuple(found.pop("rows")), tuple(found.pop("seconds")), **found)


def measure(table: StepTimeTable, steps: int, between: Callable[[], object], seed: int = 0) -> dict[str, Any]:
    """Milliseconds of every part, and what was bought, over `steps` steps behind the first ones."""
    rng, model = random.Random(seed), StepTimeModel(table)
    confidences = [rng.uniform(0.3, 0.95) for _ in range(REQUESTS)]
    trees = [grown_tree(rng, CANDIDATES, confidences[i % REQUESTS]) for i in range(TREES)]
    adaptive = AdaptiveDrafting(StepTimeModel(table), EngineConfig().draft_inflation)
    slots = np.arange(REQUESTS)
    for slot in slots.tolist():
        adaptive.start(slot, "mixture")
    bidders: Any = [Bidder(slot, [0]) for slot in slots.tolist()]
    seconds: dict[str, list[float]] = {"choose_drafts": [], "choose": [], "step_done": []}
    rows: list[int] = []
    size = REQUESTS * CANDIDATES

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            started_s = time.perf_counter()
            result = function(*args)
            seconds[part].append(time.perf_counter() - started_s)
            return result

        return wrapped

    choose, learn = timed("choose", adaptive.choose), timed("step_done", adaptive.step_done)
    with mock.patch.object(choosing, "choose_drafts", timed("choose_drafts", choosing.choose_drafts)):
        for number in range(WARM_UP + steps):
            contexts = [rng.randint(*CONTEXTS) for _ in bidders]
            load = StepLoad(REQUESTS, REQUESTS, REQUESTS, sum(contexts), sum(contexts))
            # Every REQUESTS-th tree has the same confidence: a request's drafts are of one kind.
            offered = [trees[i + REQUESTS * rng.randrange(TREES // REQUESTS)] for i in range(REQUESTS)]
            adaptive.begin_step(load, load, REQUESTS)
            between()
            drafted = Drafted(bidders, slots, slots, slots, np.array(contexts))
            keep = choose(DraftForest.of(offered), drafted, 4096)
            chosen = np.split(keep, range(CANDIDATES, size, CANDIDATES))
            given = {
                slot: accepted(tree, mine, truth_of(rng, tree))
                for slot, (tree, mine) in enumerate(zip(offered, chosen, strict=True))
            }
            counts = [int(mine.sum()) for mine in chosen]
            more, seen = sum(counts), int(np.dot(counts, contexts))
            full = StepLoad(REQUESTS + more, REQUESTS + more, REQUESTS, sum(contexts), sum(contexts) + seen)
            step_s = model.predict(full) * rng.lognormvariate(0.0, MACHINE_NOISE)
            learn(StepOutcome(load, load, full, step_s, step_s, num_asked=REQUESTS), Given.of(given))
            rows.append(more)
            if number + 1 == WARM_UP:
                for times in (*seconds.values(), rows):
                    times.clear()
    return {
        "parts": {part: _milliseconds(times) for part, times in seconds.items()},
        "rows_bought_per_step": round(statistics.mean(rows), 2),
    }


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        "median_ms": round(statistics.median(seconds) * 1e3, 4),
        "p90_ms": round(statistics.quantiles(seconds, n=10)[-1] * 1e3, 4),
        "steps": len(seconds),
    }


def run(options: Options) -> dict[str, Any]:
    table, steps = measured_table(), 20 if options.is_quick else STEPS
    compile_kernels()
    caches = np.zeros(CACHES_BYTES // 8)
    cells: dict[str, Any] = {}
    for name, between in (("warm", lambda: None), ("cold", caches.sum)):
        cells[name] = measure(table, steps, between)
        say(f"{name}: {cells[name]}")
    return {"requests": REQUESTS, "candidates": CANDIDATES, "model": MODEL, "bound_ms": BOUND_MS, "caches": cells}


def main() -> None:
    started_s = time.perf_counter()
    options = read_options(__doc__)
    found = run(options)
    write(options, "budget", found, started_s)
    for name, cell in found["caches"].items():
        median_ms = cell["parts"]["choose_drafts"]["median_ms"]
        if median_ms > BOUND_MS:
            raise SystemExit(f"choose_drafts takes {median_ms} ms with {name} caches: the bound is {BOUND_MS} ms")


if __name__ == "__main__":
    main()
