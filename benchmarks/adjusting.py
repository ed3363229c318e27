"""The cost of parameters that change logits on a CPU, beside a step of the 90M model.

    python -m benchmarks.adjusting [--rounds 30] [--threads 2]

16 requests of 500 tokens, each with a draft of 15 tokens in one line that is accepted whole, so that every row is
looked at: the most that there can be. Milliseconds to walk these trees greedily without adjustments, with all
penalties, and with penalties, bans and biases; and of the step whose rows they are, by the 90M model as a native
program.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import spread, write_results

import numpy as np  # isort: skip

from batchserve.config import EngineConfig
from batchserve.request import GREEDY, ResolvedSampling
from batchserve.row_adjustments import RowAdjustments, mask_of
from batchserve.runner.ragged_batch import RaggedBatch, RequestRows, build_batch
from batchserve.runner.step_handle import verify_batch
from batchserve.sampling.recordings import Recordings
from batchserve.startup.build import build_engine
from tools.widen_model import random_model, save

REQUESTS, CONTEXT, DRAFTS = 16, 500, 15
VOCAB_SIZES = (8192, 32000, 128256)
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}


def settings(vocab_size: int) -> dict[str, dict[str, Any]]:
    bans = {
        "no_repeat_ngram_size": 3,
        "min_tokens": 400,
        "logit_bias": tuple((token, 1.0) for token in range(50)),
        "bad_words": tuple((token, token + 1) for token in range(20)),
        "allowed": mask_of(range(vocab_size - 9), vocab_size),
    }
    return {"none": {}, "penalties": PENALTIES, "penalties, bans, biases": PENALTIES | bans}


def step(vocab_size: int, options: dict[str, Any]) -> tuple[RaggedBatch, Recordings]:
    """A batch, and texts that hold its drafts, so that they are accepted."""
    rng = np.random.default_rng(0)
    texts = {str(i): rng.integers(0, vocab_size, CONTEXT + DRAFTS + 1).tolist() for i in range(REQUESTS)}
    sampling = ResolvedSampling(0.0, 0, 1.0, 1, 1000, frozenset({2}), **options)
    parents = [*range(-1, DRAFTS)]
    batch = build_batch(
        [RequestRows(name, CONTEXT - 1, text[CONTEXT - 1 : -1], parents, 1, sampling) for name, text in texts.items()]
    )
    if sampling.changes_logits:
        each = [RowAdjustments(sampling, text[:CONTEXT], CONTEXT + 100) for text in texts.values()]
        batch.adjustments = dict(enumerate(each))
    return batch, Recordings(texts)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    found: dict[str, Any] = {"threads": args.threads, "walks_ms": {}}
    for vocab_size in VOCAB_SIZES:
        logits = np.random.default_rng(1).normal(0, 3, (REQUESTS * (DRAFTS + 1), vocab_size)).astype(np.float32)
        steps = {name: step(vocab_size, options) for name, options in settings(vocab_size).items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(args.rounds + 1):
            for name, (batch, recordings) in steps.items():
                began_s = time.perf_counter()
                accepted = verify_batch(batch, logits, recordings, num_threads=args.threads).num_accepted
                times[name].append(1e3 * (time.perf_counter() - began_s))
                assert accepted.tolist() == [DRAFTS] * REQUESTS
        found["walks_ms"][str(vocab_size)] = {name: spread(each[1:]) for name, each in times.items()}
        print(vocab_size, found["walks_ms"][str(vocab_size)], flush=True)
    found["step_ms"] = spread(steps_of_90m(args.rounds, args.threads))
    print("step", found["step_ms"])
    print(f"written to {write_results('adjusting', found)}")


def steps_of_90m(rounds: int, threads: int) -> list[float]:
    """Milliseconds of steps with as many rows."""
    with tempfile.TemporaryDirectory() as folder:
        save(random_model("90m"), Path(folder))
        engine = build_engine(EngineConfig(folder, drafter="none", num_threads=threads, max_model_len=CONTEXT + 100))
        runner, allocator = engine.core.executor, engine.core.executor.allocator
        names, parents = [str(i) for i in range(REQUESTS)], [*range(-1, DRAFTS)]
        for name in names:
            if not allocator.reserve(name, CONTEXT + DRAFTS + 1):
                raise MemoryError("K/V memory")
            allocator.touch(name)
            allocator.commit(name, range(CONTEXT - 1))
        batch = build_batch([RequestRows(name, CONTEXT - 1, [5] * (DRAFTS + 1), parents, 1, GREEDY) for name in names])
        found = []
        for _ in range(rounds + 1):
            began_s = time.perf_counter()
            runner.launch(batch).wait()
            found.append(1e3 * (time.perf_counter() - began_s))
        return found[1:]


if __name__ == "__main__":
    main()
