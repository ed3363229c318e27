"""batchserve beside OpenVINO GenAI, vLLM and llama.cpp: tokens/s by requests at once, without and with drafts.

    python -m benchmarks.peers install [openvino vllm llamacpp]
    python -m benchmarks.peers [--quick] [--models bundled 90m smollm2 ...] [--peers ...] [--requests 1 2 4 8 16]

`install` makes each peer an environment of its own in the cache folder; peers without one are left out. OpenVINO is in
one process with its caller, as batchserve's LLM is; vLLM and llama.cpp serve over HTTP, batchserve over gRPC, on
loopback, and whole answers are asked for. All have the same weights and prompts, which are token ids, are greedy and
go on to the last token (ignore_eos): batches of N requests at once. Rounds are in turns, one engine computes at a
time, and idle ones stay loaded. Drafts: OpenVINO's prompt lookup, vLLM's suffix, llama.cpp's ngram-mod, batchserve's
mixture.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from batchserve.errors import BatchserveError
from benchmarks.common import environment, write_results
from benchmarks.peers import environments
from benchmarks.peers.contenders import MAX_BATCHED_TOKENS, MAX_TOKENS, Contender, command, lineup
from benchmarks.peers.environments import PEERS, PeerError
from benchmarks.peers.measure import Plan, lines, measure, memory, start, summary
from benchmarks.peers.models import MODELS, model_folder, prompts

SEED = 7
QUICK_S, LONG_S = 540.0, 7200.0  # no round begins later; the rest of the ten minutes is for the last round and the end
STARTS_SHARE = 0.6  # of a model's time: no engine is started later
MIN_S = 60.0  # for a model: one that would have less is left out
REQUESTS, QUICK_REQUESTS = (1, 2, 4, 8, 16), (1, 4, 16)
ROUNDS, QUICK_ROUNDS = 7, 3
DEFAULT_MODELS, QUICK_MODELS = ("bundled", "90m"), ("bundled",)


def say(line: str) -> None:
    print(line, flush=True)


def installed(peers: list[str]) -> list[str]:
    """Those that can be measured; of the others a line says how to install them."""
    found = [peer for peer in peers if environments.is_installed(peer)]
    for peer in peers:
        if peer not in found:
            say(f"{peer}: is not installed: python -m benchmarks.peers install {peer}")
    return found


def measure_model(name: str, peers: list[str], plan: Plan, deadline_s: float) -> dict[str, Any]:
    folder = model_folder(name)
    contenders = lineup(peers)
    say(f"{name}: loading {len({each.worker for each in contenders})} engines")
    with ExitStack() as stack:
        commands = {each.worker: command(each, name, folder, max(plan.requests)) for each in contenders}
        now_s = time.monotonic()
        workers = start(commands, stack, now_s + STARTS_SHARE * (deadline_s - now_s), say)
        asked = prompts(name, folder, plan.num_prompts, SEED)
        cells = measure(contenders, workers, plan, asked, deadline_s, say)
        found = [summary(cell, contenders, eos_of(folder)) for cell in cells]
        for cell in found:
            for line in lines(name, cell):
                say(line)
        load_s = {each: round(worker.load_s, 2) for each, worker in workers.items()}
        return {"cells": found, "resident_mb": memory(workers), "load_s": load_s}


def eos_of(folder: Path) -> int:
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(folder).eos_token_id
    return int(found[0] if isinstance(found, list) else found)


def versions(contenders: list[Contender]) -> dict[str, str]:
    known = {
        "openvino": environments.OPENVINO[1],
        "vllm": environments.VLLM[1],
        "llamacpp": environments.LLAMACPP,
    }
    return {name: version for name, version in known.items() if any(each.engine == name for each in contenders)}


def run(args: argparse.Namespace) -> None:
    started_s = time.monotonic()
    peers = installed(args.peers)
    if not peers:
        raise PeerError("no peer is installed")
    requests = args.requests or (QUICK_REQUESTS if args.quick else REQUESTS)
    plan = Plan(tuple(requests), args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS), args.tokens)
    end_s = started_s + (QUICK_S if args.quick else LONG_S)
    payload: dict[str, Any] = {
        "is_quick": args.quick,
        "rounds": plan.rounds,
        "max_tokens": plan.max_tokens,
        "most_batched_tokens": MAX_BATCHED_TOKENS,
        "peers": versions(lineup(peers)),
        "models": {},
    }
    say(f"{environment()['cpu']}, {platform.system()}")
    models = args.models or (QUICK_MODELS if args.quick else DEFAULT_MODELS)
    for i, name in enumerate(models):
        now_s = time.monotonic()
        if end_s - now_s < MIN_S:
            say(f"{name}: left out: time is up")
            continue
        deadline_s = now_s + (end_s - now_s) / (len(models) - i)
        payload["models"][name] = measure_model(name, peers, plan, deadline_s)
        payload["took_s"] = round(time.monotonic() - started_s, 1)
        say(str(write_results(args.name or ("peers_quick" if args.quick else "peers"), payload)))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="about ten minutes at most; written to peers_quick.json")
    made.add_argument("--models", nargs="+", choices=MODELS, help="default: bundled 90m; with --quick bundled")
    made.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    made.add_argument("--requests", nargs="+", type=int, help="numbers of requests at once (default: 1 2 4 8 16)")
    made.add_argument("--rounds", type=int, help=f"of each cell (default: {ROUNDS}; with --quick {QUICK_ROUNDS})")
    made.add_argument("--tokens", type=int, default=64, help="of each answer (default: 64)")
    made.add_argument("--name", help="of the JSON in benchmarks/results (default: peers or peers_quick)")
    return made


def main() -> int:
    try:
        if sys.argv[1:2] == ["install"]:
            installing = argparse.ArgumentParser(prog="python -m benchmarks.peers install")
            installing.add_argument("peers", nargs="*", metavar="PEER", help=f"{', '.join(PEERS)} (default: all)")
            names = installing.parse_args(sys.argv[2:]).peers or list(PEERS)
            unknown = [name for name in names if name not in PEERS]
            if unknown:
                installing.error(f"{', '.join(unknown)}: must be of {', '.join(PEERS)}")
            for name in names:
                environments.install(name)
            return 0
        args = parser().parse_args()
        for option, values in (("--requests", args.requests or []), ("--rounds", [args.rounds or 1])):
            if any(value < 1 for value in values):
                parser().error(f"{option} {' '.join(map(str, values))}: must be at least 1")
        if not 1 <= args.tokens <= MAX_TOKENS // 2:
            parser().error(f"--tokens {args.tokens}: must be in 1 to {MAX_TOKENS // 2}")
        run(args)
    except BatchserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
