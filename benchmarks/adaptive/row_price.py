"""What draft rows are believed to cost, and what they do cost, in an engine that has learned from its own steps.

    python -m benchmarks.adaptive.row_price FOLDER [--quick]

The bundled model's own answers, and recorded answers forced through a random Llama of about 90M parameters. Every
fourth step is a trial: each request runs 0, 1, 2 or 4 draft rows, by lot, whatever the adaptive decoding length would
choose, and nothing is learned from how long that took. Of each length the trials are compared with those of no drafts
beside them. A step counts without the time in which drafters are told and asked: that is on no row's account.
The start's measurement differs from one start to the next, so there are some, each with a table of its own.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from batchserve.bench.replay import ReplayRecord
from batchserve.config import EngineConfig
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from batchserve.draft.forest import DraftForest
from benchmarks.adaptive.driver import MAX_DRAFT_TOKENS, Contender, Driver, median_interval
from benchmarks.adaptive.workloads import Options, lab, new_drafter, own_text, read_options, recorded_sets, say, write
from benchmarks.common import refusing_bad_input

RECORDED, DRAFTER = "gsm_qwen2_7b", "mixture"
SIZES = (2, 4, 8, 16)
LENGTHS = (0, 1, 2, 4)
EVERY = 4  # steps
BLOCKS, LEARNING_BLOCKS = 40, 15  # of one trial of each length; those of the beginning are not counted
STARTS = 3


class Trial(NamedTuple):
    """One step: its draft rows, what it and the same without drafts were predicted to take, and what it took."""

    num_rows: int
    predicted_s: float
    without_s: float
    seconds: float


class WatchedModel(StepTimeModel):
    """Learns from every step but from trials, which it keeps."""

    def __init__(self, table: StepTimeTable) -> None:
        super().__init__(table)
        self.is_trial = False
        self.trials: list[Trial] = []

    def observe(
        self, load: StepLoad, forward_s: float, host_s: float = 0.0, **others: Any
    ) -> tuple[float, float, float]:
        if not self.is_trial:
            return super().observe(load, forward_s, host_s, **others)
        self.is_trial = False
        without, decoding = others["without"], others["decoding"]
        known = self.predict(load), self.predict(without), self.predict(decoding)
        self.trials.append(Trial(load.num_rows - without.num_rows, known[0], known[1], forward_s + host_s))
        return known


class TriedDrafting(AdaptiveDrafting):
    """Chooses as ever, but for trials. lengths: what they were given, in their order; each once in a block of them."""

    def __init__(self, model: WatchedModel) -> None:
        super().__init__(model, EngineConfig().draft_inflation)
        self.model = model
        self.lengths: list[int] = []
        self._rng = random.Random(0)
        self._num_begun = 0
        self._block: list[int] = []

    def begin_step(self, load: StepLoad, alone: StepLoad, num_asked: int) -> bool:
        is_asked = super().begin_step(load, alone, num_asked)
        self._num_begun += 1
        self.model.is_trial = is_asked and self._num_begun % EVERY == 0
        if self.model.is_trial and len(self.lengths) == len(self.model.trials):
            if len(self.lengths) % len(LENGTHS) == 0:
                self._block = self._rng.sample(LENGTHS, len(LENGTHS))
            self.lengths.append(self._block[len(self.lengths) % len(LENGTHS)])
        return is_asked

    def bound(self, slots: Any, bounds: Any, max_rows: int) -> Any:
        asked = bounds[:, 0].copy()
        least = super().bound(slots, bounds, max_rows)
        if self.model.is_trial:
            bounds[:, 0], least = np.minimum(asked, max(1, self.lengths[-1])), np.zeros(len(least))
        return least

    def choose(self, forest: DraftForest, *others: Any) -> Any:
        chosen = super().choose(forest, *others)
        if self.model.is_trial:
            places = np.arange(len(chosen)) - np.repeat(forest.starts[:-1], forest.sizes)
            chosen = places < self.lengths[-1]  # parents stand before their children
        return chosen


def measure(
    driver: Driver, table: StepTimeTable, records: Sequence[ReplayRecord], size: int, options: Options
) -> dict[str, Any]:
    """Of `size` requests at once: a whole step without drafts over its prediction, and a row by length."""
    model = WatchedModel(table)
    drafting = TriedDrafting(model)
    learning, blocks = (1, 2) if options.is_quick else (LEARNING_BLOCKS, BLOCKS)
    contender = Contender("adaptive", MAX_DRAFT_TOKENS, drafting)
    num_trials = (learning + blocks) * len(LENGTHS)
    while len(model.trials) < num_trials:
        driver.run(records, [(size, size * 100)], contender, seed=len(model.trials))
    tried = list(zip(drafting.lengths, model.trials, strict=True))[:num_trials]
    by_block = [dict(tried[at : at + len(LENGTHS)]) for at in range(0, num_trials, len(LENGTHS))][learning:]
    plain = [block[0] for block in by_block]
    found: dict[str, Any] = {"real_over_predicted": _of_median([each.seconds / each.without_s for each in plain])}
    for length in LENGTHS[1:]:
        pairs = [(block[length], block[0]) for block in by_block if block[length].num_rows]
        if not pairs:  # nothing was proposed
            continue
        real = [(trial.seconds - beside.seconds) / trial.num_rows for trial, beside in pairs]
        believed = [(trial.predicted_s - trial.without_s) / trial.num_rows for trial, _ in pairs]
        found[str(length)] = {
            "rows": round(statistics.mean(trial.num_rows for trial, _ in pairs), 1),
            "real_us": _of_median([each * 1e6 for each in real]),
            "believed_us": _of_median([each * 1e6 for each in believed]),
            "believed_over_real": round(statistics.median(believed) / max(1e-9, statistics.median(real)), 3),
        }
    return found


def _of_median(values: list[float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in median_interval(values).items()}


@refusing_bad_input()
def main() -> None:
    started_s = time.perf_counter()
    options = read_options(__doc__, (RECORDED,), has_drafter=False)
    (forced,) = recorded_sets(options)
    results: dict[str, Any] = {}
    for name, workload in (("bundled", own_text(options)), ("90m", forced)):
        starts = []
        for _ in range(1 if options.is_quick else STARTS):
            with lab(name) as bench:
                bench.use(new_drafter(DRAFTER), workload.warm)
                about = bench.driver, bench.table, workload.records
                sizes = {str(size): measure(*about, size, options) for size in options.sizes(*SIZES)}
                starts.append({**bench.about(), "sizes": sizes})
                say(f"{name}: {sizes}")
        results[name] = {"workload": workload.name, "starts": starts}
    write(options, "row_price", {"drafter": DRAFTER, "models": results}, started_s)


if __name__ == "__main__":
    main()
