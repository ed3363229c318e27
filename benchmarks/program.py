"""Milliseconds of a forward as a native program, beside the model's modules: decoding steps by rows, and prompts.

    python -m benchmarks.program [--models bundled 90m] [--dtypes bfloat16 float32] [--threads 2]

Both run in one process in turns. A decoding step has one row for each request behind 160 tokens; a prompt is one step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import spread, write_results

import torch  # isort: skip

from batchserve.config import EngineConfig  # isort: skip
from batchserve.request import GREEDY
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.native_runner import NativeRunner
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.startup.build import build_engine
from tools.widen_model import random_model, save

ROWS, PROMPTS, CONTEXT = (1, 4, 16, 32, 64), (128, 512, 2000), 160
STEPS, PROMPT_STEPS = 30, 5
MAX_TOKENS = 64 * (CONTEXT + 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bundled", "90m"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            source = name
            if name == "90m":
                source = folder
                save(random_model(name), Path(folder))
            for dtype in args.dtypes:
                results[f"{name}, {dtype}"] = compare(source, dtype, args.threads)
                print(f"{name}, {dtype}: {results[f'{name}, {dtype}']}", flush=True)
    print(f"written to {write_results('program', {'threads': args.threads, 'cells': results})}")


def compare(source: str, dtype: str, threads: int) -> dict[str, Any]:
    """{cell: milliseconds of the program and of the modules, and their ratio}."""
    runners = {way: start(source, dtype, threads, way == "program") for way in ("program", "modules")}
    if not isinstance(runners["program"], NativeRunner):
        raise SystemExit(f"{source} in {dtype} has no program here")
    cells = {f"{rows} rows": (decoding(rows), STEPS) for rows in ROWS}
    cells |= {f"prompt of {tokens}": ([("prompt", 0, tokens)], PROMPT_STEPS) for tokens in PROMPTS}
    found: dict[str, Any] = {"plain read": {"ms": spread(read_ms(weight_bytes(runners["modules"]), threads))}}
    for cell, (requests, steps) in cells.items():
        taken: dict[str, list[float]] = {way: [] for way in runners}
        for number in range(steps + 1):
            for way, runner in runners.items():
                seconds = forward_s(runner, requests)
                if number:  # the first sets up what later ones find
                    taken[way].append(seconds * 1e3)
        ratios = [slow / fast for fast, slow in zip(taken["program"], taken["modules"], strict=True)]
        found[cell] = {**{way: spread(each) for way, each in taken.items()}, "modules over program": spread(ratios)}
    return found


def weight_bytes(runner: ModelRunner) -> int:
    """What a step of one row reads: all weights but a table of embeddings that is no head."""
    model = runner._model
    table = model.get_input_embeddings().weight.nbytes
    size = 2 if model.dtype == torch.bfloat16 else 4
    total = size * runner.num_parameters
    return int(total if model.config.get_text_config().tie_word_embeddings else total - table)


def read_ms(num_bytes: int, threads: int) -> list[float]:
    """Milliseconds of reading so many bytes once, front to back, on all threads."""
    torch.set_num_threads(threads)
    memory, taken = torch.zeros(num_bytes // 8, dtype=torch.int64), []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        memory.sum()
        taken.append((time.perf_counter() - began_s) * 1e3)
    return taken


def start(source: str, dtype: str, threads: int, is_native: bool) -> NativeRunner | ModelRunner:
    config = EngineConfig(
        source,
        dtype=dtype,
        num_threads=threads,
        custom_kernels=is_native,
        drafter="none",
        max_num_seqs=64,
        kv_cache_memory=1 << 30,
    )
    runner = build_engine(config).core.executor
    assert isinstance(runner, NativeRunner | ModelRunner)
    return runner


def decoding(rows: int) -> list[tuple[str, int, int]]:
    """(request, context, rows) of each request."""
    return [(f"request {number}", CONTEXT, 1) for number in range(rows)]


def forward_s(runner: NativeRunner | ModelRunner, requests: list[tuple[str, int, int]]) -> float:
    """Seconds of one forward; K/V of the contexts are zeros."""
    allocator, rows = runner.allocator, []
    for name, context, count in requests:
        allocator.reserve(name, context + count)
        allocator.touch(name)
        allocator.commit(name, range(context))
        allocator.reserve(name, count)
        rows.append(RequestRows(name, context, [7] * count, [*range(-1, count - 1)], count, GREEDY))
    batch = build_batch(rows)
    began_s = time.perf_counter()
    runner.forward(batch)
    seconds = time.perf_counter() - began_s
    for name, _, _ in requests:
        allocator.release(name)
    return seconds


if __name__ == "__main__":
    main()
