"""The host's part of a decoding step: all of it but the forward. Medians, in microseconds.

    python -m benchmarks.host_time [--model bundled] [--rounds 8]

Steps in which all requests decode and nothing else is computed, of batches of 1 and 16 requests, without and with
adaptive drafts. Verification, which follows the forward, counts as the host's.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.common import chat_prompts, spread, write_results

from batchserve import LLM, SamplingParams, SpeculationParams  # isort: skip

TOKENS, SEED = 160, 3


def measure(model: str, size: int, rounds: int, *, is_on: bool) -> dict[str, Any]:
    llm = LLM(model, max_num_seqs=size, wait_for_drafter=True)
    core: Any = llm._core
    forward, step, lay_out = core.executor.forward, core.step, core.scheduler.lay_out
    spent, steps, plans = [0.0], [], []

    def timed_forward(batch: Any) -> Any:
        began_s = time.perf_counter()
        logits = forward(batch)
        spent[0] = time.perf_counter() - began_s
        return logits

    def noted_plan(*arguments: Any) -> Any:
        plans.append(lay_out(*arguments))
        return plans[-1]

    def timed_step() -> None:
        plans.clear()
        began_s = time.perf_counter()
        step()
        seconds = time.perf_counter() - began_s
        if plans and len(plans[-1].requests) == size and plans[-1].is_all_decoding:
            steps.append((1e6 * (seconds - spent[0]), 1e6 * spent[0]))

    core.executor.forward, core.step, core.scheduler.lay_out = timed_forward, timed_step, noted_plan
    prompts = chat_prompts(size * (rounds + 2), SEED)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for number in range(rounds + 2):
        if number == 2:  # the first two warm up
            steps.clear()
        own = prompts[number * size : (number + 1) * size]
        llm.generate(own, params, speculation=SpeculationParams(is_enabled=is_on), show_progress=False)
    host, forwards = zip(*steps, strict=True)
    return {"requests": size, "drafts": is_on, "host_us": spread([*host]), "forward_us": spread([*forwards])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    cells = [measure(args.model, size, args.rounds, is_on=is_on) for is_on in (False, True) for size in (1, 16)]
    for cell in cells:
        host, forward = cell["host_us"]["median"], cell["forward_us"]["median"]
        print(f"{cell['requests']} requests, drafts {cell['drafts']}: host {host:.0f} us, forward {forward:.0f} us")
    print(write_results("host_time", {"model": args.model, "cells": cells}))


if __name__ == "__main__":
    main()
