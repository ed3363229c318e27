"""How many compute threads steps run on, by trial."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from batchserve.engine.make_faster import trial_logits
from batchserve.engine.measure_steps import time_decoding
from batchserve.runner.probe import compare_logits

if TYPE_CHECKING:
    from batchserve.runner.loader import LoadedModel
    from batchserve.runner.model_runner import ModelRunner

TRIALS = 9
SLOW_FORWARD_S, LARGE_FORWARD_S = 0.5, 2.0  # seconds; no pause makes two steps in a row take the second


def choose_threads(runner: ModelRunner, max_num_seqs: int, max_model_len: int, least_gain: float) -> int:
    """The number of compute threads that runs a decoding step fastest; half as many unless twice gain least_gain.

    Small layers do not repay the barrier between threads, and a busy neighbour makes it a hundred times dearer; a core
    left free serves the event loop. They are tried in turns, so that a pause of the machine does not decide, and what
    is compared is the lower quartile. A number whose steps are slow in two turns is tried no more.
    """
    most = torch.get_num_threads()
    counts = [most >> halvings for halvings in range(most.bit_length())]
    seconds: dict[int, list[float]] = {count: [] for count in counts}

    def trial(count: int) -> float:
        runner.num_threads = count
        runner.bind_thread()
        taken_s = time_decoding(runner, max_num_seqs, max_model_len)
        if taken_s > SLOW_FORWARD_S:  # it may have been a pause
            taken_s = min(taken_s, time_decoding(runner, max_num_seqs, max_model_len))
        return taken_s

    for _ in range(TRIALS):
        for place, count in enumerate(counts):
            seconds[count].append(trial(count))
            if seconds[count][-1] > (SLOW_FORWARD_S if place > 0 else LARGE_FORWARD_S):
                break  # still fewer would take longer still
        latest = {count: seconds[count][-1] for count in counts[:2] if seconds[count]}
        if min(latest.values()) > SLOW_FORWARD_S:  # large layers gain from every core, and more trials would take long
            return min(latest, key=lambda count: latest[count])
        counts = [count for count in counts if sum(each > SLOW_FORWARD_S for each in seconds[count]) < 2]
        if len(counts) == 1:
            return counts[0]
    best, best_s = most, math.inf
    for count in filter(seconds.get, counts):
        typical_s = sorted(seconds[count])[len(seconds[count]) // 4]
        if typical_s < best_s * least_gain:
            best, best_s = count, min(typical_s, best_s)
    return best


def check_threads(loaded: LoadedModel, runner: ModelRunner) -> None:
    """The model answers on the runner's compute threads as on one. Raises UnsupportedModelError."""
    chosen, logits = runner.num_threads, {}
    for count in {1, chosen}:
        runner.num_threads = count
        runner.bind_thread()
        logits[count] = trial_logits(loaded, runner, ())[0]
    runner.num_threads = chosen
    runner.bind_thread()
    where, suspect = f"on {chosen} compute threads", "OpenMP's settings in the environment"
    compare_logits(loaded.model, logits[chosen], logits[1], where, suspect)
