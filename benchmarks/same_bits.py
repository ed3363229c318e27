"""How many answers depend on anything but their own request: on drafts, neighbours, caches, threads, chunks, restarts.

    python -m benchmarks.same_bits [--models bundled smollm2 experts] [--dtype bfloat16] [--answers 1000] [--tokens 256]

Each way of serving has a process of its own. Its answers are compared token by token with those of the first way,
16 requests at once without drafts; on a native program none may differ. smollm2 is a real model (tools/real_model.py);
90m and experts have random weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, write_results

from batchserve import LLM, SamplingParams, SpeculationParams  # isort: skip
from benchmarks.peers.models import BUNDLED, REAL, model_folder, once, prompts
from tools.real_model import cache_folder

KINDS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8}}
# By name: options of the engine, and whether requests are drafted for.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "without drafts": ({"num_threads": 2}, False),
    "with drafts": ({"num_threads": 2}, True),
    "fixed drafts": ({"num_threads": 2, "decoding_length": 8}, True),
    "alone": ({"num_threads": 2, "max_num_seqs": 1}, False),
    "alone, with drafts": ({"num_threads": 2, "max_num_seqs": 1}, True),
    "one thread": ({"num_threads": 1}, True),
    "chunks of 48": ({"num_threads": 2, "prefill_chunk_size": 48}, True),
    "preempted": ({"num_threads": 2, "kv_cache_memory": 0}, True),  # as much as a few requests need
    "prompts cached": ({"num_threads": 2}, True),
}
SLOW = ("alone", "alone, with drafts", "one thread")  # take a tenth of the answers
AT_ONCE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[BUNDLED, REAL, "experts"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    path = RESULTS / "same_bits.json"  # models that are not asked about keep their figures
    cells: dict[str, Any] = json.loads(path.read_text())["models"] if path.exists() else {}
    for model in args.models:
        folder = experts_folder() if model == "experts" else model_folder(model)
        asked = prompts("90m" if model == "experts" else model, folder, args.answers, seed=7)
        facts = {"dtype": args.dtype, "answers": args.answers, "tokens": args.tokens}
        cells[model] = {**facts, "kinds": compare(folder, asked, args)}
        print(f"written to {write_results('same_bits', {'models': cells})}", flush=True)


def compare(folder: Path, asked: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """{kind of sampling: {way: answers that were compared, and those that differ}}."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        base: list[list[int]] = []
        found[kind] = {}
        for way in args.ways:
            count = max(1, len(asked) // 10) if way in SLOW else len(asked)
            answers = in_a_process(folder, way, kind, args.dtype, args.tokens, asked[:count])
            base = base or answers
            differ = sum(one != other for one, other in zip(base, answers, strict=False))
            found[kind][way] = {"compared": len(answers), "differ": differ}
            print(f"  {kind}, {way}: {differ} of {len(answers)} differ", flush=True)
    return found


def in_a_process(folder: Path, way: str, kind: str, dtype: str, tokens: int, asked: list[list[int]]) -> list[list[int]]:
    job = {"folder": str(folder), "way": way, "kind": kind, "dtype": dtype, "tokens": tokens, "asked": asked}
    command = [sys.executable, "-c", "from benchmarks.same_bits import answer; answer()"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr[-2000:]}")
    answers: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def answer() -> None:
    """One way's answers, from a job on standard input."""
    job = json.load(sys.stdin)
    options, is_drafted = WAYS[job["way"]]
    options = {"dtype": job["dtype"], "max_num_seqs": AT_ONCE, **options}
    longest = max(map(len, job["asked"])) + job["tokens"]
    if "kv_cache_memory" in options:
        options["kv_cache_memory"] = scarce_memory(job["folder"], options, longest)
    llm = LLM(job["folder"], max_model_len=longest, **options)
    params = [SamplingParams(**KINDS[job["kind"]], seed=i, max_tokens=job["tokens"]) for i in range(len(job["asked"]))]
    more: dict[str, Any] = {"speculation": SpeculationParams(is_drafted), "show_progress": False}
    if job["way"] == "prompts cached":
        llm.generate(job["asked"][:AT_ONCE], [SamplingParams(max_tokens=1)] * len(job["asked"][:AT_ONCE]), **more)
    print(json.dumps([each.token_ids for each in llm.generate(job["asked"], params, **more)]))


def scarce_memory(folder: str, options: dict[str, Any], longest: int) -> int:
    """Bytes of K/V for some four requests."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = 2 if options["dtype"] == "bfloat16" else 4
    return 4 * longest * 2 * heads * dim * size * config.num_hidden_layers


def experts_folder() -> Path:
    """A model with experts and random weights."""

    def make(out: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        sizes = {"vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
                 "num_key_value_heads": 4, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4,
                 "moe_intermediate_size": 128, "decoder_sparse_step": 1, "max_position_embeddings": 2048}  # fmt: skip
        config = AutoConfig.for_model("qwen3_moe", **sizes)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out)

    return once(cache_folder() / "peers" / "models" / "experts", make)


if __name__ == "__main__":
    main()
