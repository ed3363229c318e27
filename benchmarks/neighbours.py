"""Tokens per second beside other processes on the same cores, over those alone and over the fair share of them.

    python -m benchmarks.neighbours [--models bundled smollm2] [--requests 1 4 16] [--rounds 3]

batchserve (LLM, drafts off and on), OpenVINO (if installed) and transformers' generate, one at a time, in these
settings: alone; beside one and two busy processes of equal priority; beside one and two at the lowest priority (nice
19); on one core (all threads there); under a quota of 1.0 core (if this user may make control groups). A neighbour
computes and does not stream memory. The fair share of a setting is the CPU time that two plain busy loops get in the
engine's place, over twice the wall time. Engines stay loaded from setting to setting, except for the last two, so they
have to notice. Before each is timed, it answers for some seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import write_results
from benchmarks.peers import environments
from benchmarks.peers.contenders import MAX_BATCHED_TOKENS
from benchmarks.peers.models import model_folder, openvino_export, prompts
from benchmarks.peers.worker import Command, Worker

BUSY = "while True: pass"
GROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
SHARE_S, SETTLE_S = 3.0, 4.0
PROMPT_TOKENS = 32
SEED = 11


@dataclass(frozen=True, slots=True)
class Setting:
    """neighbours: how many, and their niceness. cores, quota: what an engine may use; None is all."""

    name: str
    neighbours: int = 0
    niceness: int = 0
    cores: int | None = None
    quota: float | None = None


LOADED = (
    Setting("alone"),
    Setting("one neighbour", 1),
    Setting("two neighbours", 2),
    Setting("one niced neighbour", 1, 19),
    Setting("two niced neighbours", 2, 19),
    Setting("alone again"),
)
STARTED = (Setting("one core", cores=1), Setting("quota of 1.0", quota=1.0))


@contextmanager
def neighbours(setting: Setting) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(setting.neighbours):
            process = subprocess.Popen([sys.executable, "-c", BUSY], preexec_fn=lambda: os.nice(setting.niceness))
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@contextmanager
def limited(setting: Setting) -> Iterator[None]:
    """This process, and what it starts, within the setting's cores or quota. Raises OSError if that is not allowed."""
    before = os.sched_getaffinity(0)
    try:
        if setting.cores is not None:
            os.sched_setaffinity(0, sorted(before)[: setting.cores])
        with _quota(setting.quota):
            yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _quota(cores: float | None) -> Iterator[None]:
    if cores is None:
        yield
        return
    top = next((group for group in GROUPS if (group / "cgroup.procs").exists()), GROUPS[-1])
    group, pid = top / f"batchserve-{os.getpid()}", str(os.getpid())
    group.mkdir()
    try:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{int(cores * 100_000)} 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))
        (group / "cgroup.procs").write_text(pid)
        yield
    finally:
        with suppress(OSError):
            (top / "cgroup.procs").write_text(pid)
        for _ in range(50):
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def fair_share() -> float:
    """The CPU time that two busy loops get now, over twice the wall time."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        time.sleep(0.3)
        began_s, before = time.perf_counter(), sum(map(_cpu_s, loops))
        time.sleep(SHARE_S)
        return (sum(map(_cpu_s, loops)) - before) / (2 * (time.perf_counter() - began_s))
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _cpu_s(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def commands(model: str, folder: Path, max_requests: int) -> dict[str, Command]:
    sizes = {"max_requests": max_requests, "most_batched_tokens": MAX_BATCHED_TOKENS, "model": str(folder)}
    found = {"batchserve": Command("batchserve", "worker_batchserve", {**sizes, "options": {"num_threads": None}})}
    if environments.is_installed("openvino"):
        load = {**sizes, "model": str(openvino_export(model, folder)), "drafts": False}
        found["openvino"] = Command("openvino", "worker_openvino", load, environments.python_of("openvino"))
    found["transformers"] = Command("transformers", "worker_transformers", sizes)
    return found


CONTENDERS = (("batchserve", False), ("batchserve", True), ("openvino", False), ("transformers", False))


def rates(
    workers: dict[str, Worker], asked: list[list[int]], sizes: list[int], rounds: int, tokens: int
) -> dict[str, dict[str, float]]:
    """Tokens/s by contender and number of requests: medians of rounds, after some seconds of answering.

    asked: prompts of this setting alone, since drafts come from what was answered before. transformers has one request.
    """
    found: dict[str, dict[str, float]] = {}
    for engine, drafts in CONTENDERS:
        if engine not in workers:
            continue
        name = f"{engine}, drafts {'on' if drafts else 'off'}"
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s:
            workers[engine].round(asked[-1:], tokens, drafts)
        of_sizes = {}
        for size in sizes if engine != "transformers" else sizes[:1]:
            taken = [
                workers[engine].round(asked[start * size : (start + 1) * size], tokens, drafts).tokens_per_s
                for start in range(rounds)
            ]
            of_sizes[str(size)] = statistics.median(taken)
        found[name] = of_sizes
    return found


def measure(model: str, sizes: list[int], rounds: int, tokens: int) -> dict[str, Any]:
    folder = model_folder(model)
    needed = max(sizes) * rounds + 1
    texts = prompts(model, folder, 2 * needed * len(LOADED + STARTED), SEED)
    long_enough = [prompt[:PROMPT_TOKENS] for prompt in texts if len(prompt) >= PROMPT_TOKENS]
    parts = iter([long_enough[start : start + needed] for start in range(0, len(long_enough), needed)])
    found: dict[str, Any] = {}
    made = commands(model, folder, max(sizes))
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(command)) for name, command in made.items()}
        for setting in LOADED:
            with neighbours(setting):
                found[setting.name] = {"fair share": fair_share(), **rates(workers, next(parts), sizes, rounds, tokens)}
            show(model, setting.name, found)
    for setting in STARTED:
        try:
            with limited(setting), ExitStack() as stack:
                workers = {name: stack.enter_context(Worker(command)) for name, command in made.items()}
                found[setting.name] = {"fair share": fair_share(), **rates(workers, next(parts), sizes, rounds, tokens)}
        except OSError as error:
            print(f"{model}, {setting.name}: left out: {error}", flush=True)
            continue
        show(model, setting.name, found)
    return found


def show(model: str, name: str, found: dict[str, Any]) -> None:
    """Prints a setting's rates, over those alone and the fair share."""
    share, alone = found[name]["fair share"], found["alone"]
    print(f"{model}, {name}: fair share {share:.2f}", flush=True)
    for contender, of_sizes in found[name].items():
        if contender == "fair share":
            continue
        cells = [
            f"{size}: {rate:7.1f} ({rate / alone[contender][size]:.2f}, of its share "
            f"{rate / alone[contender][size] / share:.2f})"
            for size, rate in of_sizes.items()
        ]
        print(f"  {contender:28} {'  '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bundled", "smollm2"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--name", default="neighbours")
    args = parser.parse_args()
    results = {name: measure(name, args.requests, args.rounds, args.tokens) for name in args.models}
    print(f"written to {write_results(args.name, {'tokens': args.tokens, 'rounds': args.rounds, 'models': results})}")


if __name__ == "__main__":
    main()
