"""Train the bundled model: `python -m training.train --out DIR --minutes 120`.

Tokens of answers weigh ANSWER_WEIGHT, those of prompts PROMPT_WEIGHT. Matrices are trained with Muon, embeddings
and norms with AdamW. The learning rate follows a cosine over the given minutes, so the budget is time, not steps.
`--resume` continues from a checkpoint with a fresh schedule.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .corpus import Corpus, build_corpora, read_sources
from .tasks import sample_example
from .tokenizer import VOCAB_SIZE, train_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSWER_WEIGHT, PROMPT_WEIGHT = 1.0, 0.1
MAX_POSITIONS = 4096
EOS_ID, USER_ID, ASSISTANT_ID = 1, 2, 3


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=EOS_ID,
        initializer_range=0.03,
    )


def encode(tokenizer: PreTrainedTokenizerFast, prompt: str, answer: str) -> tuple[list[int], list[float]]:
    """Token ids of one chat turn and the loss weight of each as a target."""
    head = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    tail = [*tokenizer(answer, add_special_tokens=False)["input_ids"], EOS_ID]
    ids = [0, USER_ID, *head, ASSISTANT_ID, *tail]
    return ids, [PROMPT_WEIGHT] * (len(head) + 3) + [ANSWER_WEIGHT] * len(tail)


def batches(
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    seed: int,
    rows: int,
    length: int,
    shares: dict[str, float] | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Packed rows (ids, target weights), each [rows, length + 1]; every row starts with a whole example."""
    rng = random.Random(seed)
    while True:
        ids_rows, weight_rows = [], []
        while len(ids_rows) < rows:
            ids: list[int] = []
            weights: list[float] = []
            while len(ids) < length + 1:
                example = sample_example(corpus, rng, shares)
                more_ids, more_weights = encode(tokenizer, example.prompt, example.answer)
                if len(more_ids) > length:
                    continue
                ids += more_ids
                weights += more_weights
            ids_rows.append(ids[: length + 1])
            weight_rows.append(weights[: length + 1])
        yield torch.tensor(ids_rows), torch.tensor(weight_rows)


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, float]:
    """(weighted loss, mean loss of the answer tokens); the head runs on the weighted targets only."""
    targets, weight = ids[:, 1:].reshape(-1), weights[:, 1:].reshape(-1)
    # The prompts' small weight is kept in the mean by scoring a tenth of their tokens at full weight.
    kept = (weight >= ANSWER_WEIGHT) | (torch.rand_like(weight) < PROMPT_WEIGHT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden.reshape(-1, hidden.shape[-1])[kept])
    losses = F.cross_entropy(logits.float(), targets[kept], reduction="none")
    answers = weight[kept] >= ANSWER_WEIGHT
    return losses.mean(), losses[answers].mean().item()


def optimizers(model: LlamaForCausalLM, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def _share(text: str) -> tuple[str, float]:
    name, weight = text.split("=")
    return name, float(weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--rows", type=int, default=14)
    parser.add_argument("--length", type=int, default=288)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", type=Path)
    parser.add_argument(
        "--share", type=_share, action="append", default=[], metavar="TASK=WEIGHT", help="another share of a task"
    )
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler; about 15%% faster")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    texts = read_sources()
    train_corpus, held_out = build_corpora(texts)
    if args.resume:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.resume)
        model = LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(texts[:900], MAX_POSITIONS)
        model = LlamaForCausalLM(model_config())
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f}M parameters, {len(train_corpus.functions)} functions", flush=True)
    train_loop(args, model, tokenizer, train_corpus, held_out)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint in bf16, whole or not at all."""
    partial = out.with_name(out.name + ".partial")
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    state.pop("lm_head.weight", None)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(partial, state_dict=state)
    tokenizer.save_pretrained(partial)
    out.mkdir(parents=True, exist_ok=True)
    for path in partial.iterdir():
        path.replace(out / path.name)


def train_loop(
    args: argparse.Namespace,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    train_corpus: Corpus,
    held_out: Corpus,
) -> None:
    stream = batches(tokenizer, train_corpus, args.seed, args.rows, args.length, dict(args.share))
    checks = [next(batches(tokenizer, held_out, 10_000 + i, args.rows, args.length)) for i in range(3)]
    opts = optimizers(model, args.lr, args.lr)
    if args.compile:
        model.model.compile()
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "loss_curve.jsonl").open("a")
    start, budget, step, smoothed = time.time(), args.minutes * 60, 0, None
    while (elapsed := time.time() - start) < budget:
        progress = elapsed / budget
        scale = min(1.0, (step + 1) / 60) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.lr * scale
        loss, answer_loss = loss_of(model, *next(stream))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        step += 1
        smoothed = answer_loss if smoothed is None else 0.95 * smoothed + 0.05 * answer_loss
        if step % 50 == 0:
            with torch.inference_mode():
                check = sum(loss_of(model, *batch)[1] for batch in checks) / len(checks)
            row = {
                "minutes": round(elapsed / 60, 2),
                "step": step,
                "tokens_millions": round(step * args.rows * args.length / 1e6, 3),
                "train_answer_loss": round(smoothed, 4),
                "held_out_answer_loss": round(check, 4),
            }
            log.write(json.dumps(row) + "\n")
            log.flush()
            print(row, flush=True)
        if step % 250 == 0:
            save(model, tokenizer, args.out)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
