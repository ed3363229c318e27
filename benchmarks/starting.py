"""How long starts take, by phase, and how much memory they take, beside OpenVINO's and llama.cpp's.

    python -m benchmarks.starting [--models bundled smollm2 430m] [--peers openvino llamacpp] [--starts 5]

Of each model: `serve` to its line "listening" (SERVING), and then to the first token of an answer; `generate` from
start to end, five tokens; LLM in a process; with empty caches ("first", once, of the first model) and with full ones
("warm"). Memory is that of all processes after an answer of 64 tokens: resident, and with shared pages split (PSS).
OpenVINO: a Python process with an LLMPipeline, the same answer. llama.cpp: its server until it is healthy. Peers have
what `python -m benchmarks.peers install` has made.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import spread, write_results
from benchmarks.peers import environments
from benchmarks.peers.models import gguf_export, model_folder, openvino_export
from benchmarks.peers.processes import PROC, pss_bytes, tree
from tools.real_model import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

MiB = 1 << 20
TIMEOUT_S, READY_S = 300.0, 90.0
OPENVINO = """
import sys, time
import openvino_genai as genai
pipeline = genai.LLMPipeline(sys.argv[1], "CPU")
pipeline.generate("Hello", max_new_tokens=1)
print("ready", flush=True)
pipeline.generate("Hello", max_new_tokens=64, ignore_eos=True)
print("answered", flush=True)
sys.stdin.read()
"""
IN_PROCESS = """
import sys, time
from batchserve import LLM, SamplingParams
llm = LLM(sys.argv[1])
llm.generate("Hello", SamplingParams(0.0, max_tokens=1), show_progress=False)
print("ready", flush=True)
llm.generate("Hello", SamplingParams(0.0, max_tokens=64, ignore_eos=True), show_progress=False)
print("answered", flush=True)
sys.stdin.read()
"""


def resident_mib(pid: int) -> list[int]:
    """Of each process of a tree, the first one first; shared pages count once for each."""
    found = []
    for one in tree(pid):
        with suppress(OSError):
            lines = (PROC / str(one) / "smaps_rollup").read_text().splitlines()
            found += [int(line.split()[1]) // 1024 for line in lines if line.startswith("Rss:")]
    return found


def memory(pid: int) -> dict[str, Any]:
    each = resident_mib(pid)
    return {"resident MiB": sum(each), "PSS MiB": (pss_bytes(pid) or 0) // MiB, "processes": each}


@contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], list[Any]]]:
    """The process, and what it says on standard error, as (seconds, line)."""
    began_s, said = time.perf_counter(), []
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append((time.perf_counter() - began_s, line.strip()))

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield process, said
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serve(folder: str, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "batchserve", "serve", "--model", folder, "--port", "0", "--no-http"]
    began_s = time.perf_counter()
    with started(command, environment) as (process, said):
        assert process.stdout is not None
        address = process.stdout.readline().strip().removeprefix("listening on ")
        serving_s = time.perf_counter() - began_s
        asked_s = time.perf_counter()
        ask = [sys.executable, "-m", "batchserve", "generate", "--server", address, "--prompt", "Hello"]
        subprocess.run([*ask, "--max-tokens", "64", "--ignore-eos"], capture_output=True, check=True, timeout=TIMEOUT_S)
        answered_s = time.perf_counter() - asked_s
        deadline_s = time.monotonic() + READY_S  # what compiles or loads drafters has ended then
        while not any("drafts are on" in line for _, line in said) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        phases = [(round(at, 2), line) for at, line in said if "batchserve" not in line[:60] and line]
        return {"serving s": serving_s, "an answer s": answered_s, "phases": phases, **memory(process.pid)}


def generate(folder: str, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "batchserve", "generate", "--model", folder, "--prompt", "Hello"]
    began_s = time.perf_counter()
    done = subprocess.run(
        [*command, "--max-tokens", "5"], capture_output=True, check=True, timeout=TIMEOUT_S,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.stdout
    return {"whole s": time.perf_counter() - began_s}


def scripted(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """A process that says when it has its first token, and when it has answered."""
    began_s = time.perf_counter()
    with started(command, environment) as (process, said):
        assert process.stdout is not None
        times = []
        for expected in ("ready", "answered"):
            while (line := process.stdout.readline().strip()) != expected:
                if process.poll() is not None:
                    raise SystemExit(f"{command[0]} ended: {said[-3:]} {line}")
            times.append(time.perf_counter() - began_s)
        found = {"first token s": times[0], **memory(process.pid)}
        assert process.stdin is not None
        process.stdin.close()
        return found


def llamacpp(name: str, folder: Path) -> dict[str, Any]:
    port = "18431"
    threads = str(len(os.sched_getaffinity(0)))
    command = [
        *(str(environments.llamacpp_server()), "--model", str(gguf_export(name, folder)), "--host", "127.0.0.1"),
        *("--port", port, "--threads", threads, "--ctx-size", "4096", "--parallel", "1"),
    ]
    began_s = time.perf_counter()
    with started(command, {}) as (process, _):
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                time.sleep(0.01)
        serving_s = time.perf_counter() - began_s
        asked = json.dumps({"prompt": "Hello", "n_predict": 64, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", asked)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read()
        return {"serving s": serving_s, **memory(process.pid)}


def typical(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of numbers; the phases of the run in the middle."""
    found: dict[str, Any] = {}
    for name in runs[0]:
        if name in ("phases", "processes"):
            found[name] = runs[len(runs) // 2][name]
        elif name.endswith("MiB"):
            found[name] = int(statistics.median(run[name] for run in runs))
        else:
            found[name] = spread([run[name] for run in runs])
    return found


def shown(found: dict[str, Any]) -> str:
    parts = [f"{name} {value['median']:.2f}" for name, value in found.items() if isinstance(value, dict)]
    return ", ".join([*parts, *(f"{value} {name}" for name, value in found.items() if name.endswith("MiB"))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bundled", "smollm2"])
    parser.add_argument("--peers", nargs="*", default=["openvino", "llamacpp"], choices=["openvino", "llamacpp"])
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--name", default="starting")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    peers = [peer for peer in args.peers if environments.is_installed(peer)]
    kept = {"XDG_CACHE_HOME": str(cache_folder().parent)}
    with tempfile.TemporaryDirectory() as empty:
        first = {"NUMBA_CACHE_DIR": f"{empty}/kernels", "XDG_CACHE_HOME": f"{empty}/cache"}
        for name in args.models:
            folder = model_folder(name)
            found: dict[str, Any] = {"weights MiB": (folder / "model.safetensors").stat().st_size // MiB}
            if name == args.models[0]:
                found["first: serve"] = typical([serve(str(folder), first)])
            found["first of this model: serve"] = typical(
                [serve(str(folder), {**first, "XDG_CACHE_HOME": f"{empty}/{name}"})]
            )
            ways = {
                "warm: serve": lambda: serve(str(folder), first),  # noqa: B023
                "warm: generate": lambda: generate(str(folder), first),  # noqa: B023
                "warm: LLM": lambda: scripted([sys.executable, "-c", IN_PROCESS, str(folder)], first),  # noqa: B023
            }
            if "openvino" in peers:
                export = str(openvino_export(name, folder))
                python = str(environments.python_of("openvino"))
                ways["OpenVINO"] = lambda: scripted([python, "-c", OPENVINO, export], kept)  # noqa: B023
            if "llamacpp" in peers:
                gguf_export(name, folder)
                ways["llama.cpp"] = lambda: llamacpp(name, folder)  # noqa: B023
            serve(str(folder), first)  # fills the caches
            runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for _ in range(args.starts):
                for way, run in ways.items():
                    runs[way].append(run())
            found |= {way: typical(each) for way, each in runs.items()}
            results[name] = found
            for way, each in found.items():
                print(f"{name}, {way}: {shown(each) if isinstance(each, dict) else each}", flush=True)
    print(f"written to {write_results(args.name, {'starts': args.starts, 'models': results})}")


if __name__ == "__main__":
    main()
