"""Steps with the process's memory in huge pages, over steps with it in pages of 4 KiB.

    python -m benchmarks.huge_pages [--model bundled | 90m] [--rounds N] [--threads N] [--quick]

Two processes, because memory that lies in huge pages cannot be put back: they step in turn, and every round begins with
the other one. 16 requests decode what the bundled model has answered, forced through the random Llama of about 90M
parameters. Drafts are off, or of a fixed length: an adaptive one would be chosen by each process's own step times, and
steps of the same rows are compared here. "beside": all of a step but the forward.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from batchserve.runner.huge_pages import read_mappings
from benchmarks.adaptive.driver import Contender, fixed, median_interval
from benchmarks.adaptive.overhead import Parts, instrumented
from benchmarks.adaptive.workloads import Lab, Options, Workload, lab, new_drafter, own_text, say
from benchmarks.common import spread, write_results

MODELS = ("bundled", "90m")
SIZE = 16
LENGTHS = (0, 4)
STEPS, QUICK_STEPS = 40, 4
ROUNDS, QUICK_ROUNDS = 30, 2
DRAFTER = "mixture"
KINDS = {"plain": False, "huge": True}


def serve(pipe: Connection, model: str, has_huge_pages: bool, threads: int, workload: Workload, num_steps: int) -> None:
    """A child: bytes in huge pages when it is ready, then milliseconds of steps by part for every length asked for."""
    with lab(model, num_threads=threads, huge_pages=has_huge_pages) as bench:
        bench.use(new_drafter(DRAFTER), workload.warm)
        for length in LENGTHS:
            step_ms(bench, workload, fixed(length), num_steps)
        pipe.send(sum(mapping.huge for mapping in read_mappings()))
        while (length := pipe.recv()) is not None:
            pipe.send(step_ms(bench, workload, fixed(length), num_steps))


def step_ms(bench: Lab, workload: Workload, contender: Contender, num_steps: int) -> dict[str, float]:
    """Medians of so many steps; the first ones behind the other process's turn are not among them."""
    parts = Parts()
    bench.driver.run(workload.records, [(SIZE, SIZE * 4)], contender)
    with instrumented(bench, parts):
        bench.driver.run(workload.records, [(SIZE, SIZE * num_steps)], contender)
    forward = [step["forward"] for step in parts.steps]
    whole = [sum(step.values()) for step in parts.steps]
    beside = [all_s - forward_s for all_s, forward_s in zip(whole, forward, strict=True)]
    return {
        name: statistics.median(of) * 1e3 for name, of in (("forward", forward), ("beside", beside), ("step", whole))
    }


def measure(model: str, workload: Workload, threads: int, rounds: int, num_steps: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes: dict[str, Any] = {}
        for kind, has_huge_pages in KINDS.items():
            pipes[kind], theirs = context.Pipe()
            arguments = (theirs, model, has_huge_pages, threads, workload, num_steps)
            child = context.Process(target=serve, args=arguments, daemon=True)
            child.start()
            theirs.close()  # or nobody would notice here that the child has ended
            stack.callback(child.join)
            stack.callback(pipes[kind].close)
        held = {kind: pipe.recv() for kind, pipe in pipes.items()}
        found: dict[int, dict[str, list[dict[str, float]]]] = {n: {kind: [] for kind in KINDS} for n in LENGTHS}
        for number in range(rounds):
            for length in LENGTHS:
                for kind in list(KINDS)[:: -1 if number % 2 else 1]:
                    pipes[kind].send(length)
                    found[length][kind].append(pipes[kind].recv())
        for pipe in pipes.values():
            pipe.send(None)
    cells = {fixed(length).name: compared(by["huge"], by["plain"]) for length, by in found.items()}
    return {"huge_mib": {kind: num_bytes >> 20 for kind, num_bytes in held.items()}, "drafts": cells}


def compared(huge: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, Any]:
    """Round by round: milliseconds with huge pages over those without."""
    return {
        part: {
            "plain_ms": spread([each[part] for each in plain]),
            "huge_over_plain": median_interval([a[part] / b[part] for a, b in zip(huge, plain, strict=True)]),
        }
        for part in plain[0]
    }


def main() -> None:
    started_s = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="only this one (default: all)")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each process (default: 1)")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; nothing is written")
    args = parser.parse_args()
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    num_steps = QUICK_STEPS if args.quick else STEPS
    workload = own_text(Options(None, args.quick, DRAFTER, ""))
    results: dict[str, Any] = {}
    for model in (args.model,) if args.model else MODELS:
        results[model] = measure(model, workload, args.threads, rounds, num_steps)
        say(f"{model}: {results[model]['huge_mib']} MiB in huge pages")
        for drafts, cell in results[model]["drafts"].items():
            for part, of in cell.items():
                ratio = of["huge_over_plain"]
                shown = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
                say(f"  drafts {drafts}, {part}: {of['plain_ms']['median']:.2f} ms, with huge pages x {shown}")
    about = {"requests": SIZE, "steps_of_a_round": num_steps, "rounds": rounds, "threads_of_a_process": args.threads}
    if not args.quick:
        took_s = round(time.perf_counter() - started_s, 1)
        say(str(write_results("huge_pages", {**about, "took_s": took_s, "models": results})))


if __name__ == "__main__":
    main()
