"""How often a bfloat16 forward's greedy token is that of a float32 forward: native program and eager modules.

    python -m benchmarks.agreement [--model smollm2] [--tokens 20000]

Texts of the bundled sets are given to all three as they are, token by token of the same context (teacher forcing), in
prompts of at most 512 tokens. smollm2 is a real model (tools/real_model.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import write_results

import numpy as np  # isort: skip
import torch  # isort: skip
from transformers import AutoModelForCausalLM  # isort: skip

from batchserve.config import EngineConfig  # isort: skip
from batchserve.files import bundled_sets
from batchserve.request import GREEDY
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.native_runner import NativeRunner
from batchserve.runner.ragged_batch import RequestRows, build_batch
from batchserve.runner.tokenizer import load_tokenizer
from batchserve.startup.build import build_engine
from benchmarks.peers.models import REAL, model_folder

LONGEST = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=REAL)
    parser.add_argument("--tokens", type=int, default=20_000)
    args = parser.parse_args()
    folder = model_folder(args.model)
    exact, eager = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
                    for dtype in (torch.float32, torch.bfloat16))  # fmt: skip
    config = EngineConfig(str(folder), dtype="bfloat16", drafter="none", max_model_len=LONGEST, max_num_seqs=1)
    built = build_engine(config)
    agree, total = {"native program": 0, "eager": 0}, 0
    for ids in texts(folder, args.tokens):
        expected = greedy(exact, ids)
        agree["eager"] += int((greedy(eager, ids) == expected).sum())
        agree["native program"] += int((logits_of(built.core.executor, ids).argmax(-1) == expected.numpy()).sum())
        total += len(ids)
    shares = {way: round(count / total, 5) for way, count in agree.items()}
    facts = {"model": args.model, "tokens": total, "execution": built.info.execution,
             "instruction_set": built.info.instruction_set, "agree_with_float32": shares}  # fmt: skip
    print(json.dumps(facts))
    print(f"written to {write_results('agreement', facts)}")


def texts(folder: Path, num_tokens: int) -> Iterator[list[int]]:
    """Token ids of prompts and answers, LONGEST at once, num_tokens in all."""
    tokenizer: Any = load_tokenizer(str(folder), EngineConfig(str(folder)))
    ids: list[int] = []
    for line in (line for path in bundled_sets().values() for line in path.read_text().splitlines()):
        record = json.loads(line)
        ids += tokenizer(" ".join(str(record[name]) for name in ("prompt", "response") if name in record))["input_ids"]
        if len(ids) >= num_tokens:
            break
    ids = ids[:num_tokens]
    yield from (ids[start : start + LONGEST] for start in range(0, len(ids), LONGEST))


@torch.inference_mode()
def greedy(model: Any, ids: list[int]) -> torch.Tensor:
    tokens: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().argmax(-1)
    return tokens


def logits_of(runner: NativeRunner | ModelRunner, ids: list[int]) -> np.ndarray:
    """Of every token, in one step."""
    allocator, count = runner.allocator, len(ids)
    allocator.reserve("text", count)
    rows = RequestRows("text", 0, ids, [*range(-1, count - 1)], 1, GREEDY)
    logits = runner.forward(build_batch([rows]))
    allocator.release("text")
    return logits


if __name__ == "__main__":
    main()
