"""Who is measured: batchserve in process and served, and each peer's engine with and without its drafts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import environments
from benchmarks.peers.models import gguf_export, openvino_export
from benchmarks.peers.worker import Command

OWN = "batchserve"
IN_PROCESS, SERVED = "in process", "served"
WAYS = {"openvino": IN_PROCESS, "vllm": SERVED, "llamacpp": SERVED}
MAX_TOKENS = 1024  # of prompt and answer together
MAX_BATCHED_TOKENS = 2560  # rows of one step: 16 prompts of 128 and some; OpenVINO's own default is 256


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine as it is asked; `worker` names its process."""

    engine: str
    way: str
    drafts: bool
    worker: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.way}, drafts {'on' if self.drafts else 'off'}"


def lineup(peers: Sequence[str]) -> list[Contender]:
    """All that take part beside these peers. batchserve has one process a way, the peers one with and one without."""
    ways = sorted({WAYS[peer] for peer in peers}) or [IN_PROCESS]
    own = [Contender(OWN, way, drafts, f"{OWN} {way}") for way in ways for drafts in (False, True)]
    theirs = [
        Contender(peer, WAYS[peer], drafts, f"{peer} drafts {'on' if drafts else 'off'}")
        for peer in peers
        for drafts in (False, True)
    ]
    return own + theirs


def command(contender: Contender, model: str, folder: Path, max_requests: int) -> Command:
    """How its process is started. Makes the model's export where there is none yet."""
    sizes = {"max_requests": max_requests, "most_batched_tokens": MAX_BATCHED_TOKENS}
    if contender.engine == OWN:
        module = "worker_batchserve" if contender.way == IN_PROCESS else "worker_grpc"
        return Command(contender.worker, module, {"model": str(folder), **sizes})
    load: dict[str, Any] = {"kind": contender.engine, "drafts": contender.drafts}
    if contender.engine == "openvino":
        load |= {"model": str(openvino_export(model, folder)), **sizes}
        return Command(contender.worker, "worker_openvino", load, environments.python_of("openvino"))
    if contender.engine == "vllm":
        load |= {"command": _vllm(folder, contender.drafts, max_requests), "environment": vllm_environment()}
    else:
        load |= {
            "command": _llamacpp(gguf_export(model, folder), contender.drafts, max_requests),
            "environment": {},
        }
    return Command(contender.worker, "worker_http", load)


def _vllm(folder: Path, drafts: bool, max_requests: int) -> list[str]:
    """Its command `vllm serve` looks for a package named vllm, which this build is not."""
    return [
        *(str(environments.python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16"),
        *("--max-model-len", str(MAX_TOKENS), "--max-num-seqs", str(max_requests)),
        *("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--no-enable-prefix-caching"),
        *(("--speculative-config", '{"method": "suffix"}') if drafts else ()),
    ]


def vllm_environment() -> dict[str, str]:
    """All cores for computing, 1 GiB of K/V, and the OpenMP and malloc libraries that its documentation preloads."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    found = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    own = environments.folder_of("vllm") / "lib"
    places = ((own, "libiomp5.so"), *((Path("/usr/lib"), f"*/libtcmalloc{kind}.so.4") for kind in ("_minimal", "")))
    preloaded = [str(path) for place, pattern in places for path in place.glob(pattern)][:2]
    return {**found, "LD_PRELOAD": ":".join(preloaded)}


def _llamacpp(file: Path, drafts: bool, max_requests: int) -> list[str]:
    threads = str(len(os.sched_getaffinity(0)))
    return [
        *(str(environments.llamacpp_server()), "--model", str(file), "--host", "127.0.0.1", "--port", "{port}"),
        *("--parallel", str(max_requests), "--ctx-size", str(MAX_TOKENS * max_requests)),
        *("--threads", threads, "--threads-batch", threads, "--batch-size", str(MAX_BATCHED_TOKENS)),
        *("--cache-ram", "0"),
        *(("--spec-type", "ngram-mod") if drafts else ()),
    ]
